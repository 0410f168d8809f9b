"""Attention to a part of the context (`--sparse-attention METHOD:option=value,...`): what is read of it, and kept.

A method makes classes of layers (`KVLayers`) of a model whose layers are alike; memory, prices and jumps follow from
these. Memory that forgets (StreamingLLM, H2O) holds as much as is read. Memory that keeps everything (Quest, Double
Sparsity) gains bandwidth alone, and has an index beside the KV. A prompt that is compressed when it has been computed
(SnapKV) is a shorter one from then on: its layers are as they were (`KeptOfPrompt`). Sources:

- StreamingLLM: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024 (arXiv 2309.17453);
- H2O: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference ...", NeurIPS 2023 (arXiv 2306.14048);
- Quest: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024 (2406.10774);
- Double Sparsity: Yang et al., "Post-Training Sparse Attention with Double Sparsity", 2024 (arXiv 2408.07092);
- ClusterKV: Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space ...", DAC 2025 (2412.03213);
- SnapKV: Li et al., "SnapKV: LLM Knows What You Are Looking for before Generation", NeurIPS 2024 (2404.14469);
- PyramidInfer: Yang et al., "PyramidInfer: Pyramid KV Cache Compression ...", Findings of ACL 2024 (2405.12532);
- InfiniGen: Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
  Management", OSDI 2024 (2406.19707);
- MiniCache: Liu et al., "MiniCache: KV Cache Compression in Depth Dimension ...", NeurIPS 2024 (2405.14366);
- KVPress: NVIDIA's library of methods that drop a share of a prompt's KV (github.com/NVIDIA/kvpress).

Not simulated: what it does to answers. Not priced: choosing the tokens (top-k, H2O's sums of scores), and reading them
where they do not lie together. Every KV head reads as many tokens, whatever query heads share it.
"""

from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

import msgspec

from sim.errors import UserError
from sim.named_options import number, read_named
from sim.specs.kv_format import KeptOfPrompt, KVLayers
from sim.specs.model_spec import ModelSpec

MOST_TOKENS = 1 << 24
"""Of a budget."""


def _tokens(help: str, default: Any = MISSING) -> Any:  # noqa: ANN401
    return number(MOST_TOKENS, default, help, least=1)


def _share(help: str, default: Any = MISSING) -> Any:  # noqa: ANN401
    return number(1, default, help, above=True)


def _dense_layers(default: int) -> Any:  # noqa: ANN401
    return number(MOST_TOKENS, default, "first layers that attend to all")


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """What a method can be told.

    Attributes:
        forgets: memory holds no more than is read.
        needs_whole_prompts: what is kept is chosen when a prompt has been computed as a whole.
    """

    name: ClassVar[str]
    forgets: ClassVar[bool] = False
    needs_whole_prompts: ClassVar[bool] = False

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        """The classes of the model's layers."""
        return _like(model.num_layers)

    @property
    def kept_of_prompt(self) -> KeptOfPrompt | None:
        """What stays of a prompt that has been computed; None: all that layers keep."""
        return None


def _like(num_layers: int, **terms: Any) -> tuple[KVLayers, ...]:  # noqa: ANN401
    return (KVLayers(num_layers=num_layers, num_stored=num_layers, **terms),)


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(SparseAttention):
    """The first tokens and the last ones, for prompts as for decodes; reads and holds min(c, sinks + window)."""

    name: ClassVar[str] = "streaming-llm"
    forgets: ClassVar[bool] = True
    window: int = _tokens("last tokens, the query's own included")
    sinks: int = _tokens("first tokens", 4)

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        return _like(model.num_layers, window=self.sinks + self.window)


@dataclass(frozen=True, kw_only=True)
class H2O(SparseAttention):
    """Heavy hitters and the last tokens: reads and holds min(c, budget). Prompts attend to all.

    Assumed: a number of tokens, where the paper's budget is a share of the prompt. The KV that a prompt gives up is one
    layer's at a time and counts as activations.
    """

    name: ClassVar[str] = "h2o"
    forgets: ClassVar[bool] = True
    needs_whole_prompts: ClassVar[bool] = True
    budget: int = _tokens("tokens kept, heavy hitters and recent ones together")

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        return _like(model.num_layers, window=self.budget, prompts_see_all=True)


@dataclass(frozen=True, kw_only=True)
class SnapKV(SparseAttention):
    """The tokens of a prompt that its last ones attend to, and all of the answer: min(prompt, budget) + answer.

    PyramidKV and ZigZagKV share the same total among layers otherwise, Ada-KV among heads: with their mean budget they
    hold and read as much. Assumed: all layers keep their prompt until it has been computed.
    """

    name: ClassVar[str] = "snapkv"
    forgets: ClassVar[bool] = True
    budget: int = _tokens("tokens kept of a prompt, on average over the layers")

    @property
    def kept_of_prompt(self) -> KeptOfPrompt:
        return KeptOfPrompt(self.budget)


@dataclass(frozen=True, kw_only=True)
class KVPress(SparseAttention):
    """A share of every prompt is dropped when it has been computed: prompt (1 - ratio) + answer."""

    name: ClassVar[str] = "kvpress"
    forgets: ClassVar[bool] = True
    compression_ratio: float = _share("of a prompt's tokens, those dropped")

    @property
    def kept_of_prompt(self) -> KeptOfPrompt:
        return KeptOfPrompt(None, self.compression_ratio)


@dataclass(frozen=True, kw_only=True)
class PyramidInfer(SparseAttention):
    """Fewer tokens the deeper the layer, of prompt and answer alike: reads and holds a share of the context.

    Assumed: prompts attend to all, where deeper layers attend to fewer.
    """

    name: ClassVar[str] = "pyramidinfer"
    forgets: ClassVar[bool] = True
    needs_whole_prompts: ClassVar[bool] = True
    share: float = _share("of the tokens, those kept, on average over the layers")

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        return _like(model.num_layers, share=self.share, kept_share=self.share, prompts_see_all=True)


@dataclass(frozen=True, kw_only=True)
class MiniCache(SparseAttention):
    """Deeper layers merge their KV by twos: everything is read, and of a pair one direction a token is kept.

    Beside it each layer has the length of its keys and of its values, 16 bits a token, and both keep the tokens that do
    not merge. Not priced: merging, and restoring a layer's KV. Prompts merge as they are computed.
    """

    name: ClassVar[str] = "minicache"
    forgets: ClassVar[bool] = True
    retained: float = number(1, 0.05, "of the tokens, those that do not merge")
    start: float = number(1, 0.5, "of the layers, the first that do not merge")

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        whole = round(self.start * model.num_layers)
        merged = (model.num_layers - whole) // 2 * 2
        lengths = 4 / model.kv_bytes_per_token_layer()
        plain = _like(model.num_layers - merged) if merged < model.num_layers else ()
        return (*plain, *(_like(merged, kept_share=0.5 + self.retained + lengths) if merged else ()))


def _selected(model: ModelSpec, dense_layers: int, **terms: float) -> tuple[KVLayers, ...]:
    """`dense_layers` layers that read all, and the others by `terms`."""
    if dense_layers >= model.num_layers:
        raise UserError(
            f"--sparse-attention: dense-layers={dense_layers} are all {model.num_layers} layers of {model.name}: "
            "give fewer"
        )
    sparse = _like(model.num_layers - dense_layers, keeps_all=True, prompts_see_all=True, **terms)
    return (*(_like(dense_layers) if dense_layers else ()), *sparse)


@dataclass(frozen=True, kw_only=True)
class Quest(SparseAttention):
    """The pages whose keys' bounds say that they may matter: reads min(c, budget), and a minimum and a maximum a page.

    These two are as many bytes as a token's key and value: c / page tokens more. Assumed: bounds are read below the
    budget as well, where Quest skips them.
    """

    name: ClassVar[str] = "quest"
    budget: int = _tokens("tokens attended to")
    page: int = _tokens("tokens of a page", 16)
    dense_layers: int = _dense_layers(2)

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        return _selected(model, self.dense_layers, window=self.budget, index_share=1 / self.page)


@dataclass(frozen=True, kw_only=True)
class ClusterKV(SparseAttention):
    """Clusters of tokens with like keys: reads min(c, budget), and a mean key a cluster, which is half a token's KV.

    Assumed: KV stays on the GPU, where the original keeps it on the host and caches clusters; `dense-layers` as Quest.
    """

    name: ClassVar[str] = "clusterkv"
    budget: int = _tokens("tokens attended to")
    cluster: int = _tokens("tokens of a cluster, on average", 80)
    dense_layers: int = _dense_layers(2)

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        return _selected(model, self.dense_layers, window=self.budget, index_share=1 / (2 * self.cluster))


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity(SparseAttention):
    """A share of the tokens, found by some channels of their keys (labels): reads c (share + labels)."""

    name: ClassVar[str] = "double-sparsity"
    share: float = _share("of the tokens, those attended to", 1 / 16)
    channels: float = _share("of a key's channels, those in its label", 1 / 16)
    label_bits: int = _tokens("of an element of a label", 4)
    dense_layers: int = _dense_layers(0)

    def layers(self, model: ModelSpec) -> tuple[KVLayers, ...]:
        # Keys are half of KV.
        labels = self.channels / 2 * self.label_bits / (8 * model.kv_dtype_bytes)
        return _selected(model, self.dense_layers, share=self.share, index_share=labels)


@dataclass(frozen=True, kw_only=True)
class InfiniGen(DoubleSparsity):
    """As Double Sparsity, by channels of skewed keys in full width; made for KV on the host (`kvpr`).

    Assumed: a fixed share, the paper's most; the original fetches fewer where scores say so, the same for all layers.
    """

    name: ClassVar[str] = "infinigen"
    share: float = _share("of the tokens, those fetched", 0.2)
    channels: float = _share("of a key's channels, those that stay on the GPU", 0.2)
    label_bits: int = _tokens("of an element of these", 16)
    dense_layers: int = _dense_layers(1)


METHODS: dict[str, type[SparseAttention]] = {
    method.name: method
    for method in (
        StreamingLLM,
        H2O,
        SnapKV,
        KVPress,
        PyramidInfer,
        MiniCache,
        Quest,
        ClusterKV,
        DoubleSparsity,
        InfiniGen,
    )
}


def parse_sparse_attention(text: str) -> SparseAttention:
    """The method of `NAME:option=value,...`. UserError where there is none such, or an option is wrong or missing."""
    return read_named("--sparse-attention", "method", text, METHODS)


def with_sparse_attention(model: ModelSpec, method: SparseAttention) -> ModelSpec:
    """The same model, attending to a part of the context. UserError where its layers are not alike or keep no KV."""
    if model.kv_layers or model.mla or model.gdn:
        what = "latents" if model.mla else "a state" if model.gdn else "a window, or share KV"
        raise UserError(
            f"--sparse-attention {method.name}: layers of {model.name} keep {what}, of which nothing is selected here: "
            "leave it out, or take a model whose layers all keep keys and values"
        )
    return msgspec.structs.replace(model, kv_layers=method.layers(model))

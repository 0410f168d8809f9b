"""The parts by name, and how a system is built from names: what `composition` and `--policy NAME:part=...` speak.

Memory comes first, then the stage and the eviction that steer it, then the others. A part reads its options from the
preset where that has them, else from options of its own kind given with it, else from their defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Generic, TypeVar

from sim.engine.limits import Deployment, Limits
from sim.engine.scheduler import Parts
from sim.errors import UserError
from sim.parts.base import Admission, Batching, Eviction, Memory, Order, Stage
from sim.parts.direct import Direct
from sim.parts.fcfs import Fcfs
from sim.parts.iteration_level import IterationLevel
from sim.parts.layer_blocks import LayerBlocks
from sim.parts.layer_offload import LayerOffload
from sim.parts.mlfq import Mlfq
from sim.parts.paged import PagedMemory
from sim.parts.prefill_first import PrefillFirst
from sim.parts.proactive_swap import ProactiveSwap
from sim.parts.promote import Promote
from sim.parts.quanta import Quanta
from sim.parts.recompute import Recompute
from sim.parts.request_level import RequestLevel
from sim.parts.reserved import ReservedMemory
from sim.parts.slack import SlackAdmission
from sim.parts.stall_free import StallFree
from sim.parts.stream import Stream
from sim.parts.swap import Swap
from sim.parts.vllm055_chunked import Vllm055Chunked
from sim.parts.watermark import Watermark
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.layerkv_options import Equations, LayerKVOptions, remembered

if TYPE_CHECKING:
    from sim.systems.base import Policy

KINDS = ("order", "batching", "admission", "memory", "eviction", "stage")
MIN_BATCHED_TOKENS = 2048
CHUNKED_BATCHED_TOKENS = 512
"""vLLM 0.5.5's token budgets: max(max_model_len, 2048), with chunked prefill 512."""

Options = TypeVar("Options")


class Builder:
    """Builds one system for one engine."""

    def __init__(
        self,
        policy: "Policy",
        names: Mapping[str, str],
        options: tuple[object, ...],
        limits: Limits,
        deployment: Deployment,
    ) -> None:
        self.policy, self.names, self.limits, self.deployment = policy, names, limits, deployment
        self._options = options

    def options(self, kind: type[Options]) -> Options:
        """The options of a kind: the preset itself, those given with a part, or the defaults."""
        for found in (self.policy, *self._options):
            if isinstance(found, kind):
                return found
        return kind()

    def parts(self) -> Parts:
        """One part of each kind. UserError where they do not go together."""
        names = self.names
        self.memory = MEMORIES[names["memory"]].build(self)
        self.stage = STAGES[names["stage"]].build(self)
        if isinstance(self.memory, LayerBlocks) and not self.stage.brings_layers_back:
            raise UserError("memory=layers leaves layers on the host: it goes with stage=promote or stage=stream")
        return Parts(
            order=ORDERS[names["order"]].build(self),
            memory=self.memory,
            admission=ADMISSIONS[names["admission"]].build(self),
            eviction=EVICTIONS[names["eviction"]].build(self),
            stage=self.stage,
            batching=BATCHINGS[names["batching"]].build(self),
        )

    # -- what several need -------------------------------------------------------------------------------------------

    def equations(self) -> Equations:
        """LayerKV's Eq. 3 and 4."""
        return Equations(self.deployment, self.limits.block_size, printed=self.options(LayerKVOptions).printed)

    def layer_blocks(self, wanted_by: str) -> LayerBlocks:
        """The memory, which must hold layers apart."""
        if not isinstance(self.memory, LayerBlocks):
            raise UserError(f"{wanted_by} moves single layers: it goes with memory=layers")
        return self.memory


Part = TypeVar("Part", covariant=True)


@dataclass(frozen=True)
class Known(Generic[Part]):
    """A part that has a name: how to build it, and the options that it reads."""

    build: Callable[[Builder], Part]
    options: type | None = None


@dataclass(frozen=True)
class KnownBatching(Known[Batching]):
    """A batching and the budget that goes with it."""

    splits_prompts: bool | None = None
    """None: as `--enable-chunked-prefill` says."""
    tokens: Callable[[int, bool], int] = lambda length, chunked: (
        CHUNKED_BATCHED_TOKENS if chunked else max(length, MIN_BATCHED_TOKENS)
    )
    """Default token budget, from the longest context and whether prompts are split."""


def _layer_blocks(b: Builder) -> LayerBlocks:
    return LayerBlocks(b.limits, b.deployment.model.num_layers, remembered(b.equations().minimum_layers))


def _slack(b: Builder) -> SlackAdmission:
    options = b.options(LayerKVOptions)
    return SlackAdmission(
        b.limits.num_gpu_blocks,
        b.equations().prefill_s,
        options.tpot_slo_ms / 1e3,
        drop_irrecoverable=options.drop_irrecoverable,
        lengths_known=options.lengths_known,
    )


def _layer_offload(b: Builder) -> LayerOffload:
    options = b.options(LayerKVOptions)
    if not isinstance(b.stage, Promote):
        raise UserError("eviction=layer-offload parks whom it offloads: it goes with stage=promote or stage=stream")
    return LayerOffload(
        b.layer_blocks("eviction=layer-offload"),
        b.stage,
        horizon_steps=options.horizon_steps,
        threshold=options.threshold,
        one_block_a_step=options.printed,
        lengths_known=options.lengths_known,
    )


def _stream(b: Builder) -> Stream:
    options = b.options(LayerKVOptions)
    return Stream(b.layer_blocks("stage=stream"), options.tpot_slo_ms / 1e3 if options.slo_aware else None)


def _vllm055(b: Builder) -> Batching:
    return Vllm055Chunked() if b.limits.enable_chunked_prefill else PrefillFirst()


def _mlfq(b: Builder) -> Mlfq:
    options = b.options(MlfqOptions)
    return Mlfq(
        b.deployment.cost.prefill_s,
        quantum_s=options.quantum_ms / 1e3,
        factor=options.quantum_factor,
        num_levels=options.num_levels,
        starvation_s=options.starvation_s,
        check_every=options.starvation_check,
    )


ORDERS: dict[str, Known[Order]] = {"fcfs": Known(lambda b: Fcfs()), "mlfq": Known(_mlfq, MlfqOptions)}
MEMORIES: dict[str, Known[Memory]] = {
    "paged": Known(lambda b: PagedMemory(b.limits)),
    "reserved": Known(lambda b: ReservedMemory(b.limits)),
    "layers": Known(_layer_blocks, LayerKVOptions),
}
ADMISSIONS: dict[str, Known[Admission]] = {
    "watermark": Known(lambda b: Watermark(b.limits.num_gpu_blocks)),
    "memory": Known(lambda b: Watermark(b.limits.num_gpu_blocks, 0.0)),
    "slack": Known(_slack, LayerKVOptions),
}
EVICTIONS: dict[str, Known[Eviction]] = {
    "recompute": Known(lambda b: Recompute()),
    "swap": Known(lambda b: Swap()),
    "layer-offload": Known(_layer_offload, LayerKVOptions),
    "proactive-swap": Known(lambda b: ProactiveSwap(b.options(MlfqOptions).min_free_blocks), MlfqOptions),
}
STAGES: dict[str, Known[Stage]] = {
    "direct": Known(lambda b: Direct()),
    "promote": Known(lambda b: Promote(b.layer_blocks("stage=promote")), LayerKVOptions),
    "stream": Known(_stream, LayerKVOptions),
}
BATCHINGS: dict[str, KnownBatching] = {
    "vllm": KnownBatching(_vllm055),
    "request-level": KnownBatching(lambda b: RequestLevel(), splits_prompts=False),
    "iteration-level": KnownBatching(lambda b: IterationLevel(), splits_prompts=False),
    "sarathi": KnownBatching(lambda b: StallFree(1), splits_prompts=True),
    "fastgen": KnownBatching(lambda b: StallFree(), splits_prompts=True, tokens=lambda length, chunked: 768),
    "quanta": KnownBatching(lambda b: Quanta(), splits_prompts=False),
}
CATALOGUE: dict[str, Mapping[str, Known[object]]] = {
    "order": ORDERS,
    "batching": BATCHINGS,
    "admission": ADMISSIONS,
    "memory": MEMORIES,
    "eviction": EVICTIONS,
    "stage": STAGES,
}
"""Kind -> name -> part."""


def default_tokens(batching: str, max_model_len: int, *, chunked: bool) -> int:
    """The token budget of a batching where the user names none."""
    return BATCHINGS[batching].tokens(max_model_len, chunked)


def known_part(kind: str, name: str) -> Known[object]:
    """The part of that kind and name; UserError with the nearest right one otherwise."""
    found = CATALOGUE[kind].get(name)
    if found is None:
        near = get_close_matches(name, CATALOGUE[kind], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{kind}={name}: no such part; {hint}known: {', '.join(CATALOGUE[kind])}")
    return found

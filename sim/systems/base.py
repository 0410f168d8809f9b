"""`Policy`: a named preset of parts. Its fields are its options; `--policy NAME:option=value` and flags set them.

The contract of a preset:

- It is a frozen dataclass whose `composition` names one part of each kind (`sim.parts.catalogue` knows them).
- `engine_limits` turns what the user asked for into the engine's limits and refuses what the system cannot have.
- `length_predictor` says what the engine may know of output lengths.
- `parts` builds the parts, anew for every engine, from the options and its arguments alone.

Parts can be replaced (`--policy layerkv:batching=sarathi`) as far as they go together. Limits stay the preset's; the
budget is the batching's.
"""

from abc import ABC, abstractmethod
from dataclasses import field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from sim.cost.engine_profile import TODAYS, TODAYS_SERIAL
from sim.engine.limits import Deployment, Limits
from sim.engine.predictor import LengthPredictor, NoPredictor
from sim.errors import UserError
from sim.frozen import frozen
from sim.kv.page_options import PageOptions
from sim.parts.batching.async_scheduling import AsyncScheduling
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.catalogue import BATCHINGS, EVICTIONS, MEMORIES, STAGES
from sim.specs.expert_layout import ALL_GATHER
from sim.systems.builder import Builder, build_parts

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector
    from sim.engine.scheduler import Parts, Scheduler
    from sim.specs.memory import StatePool
    from sim.specs.model_spec import ModelSpec

Options = TypeVar("Options")
VLLM055 = {
    "order": "fcfs",
    "batching": "vllm",
    "admission": "watermark",
    "memory": "paged",
    "eviction": "recompute",
    "stage": "direct",
}
"""Composition of vLLM 0.5.5, of which many systems replace a part or two."""
MIN_BATCHED_TOKENS = 2048
CHUNKED_BATCHED_TOKENS = 512
"""vLLM 0.5.5's token budgets: max(max_model_len, 2048), with chunked prefill 512."""


class Asked(msgspec.Struct, frozen=True):
    """What the user said of the engine's limits; None: the system's own."""

    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    gpu_name: str = ""
    gpu_memory_bytes: float = 0.0
    ranks: int = 1
    """Data-parallel ranks of the engine."""


class WindowPool(msgspec.Struct, frozen=True):
    """A pool of their own for the layers with a window: so many `tokens`, or that `share` of the others' tokens."""

    share: float = 0.0
    tokens: int = 0

    def blocks(self, num_blocks: int, block_size: int) -> int:
        """Its blocks beside so many of the others."""
        if self.tokens:
            return min(-(-self.tokens // block_size), num_blocks)
        return int(num_blocks * block_size * self.share) // block_size


class EngineLimits(msgspec.Struct, frozen=True):
    """The engine's limits before memory is sized, and what the user should know of them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    warnings: tuple[str, ...] = ()

    def checked(self) -> "EngineLimits":
        """Itself; UserError unless every seat can have a token of the budget."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"--max-num-batched-tokens: {self.max_num_batched_tokens} is less than --max-num-seqs "
                f"{self.max_num_seqs}; raise the one or lower the other"
            )
        return self


@runtime_checkable
class PredictsLengths(Protocol):
    """Options that say what an engine is to know of output lengths."""

    def length_predictor(self, seed: int) -> LengthPredictor:
        """Itself; draws depend on `seed` and the request alone."""
        ...


@frozen
class Policy(ABC):
    """A named preset of parts; subclasses say which paper they follow and what they assume."""

    name: ClassVar[str]
    summary: ClassVar[str]
    composition: ClassVar[dict[str, str]]
    """Kind of part -> name of the part."""
    default_swap_space_gib: ClassVar[float] = 4.0
    """Host memory for KV per GPU when the user names none (vLLM 0.5.5's `--swap-space`)."""
    default_max_num_seqs: ClassVar[int] = 256
    default_block_size: ClassVar[int] = 16
    default_prefix_caching: ClassVar[bool] = False
    ranks_share_tokeniser: ClassVar[bool] = False
    """Data-parallel ranks have one process that tokenises, not one each."""
    num_null_blocks: ClassVar[int] = 0
    """Blocks of the pool that are never allocated."""

    mixed: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    """Parts that replace the composition's: (kind, name)."""
    mixed_options: tuple[object, ...] = field(default=(), kw_only=True)
    """Options of those parts, where the preset has none of their kind."""

    @property
    def names(self) -> dict[str, str]:
        """Kind of part -> name, replacements included."""
        return {**self.composition, **dict(self.mixed)}

    def options(self, kind: type[Options]) -> Options:
        """The options of a kind: its own, those of a part mixed in, or the defaults."""
        return next((found for found in (self, *self.mixed_options) if isinstance(found, kind)), None) or kind()

    def all2all(self, backend: str | None) -> tuple[str, str]:
        """What dispatches and combines where all ranks decode, and where any prefills; `backend` was asked for.

        Raises:
            UserError: it has no price.
        """
        if backend is None:
            return ALL_GATHER, ALL_GATHER
        from sim.cost.all2all import check_backend

        check_backend(backend)
        return backend, backend

    @property
    def can_cache_prefixes(self) -> bool:
        """Whether blocks can be kept for others to hit: its memory shares them, and no sequence moves whole."""
        names = self.names
        return MEMORIES[names["memory"]].can_cache_prefixes and not EVICTIONS[names["eviction"]].moves_whole

    @property
    def hands_over(self) -> bool:
        """Whether engines that prefill hand sequences over to others."""
        return STAGES[self.names["stage"]].hands_over

    @property
    def is_unified(self) -> bool:
        """Whether its batching is vLLM v1's: what follows of async scheduling, host time and prefixes is v1's, too."""
        return BATCHINGS[self.names["batching"]].is_unified

    @property
    def has_hybrid_manager(self) -> bool:
        """Whether layers with a window have vLLM v1's KV cache manager, which caches their prefixes, too."""
        wanted = {"memory": "paged", "eviction": "recompute", "stage": "direct"}
        return self.is_unified and all(self.names[kind] == name for kind, name in wanted.items())

    @property
    def async_scheduling_asked(self) -> bool | None:
        """What `--async-scheduling` says; None where it was left open, False where the batching has no such thing."""
        if not self.is_unified:
            return False
        asked = self.options(AsyncScheduling).async_scheduling
        return False if asked is None and STAGES[self.names["stage"]].drafts else asked

    @property
    def reads_images(self) -> bool:
        """Whether it schedules an encoder for the images of prompts."""
        return self.names["batching"] == "unified" and self.options(VllmV1Options).max_tokens_per_image is not None

    @property
    def schedules_ahead(self) -> bool:
        """Whether a step is scheduled while the one before it runs; it is not until that is decided."""
        return bool(self.async_scheduling_asked)

    @property
    def scheduling(self) -> str:
        """When steps are scheduled, in words."""
        return "async scheduling" if self.schedules_ahead else "serial scheduling"

    def with_async_scheduling(self, chosen: bool) -> Self:
        """With `--async-scheduling` decided."""
        if isinstance(self, AsyncScheduling):
            return replace(self, async_scheduling=chosen)
        others = [options for options in self.mixed_options if not isinstance(options, AsyncScheduling)]
        own = [options for options in self.mixed_options if isinstance(options, AsyncScheduling)]
        decided = [replace(options, async_scheduling=chosen) for options in own or [AsyncScheduling()]]
        return replace(self, mixed_options=(*others, *decided))

    @property
    def own_engine_profile(self) -> str:
        """Name of the engine profile of its own time, which prices it where that is asked for (`own`)."""
        if not self.is_unified:
            return "vllm-0.5"
        return TODAYS if self.schedules_ahead else TODAYS_SERIAL

    def prefix_caching(self, asked: bool | None) -> bool:
        """Whether prefixes are cached, as asked or by default; UserError where that cannot be."""
        if MEMORIES[self.names["memory"]].always_caches:
            if asked is False:
                memory = self.names["memory"]
                raise UserError(f"--no-enable-prefix-caching: memory={memory} is there to cache prefixes; leave it out")
            asked = True
        if asked is None:
            return self.default_prefix_caching and self.can_cache_prefixes
        if asked and not self.can_cache_prefixes:
            names = self.names
            raise UserError(
                f"--enable-prefix-caching: {self.name} has memory={names['memory']} and eviction={names['eviction']}; "
                "it takes memory=paged, radix or tiered, and an eviction that moves none whole; leave it out"
            )
        return asked

    def block_size(self, asked: int | None, model: "ModelSpec", tp: int) -> int:
        """Tokens of a block; UserError where its memory leaves no choice of what was asked for."""
        if not MEMORIES[self.names["memory"]].in_pages:
            return asked or self.default_block_size
        tokens = self.options(PageOptions).tokens(model, tp)
        if asked not in (None, tokens):
            raise UserError(
                f"--block-size: {asked} where a page (page-kib) of {self.name} holds {tokens} tokens of {model.name}; "
                "leave it out"
            )
        return tokens

    def window_pool(self, window_tokens: int, block_size: int, engine: EngineLimits) -> WindowPool | None:
        """That of layers with a window of so many tokens, the query's own included; None: they have none."""
        return None

    def state_pool(self, block_size: int, engine: EngineLimits, *, cached: bool, ranks: int) -> "StatePool | None":
        """That of layers that keep a state, where prefixes are `cached` or not; None: they have none."""
        return None

    def expert_ranks(self, model: "ModelSpec", ranks: int) -> int:
        """Of so many data-parallel ranks those that share the experts; UserError where the model has no such ranks."""
        return ranks

    def told(self, block_size: int | None) -> dict[str, int | bool]:
        """Fields of the scenario, by name, that options of the system's own set, in whose blocks (None: left open)."""
        return {}

    @abstractmethod
    def engine_limits(self, asked: Asked) -> EngineLimits:
        """The system's limits where the user left them open; UserError for those that it cannot have."""

    def parts(self, limits: Limits, deployment: Deployment) -> "Parts":
        """The system's parts, new ones. UserError where they do not go together."""
        return build_parts(Builder(self, limits, deployment))

    def scheduler(self, limits: Limits, gaps: "GapCollector", deployment: Deployment) -> "Scheduler":
        """The parts, put together."""
        from sim.engine.scheduler import Scheduler

        kind = Scheduler
        if limits.stages > 1:
            from sim.engine.pipelined import PipelinedScheduler as kind
        return kind(self.parts(limits, deployment), limits, gaps, deployment)

    def length_predictor(self, seed: int) -> LengthPredictor:
        """What the engine is to know of output lengths; nothing unless the policy or a part mixed in asks for it."""
        for options in self.mixed_options:
            if isinstance(options, PredictsLengths):
                return options.length_predictor(seed)
        return NoPredictor()


def default_budget(batching: str, max_model_len: int, *, chunked: bool) -> int:
    """Tokens of an iteration where the user names none: the batching's, or vLLM 0.5.5's."""
    own = BATCHINGS[batching].default_budget
    if own is not None:
        return own
    return CHUNKED_BATCHED_TOKENS if chunked else max(max_model_len, MIN_BATCHED_TOKENS)


def whole_prompt_limits(self: Policy, asked: Asked) -> EngineLimits:
    """`engine_limits` of systems that never split a prompt: a budget that any prompt fits."""
    if asked.enable_chunked_prefill:
        raise UserError(f"--enable-chunked-prefill: {self.name} computes prompts whole; leave it out")
    default = default_budget(self.names["batching"], asked.max_model_len, chunked=False)
    tokens = asked.max_num_batched_tokens or default
    if tokens < asked.max_model_len:
        raise UserError(
            f"--max-num-batched-tokens: {tokens} is less than the context length {asked.max_model_len}; raise it or "
            "lower --max-model-len"
        )
    return EngineLimits(asked.max_num_seqs or self.default_max_num_seqs, tokens, False).checked()


def chunked_limits(self: Policy, asked: Asked) -> EngineLimits:
    """`engine_limits` of systems that split every prompt."""
    if asked.enable_chunked_prefill is False:
        raise UserError(f"--no-enable-chunked-prefill: {self.name} splits prompts; leave it out")
    tokens = asked.max_num_batched_tokens or default_budget(self.names["batching"], asked.max_model_len, chunked=True)
    seqs = asked.max_num_seqs or min(self.default_max_num_seqs, tokens)
    return EngineLimits(seqs, tokens, True).checked()

"""What building a part is given, and what is known of a part by its name."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from sim.engine.limits import Deployment, Limits
from sim.errors import UserError
from sim.systems.layerkv_options import Equations, LayerKVOptions
from sim.systems.offload_options import OffloadOptions

if TYPE_CHECKING:
    from sim.kv.layer_blocks import LayerBlocks
    from sim.kv.memory import Memory
    from sim.parts.base import Eviction, Stage  # noqa: F401
    from sim.parts.batching.base import Batching  # noqa: F401
    from sim.systems.base import Policy

HAND_OVER = "hand-over"
"""The stage of policies that serve with a pool of engines for prefills and one for decodes."""
MEMPOOL = "mempool"
"""The memory of engines that cache prefixes and send one another what they lack."""
STORED = "stored"
"""The memory of engines whose prompts a store of the cluster may have."""
UNIFIED = ("unified", "paced")
"""Batchings with vLLM v1's one budget, whose host time is its."""
MIN_BATCHED_TOKENS = 2048
CHUNKED_BATCHED_TOKENS = 512
"""vLLM 0.5.5's token budgets: max(max_model_len, 2048), with chunked prefill 512."""

Options = TypeVar("Options")


def options_among(given: Iterable[object], kind: type[Options]) -> Options:
    """The first of a kind, or its defaults."""
    return next((found for found in given if isinstance(found, kind)), None) or kind()


class Builder:
    """What the parts of one system, for one engine, are built from."""

    memory: "Memory"
    """Built first, then the stage."""
    stage: "Stage"

    def __init__(
        self,
        policy: "Policy",
        names: Mapping[str, str],
        options: tuple[object, ...],
        limits: Limits,
        deployment: Deployment,
        *,
        moves_whole: bool,
    ) -> None:
        self.policy, self.names, self.limits, self.deployment = policy, names, limits, deployment
        self._options = options
        self.moves_whole = moves_whole
        """Whether the eviction moves sequences whole."""

    def options(self, kind: type[Options]) -> Options:
        """The options of a kind: the preset itself, those given with a part, or the defaults."""
        return options_among((self.policy, *self._options), kind)

    @property
    def offloading(self) -> OffloadOptions:
        """What is offloaded."""
        options = self.options(OffloadOptions)
        if options.offloads and self.names["batching"] != "unified":
            raise UserError(f"--kv-offloading-size: goes with batching=unified, not {self.names['batching']}")
        return options

    # -- what several need -------------------------------------------------------------------------------------------

    def equations(self) -> Equations:
        """LayerKV's Eq. 3 and 4."""
        return Equations(self.deployment, self.limits.block_size, printed=self.options(LayerKVOptions).printed)

    def layer_blocks(self, wanted_by: str) -> "LayerBlocks":
        """The memory, which must hold layers apart."""
        from sim.kv.layer_blocks import LayerBlocks

        if not isinstance(self.memory, LayerBlocks):
            raise UserError(f"{wanted_by} moves single layers: it goes with memory=layers")
        return self.memory


Part = TypeVar("Part", covariant=True)


class Known(msgspec.Struct, Generic[Part], frozen=True):
    """A part that has a name: how to build it, and the options that it reads."""

    build: Callable[[Builder], Part]
    options: type | None = None


class KnownMemory(Known["Memory"], frozen=True):
    """A memory, and whether it can keep what others may hit."""

    can_cache_prefixes: bool = False
    always_caches: bool = False
    runs_live: bool = True
    """Whether a device can carry out its plans, which say where prefixes are cached which blocks are shared."""


class KnownEviction(Known["Eviction"], frozen=True):
    """An eviction, and whether it moves sequences whole, whose blocks nobody may share then."""

    moves_whole: bool = False


class KnownBatching(Known["Batching"], frozen=True):
    """A batching and the budget that goes with it."""

    splits_prompts: bool | None = None
    """None: as `--enable-chunked-prefill` says."""
    tokens: Callable[[int, bool], int] = lambda length, chunked: (
        CHUNKED_BATCHED_TOKENS if chunked else max(length, MIN_BATCHED_TOKENS)
    )
    """Default token budget, from the longest context and whether prompts are split."""

"""The parts that kvtwin knows, by kind and name: what `composition` and `--policy NAME:KIND=PART` speak of.

A part's module is imported when the part is asked for. What is known of one beside its place is said by its class
(`sim.parts.base`). Other packages add theirs with `register_part` or, installed, as entry points, which are
read when a name that is not known, or all of them, are asked for:

    [project.entry-points."kvtwin.parts"]
    "order.shortest-output" = "ranking:ShortestOutput"
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sim.errors import UserError

if TYPE_CHECKING:
    from sim.kv.memory import MemoryKind
    from sim.parts.base import Eviction, Part, Stage
    from sim.parts.batching.base import Batching

PLACES: dict[str, dict[str, str]] = {
    "order": {
        "fcfs": "sim.parts.order.fcfs:Fcfs",
        "priority": "sim.parts.order.priority:Priority",
        "mlfq": "sim.systems.fastserve.mlfq:Mlfq",
        "triage": "sim.systems.adaptive.triage:Triage",
        "lpm": "sim.systems.radix.cache_aware:CacheAware",
        "dfs-weight": "sim.systems.radix.cache_aware:ByBranch",
        "shortest-prefill": "sim.parts.order.shortest_prefill:ShortestPrefill",
        "most-reused": "sim.systems.ragcache.most_reused:MostReused",
        "prefix-groups": "sim.systems.batchllm.prefix_groups:PrefixGroups",
        "sglang-queue": "sim.systems.sglang.queue:SglangQueue",
    },
    "batching": {
        "vllm": "sim.parts.batching.prefill_first:PrefillFirst",
        "request-level": "sim.parts.batching.request_level:RequestLevel",
        "iteration-level": "sim.parts.batching.iteration_level:IterationLevel",
        "sarathi": "sim.parts.batching.stall_free:StallFree",
        "fastgen": "sim.parts.batching.stall_free:FastGen",
        "quanta": "sim.systems.fastserve.quanta:Quanta",
        "unified": "sim.parts.batching.unified:Unified",
        "paced": "sim.systems.adaptive.paced:Paced",
        "sglang": "sim.systems.radix.sglang:Sglang",
        "extend-first": "sim.systems.sglang.batching:ExtendFirst",
    },
    "admission": {
        "watermark": "sim.parts.admission.watermark:Watermark",
        "memory": "sim.parts.admission.watermark:MemoryAlone",
        "slack": "sim.systems.layerkv.slack:SlackAdmission",
        "token-wise": "sim.systems.ellm.batch_and_ratio:BatchAndRatio",
    },
    "memory": {
        "paged": "sim.kv.paged:PagedMemory",
        "radix": "sim.kv.radix:RadixMemory",
        "sglang-tree": "sim.systems.sglang.window_memory:WindowTreeMemory",
        "chunks": "sim.kv.shared_reads:ChunkMemory",
        "prefix-groups": "sim.kv.shared_reads:GroupMemory",
        "tiered": "sim.kv.tiered:HostTier",
        "retained": "sim.kv.retained:RetentionMemory",
        "documents": "sim.kv.documents:DocumentTier",
        "reserved": "sim.kv.reserved:ReservedMemory",
        "kept-copies": "sim.kv.kept_copies:KeptCopies",
        "mapped": "sim.kv.mapped:MappedMemory",
        "mempool": "sim.systems.memserve.mempool:MemPool",
        "stored": "sim.systems.mooncake.stored:StoredMemory",
        "layers": "sim.systems.layerkv.layer_blocks:LayerBlocks",
        "saved-states": "sim.systems.hcache.saved_states:SavedStates",
        "tiered-states": "sim.systems.hcache.saved_states:TieredStates",
        "hosted-layers": "sim.systems.kvpr.hosted_layers:HostedLayers",
        "token-wise": "sim.systems.ellm.token_wise:TokenWiseMemory",
    },
    "eviction": {
        "recompute": "sim.parts.eviction.recompute:Recompute",
        "swap": "sim.parts.eviction.swap:Swap",
        "layer-offload": "sim.systems.layerkv.layer_offload:LayerOffload",
        "park": "sim.systems.adaptive.park:Park",
        "proactive-swap": "sim.systems.fastserve.proactive_swap:ProactiveSwap",
    },
    "stage": {
        "direct": "sim.parts.stage.direct:Direct",
        "promote": "sim.systems.layerkv.promote:Promote",
        "stream": "sim.systems.layerkv.stream:Stream",
        "partial-recompute": "sim.systems.kvpr.partial_recompute:PartialRecompute",
        "hand-over": "sim.parts.stage.hand_over:HandOver",
        "nixl": "sim.parts.stage.nixl:Nixl",
        "speculative": "sim.parts.stage.speculative:Speculative",
        "tool-calls": "sim.parts.stage.tool_calls:ToolCalls",
        "min-waste": "sim.systems.infercept.min_waste:MinWaste",
    },
}
"""Kind -> name -> "module:Class"."""

KINDS = tuple(PLACES)
ORIGINS: dict[str, str] = {}
"""Place -> the entry point that named it, in words; for messages."""


def class_at(place: str) -> Any:  # noqa: ANN401 - of whatever kind
    """What "package.module:Class" names, imported now. UserError where an entry point named it and it is not there."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        if place not in ORIGINS:
            raise
        raise UserError(f"{ORIGINS[place]}: {place} cannot be imported: {type(error).__name__}: {error}") from error


def named_class(place: str, name: str) -> Any:  # noqa: ANN401 - of whatever kind
    """The class of that place, whose `name` is to be that. UserError where an entry point says otherwise."""
    found = class_at(place)
    if place in ORIGINS and getattr(found, "name", None) != name:
        raise UserError(f"{ORIGINS[place]}: the `name` of {place} is {getattr(found, 'name', None)!r}, not {name!r}")
    return found


Kind = TypeVar("Kind")


class Named(Mapping[str, type[Kind]], Generic[Kind]):
    """Name -> class, imported at first use.

    Args:
        places: name -> "module:Class".
        read: makes known what other distributions bring; asked for a name that is not known.
    """

    def __init__(self, places: dict[str, str], read: Callable[[], None]) -> None:
        self._places, self._read = places, read

    def __getitem__(self, name: str) -> type[Kind]:
        if name not in self._places:
            self._read()
        return named_class(self._places[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


def register_part(kind: str, name: str, place: str) -> None:
    """Make a part known: `place` is "package.module:Class". UserError if there is no such kind or the name is taken."""
    if kind not in PLACES:
        raise UserError(f"{kind}={name}: no such kind of part; there are {', '.join(KINDS)}")
    if PLACES[kind].setdefault(name, place) != place:
        raise UserError(f"{kind}={name} is {PLACES[kind][name]} already; give {place} another name")


@cache
def read_parts() -> None:
    """Make the parts known that other distributions bring. UserError, with the distribution, where that cannot be."""
    read_entry_points("kvtwin.parts", _register_named)


def _register_named(name: str, place: str) -> None:
    kind, dot, part = name.partition(".")
    if not dot:
        raise UserError(f"a part is named KIND.NAME, the kind one of {', '.join(KINDS)}")
    register_part(kind, part, place)


CATALOGUE = cast("dict[str, Named[Part]]", {kind: Named(places, read_parts) for kind, places in PLACES.items()})
"""Kind -> name -> class."""
BATCHINGS = cast("Named[Batching]", CATALOGUE["batching"])
MEMORIES = cast("Named[MemoryKind]", CATALOGUE["memory"])
EVICTIONS = cast("Named[Eviction]", CATALOGUE["eviction"])
STAGES = cast("Named[Stage]", CATALOGUE["stage"])


def read_entry_points(group: str, register: Callable[[str, str], None]) -> None:
    """Register name and place of each entry point of a group. What is refused is told with the distribution."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes longer to import than a short run

    for entry in entry_points(group=group):
        distribution = entry.dist.name if entry.dist else "a distribution"
        origin = ORIGINS[entry.value] = f"{distribution}: entry point {entry.name!r} of {group}"
        try:
            register(entry.name, entry.value)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None


def known_part(kind: str, name: str) -> "type[Part]":
    """The class of the part of that kind and name; UserError with the nearest right one otherwise."""
    known = CATALOGUE[kind]
    if name not in known:
        read_parts()
    if name not in known:
        raise UserError(f"{kind}={name}: no such part; {known_instead(name, known)}")
    return known[name]


def known_instead(name: str, known: Collection[str]) -> str:
    """The nearest of the names that are known, and all of them, for a refusal of `name`."""
    near = get_close_matches(name, known, n=1)
    return f"{f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(known)}"

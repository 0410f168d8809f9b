"""The systems kvtwin knows, by name. A system's module is imported when its name is asked for.

Other packages add theirs with `register("name", "package.module:Class")` or, installed, as entry points, which are
read when a name that is not known, or all of them, are asked for:

    [project.entry-points."kvtwin.systems"]
    vllm-ltr = "ranking:LearningToRank"
"""

from functools import cache
from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.parts.catalogue import Named, known_instead, read_entry_points

if TYPE_CHECKING:
    from sim.systems.base import Policy

DEFAULT_POLICY = "vllm-v1"
"""What `run` runs when no policy is named; its options are vLLM's, and their flags bear no prefix."""

_PLACES = {
    "vllm-v1": "sim.systems.vllm_v1:VllmV1",
    "vllm-recompute": "sim.systems.vllm055:VllmRecompute",
    "vllm-swap": "sim.systems.vllm055:VllmSwap",
    "layerkv": "sim.systems.layerkv.preset:LayerKV",
    "ellm": "sim.systems.ellm.preset:Ellm",
    "hcache": "sim.systems.hcache.preset:HCache",
    "kvpr": "sim.systems.kvpr.preset:Kvpr",
    "orca": "sim.systems.orca:Orca",
    "fastertransformer": "sim.systems.fastertransformer:FasterTransformer",
    "sarathi": "sim.systems.sarathi:Sarathi",
    "vattention": "sim.systems.vattention:VAttention",
    "fastgen": "sim.systems.fastgen:FastGen",
    "fastserve": "sim.systems.fastserve.preset:FastServe",
    "distserve": "sim.systems.distserve:DistServe",
    "cachedattention": "sim.systems.cachedattention:CachedAttention",
    "pensieve": "sim.systems.pensieve:Pensieve",
    "cacheblend": "sim.systems.cacheblend:CacheBlend",
    "ragcache": "sim.systems.ragcache.preset:RagCache",
    "promptcache": "sim.systems.promptcache:PromptCache",
    "splitwise": "sim.systems.splitwise:Splitwise",
    "radix": "sim.systems.radix.preset:Radix",
    "sglang": "sim.systems.sglang.preset:Sglang",
    "chunkattention": "sim.systems.chunkattention:ChunkAttention",
    "batchllm": "sim.systems.batchllm.preset:BatchLLM",
    "memserve": "sim.systems.memserve.preset:MemServe",
    "mooncake": "sim.systems.mooncake.preset:Mooncake",
    "infercept": "sim.systems.infercept.preset:InferCept",
    "adaptive": "sim.systems.adaptive.preset:Adaptive",
}


def register(name: str, place: str) -> None:
    """Make a preset known: `place` is "package.module:Class". UserError if the name is taken."""
    if _PLACES.get(name, place) != place:
        raise UserError(f"policy {name!r} is {_PLACES[name]} already; give {place} another name")
    _PLACES[name] = place


@cache
def read_systems() -> None:
    """Make the presets known that other distributions bring. UserError, with the distribution, where that cannot be."""
    read_entry_points("kvtwin.systems", register)


POLICIES: "Named[Policy]" = Named(_PLACES, read_systems)


def policy_named(name: str) -> "type[Policy]":
    """The policy of that name; `UserError` with the nearest right one otherwise."""
    if name not in _PLACES:
        read_systems()
    if name not in _PLACES:
        raise UserError(f"--policy: unknown policy {name!r}; {known_instead(name, _PLACES)}")
    return POLICIES[name]

"""What parts answer that say nothing of their own, and what they refuse to be asked (`sim.parts.base`)."""

import inspect
from dataclasses import replace
from math import inf

import pytest

from kvtwin.testing import limits
from sim.engine.limits import WindowLimits
from sim.errors import InvariantError
from sim.kv.hybrid import HybridMemory
from sim.kv.memory import Memory
from sim.kv.states import StateMemory
from sim.kv.tiers.replacement import Replacement
from sim.kv.windowed import WindowedMemory
from sim.parts.base import Admission, Eviction, Part, Stage
from sim.parts.batching.base import Batching

UNANSWERED = {
    Memory: (
        "blocks_for", "held_blocks", "can_swap_out", "receive", "returned", "insert", "swap_out", "can_swap_in",
        "swap_in", "outgrew_gpu", "drop_swapped", "send_out", "bring_in", "transfer_done",
    ),
    Eviction: ("call_back",),
    Stage: ("offer", "migrated"),
    Batching: ("in_order",),
    Replacement: ("get", "keys", "insert", "finish", "evict"),
}  # fmt: skip
ANSWERS = {
    Part: {"holds": 7, "holders": ()},
    Memory: {
        "num_evicted": 0, "host_reserved": 0, "num_cached_on_host": 0, "caches_prefixes": False, "cached_tokens": 0,
        "splits_layers": False, "can_swap": False, "can_receive": False, "returns_kv": False, "unexecutable": "",
        "can_cache_prefixes": False, "always_caches": False, "runs_live": True,
    },
    Admission: {"keep_free": 0, "refused_for_slo": False, "reason": "", "delays": False},
    Eviction: {
        "moves_whole": False, "returns_when_asked": False, "has_victims": False, "settle": False, "may_admit": True,
        "headroom": 0, "room": inf,
        "is_out": False, "unblock": False, "num_out": 0,
    },
    Stage: {
        "brings_layers_back": False, "streams": False, "hands_over": False, "pulls": False, "layer_wise": False,
        "blocking": False, "has_parked": False, "num_parked": 0, "num_returning": 0,
    },
    Batching: {
        "splits_prompts": False, "has_choice": False, "default_budget": None, "stops_at_max_model_len": False,
        "schedules_ahead": False, "reports_copies": False,
        "frees_in_order": False, "record": None, "records_decisions": False, "refusal": None, "num_paused": 0,
    },
}  # fmt: skip
"""Of a kind of part by name: an attribute, a property, or a method whatever it is asked about."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNANSWERED.items() for name in names])
def test_what_a_part_does_not_offer_cannot_be_asked_of_it(kind, name):
    method = getattr(kind, name)
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    with pytest.raises(NotImplementedError):
        method(*[None] * len(needed))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, found in ANSWERS.items() for name in found])
def test_what_a_part_leaves_open_has_an_answer(kind, name):
    found = getattr(kind, name)
    if isinstance(found, property):
        assert found.fget is not None
        found = found.fget(None)
    elif inspect.isfunction(found):
        found = found(*([None] * (len(inspect.signature(found).parameters) - 1)), 7)
    assert found == ANSWERS[kind][name]


@pytest.mark.parametrize("kind", [Memory, Admission, Eviction, Stage, Batching])
def test_all_that_is_left_open_is_known_here(kind):
    """But for hooks, which answer nothing, and what a kind keeps for itself."""
    kept = {
        Memory: {
            "append", "can_append", "fits_received", "forget", "grow", "grow_further", "hold", "holds", "name_blocks",
            "needs_block", "publish", "tell_blocks",
        },
        Admission: {"admitted", "delayed"},
        Eviction: {"bring_back"},
        Batching: {
            "admit", "bind", "commit_chunks", "continue_partials", "decode_all", "decode_exactly", "decode_or_preempt",
            "drop_partial", "holders", "leaving", "preempt",
        },
    }  # fmt: skip
    abstract = kind.__abstractmethods__
    own = {name for name in vars(kind) if not name.startswith("_")} - abstract
    assert own == {*UNANSWERED.get(kind, ()), *ANSWERS[kind], *kept.get(kind, ())}


@pytest.mark.parametrize("window", [None, WindowLimits(64)])
def test_memory_of_groups_needs_groups(window):
    limit = replace(limits(), window=window)
    with pytest.raises(InvariantError, match="groups of layers with a window"):
        HybridMemory(limit, schedules_ahead=False)
    with pytest.raises(InvariantError, match="how long they are"):
        WindowedMemory(limit)
    with pytest.raises(InvariantError, match="groups of layers that keep one"):
        StateMemory(limit, schedules_ahead=False, most_prompt_tokens=64)

"""What is behind a memory has needs and limits of its own, and they are heard as those of a memory are."""

from dataclasses import replace
from typing import ClassVar

import pytest

from gpu_runtime.device_memory import check_executable
from kvtwin.testing import limits, linear_machine
from sim.engine.itl import GapCollector
from sim.errors import UserError
from sim.kv.backing import Backing
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.options.policies import parse_policy
from sim.parts.catalogue import PLACES
from sim.parts.needs import Need
from sim.systems.builder import Builder


class Remote(Backing):
    """Has nothing, and asks for much."""

    name: ClassVar[str] = "remote"
    always_caches: ClassVar[bool] = True
    unexecutable: ClassVar[str] = "memory=remote: no device has it"
    needs: ClassVar[tuple[Need, ...]] = (Need("eviction", "computes victims again", lacks="moves_whole"),)

    @classmethod
    def build(cls, b: Builder) -> PagedMemory:
        return PrefixMemory.build(b, cls())


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("vllm-recompute:memory=remote", "memory=remote: no device has it"),
        ("vllm-swap:memory=remote", "memory=remote computes victims again: it goes with eviction=recompute"),
    ],
)
def test_what_is_behind_a_memory_is_heard(monkeypatch, text, refusal):
    monkeypatch.setitem(PLACES["memory"], "remote", f"{__name__}:Remote")
    _, policy = parse_policy(text, {})
    limit = replace(limits(), enable_prefix_caching=True)
    with pytest.raises(UserError, match=refusal):
        check_executable(policy.scheduler(limit, GapCollector(), linear_machine().deployment))

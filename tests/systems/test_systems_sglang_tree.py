"""SGLang's radix tree by hand: which leaf goes first."""

import pytest

from sim.systems.sglang.tree import EvictionRules, PrefixTree, TreeSettings


@pytest.mark.parametrize(("eviction", "freed"), [("lru", [6, 4, 6]), ("tlru", [4, 6, 6])])
def test_tlru_first_gives_up_what_a_conversation_can_do_without(eviction, freed):
    """Of ten pages the last four are spared, though used last; of what is left of them, and of six, none are."""
    tree = PrefixTree(TreeSettings(eviction, 0, 0, "write_through", 1, EvictionRules(spared_pages=4)))
    for keys in (range(20, 26), range(6), range(10)):
        tree.insert(tuple(keys), len(keys), held=0, counted=0)
    assert [tree.evict(1) for _ in freed] == freed

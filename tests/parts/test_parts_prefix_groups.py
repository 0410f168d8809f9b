"""One level of prefixes from a tree of prompts (BatchLLM), by hand and by what must hold for any prompts."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.systems.batchllm.prefix_groups import one_level


def groups(*texts):
    """Groups as (prefix, members), the prefix read from the first of them."""
    prompts = [tuple(map(ord, text)) for text in texts]
    return sorted((texts[members[0]][:depth], sorted(members)) for depth, members in one_level(prompts))


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["ab", "cd"], [("", [0, 1])]),
        (["abc", "abd", "xyz"], [("", [2]), ("ab", [0, 1])]),
        (["abc", "abc"], [("abc", [0, 1])]),
        # "abcd" of three saves 2 * 2 beyond "ab", and "ab" once more costs 2.
        (["abcdx", "abcdy", "abcdz", "abq", "abr"], [("ab", [3, 4]), ("abcd", [0, 1, 2])]),
        # Of two it saves 1 * 2, which is no more than 2.
        (["abcdx", "abcdy", "abq", "abr"], [("ab", [0, 1, 2, 3])]),
        # A prompt that is another's beginning.
        (["ab", "abc", "abd"], [("ab", [0, 1, 2])]),
    ],
)
def test_groups_worked_by_hand(texts, found):
    assert groups(*texts) == found


def test_nothing_is_no_group():
    assert one_level([]) == []


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_everything_is_in_one_group_whose_prefix_they_have(seed):
    dice = Random(seed)
    stems = [tuple(dice.randrange(2) for _ in range(dice.randrange(1, 9))) for _ in range(3)]
    prompts = [
        stem[: dice.randrange(len(stem) + 1)] + tuple(dice.randrange(2) for _ in range(dice.randrange(4)))
        for stem in (dice.choice(stems) for _ in range(dice.randrange(12)))
    ]
    found = one_level(prompts)
    assert sorted(i for _, members in found for i in members) == list(range(len(prompts)))
    for depth, members in found:
        assert len({prompts[i][:depth] for i in members}) == 1
        assert min(len(prompts[i]) for i in members) >= depth
    # Never worse than to share the first key alone, with all that have it.
    saved = sum((len(members) - 1) * depth for depth, members in found)
    firsts = [prompt[0] for prompt in prompts if prompt]
    assert saved >= sum(max(0, firsts.count(key) - 1) for key in set(firsts))

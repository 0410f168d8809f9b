"""`Drafts`: tokens drafted behind the sequences of one device, by prompt look-up, and which of them are accepted.

A draft is accepted where the model itself chose that token: what a request gets is what it gets alone.
"""

from collections.abc import Sequence as Seq

from sim.engine.sequence import Sequence

NGRAM = 5
"""Tokens that must have stood there before (vLLM's `prompt_lookup_min` and `prompt_lookup_max` where none is given)."""


class PromptLookup:
    """Drafts what followed where the last tokens of a sequence stood first (Saxena 2023; vLLM's `ngram`)."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        # Where the token behind each n-gram stands first.
        self._end = NGRAM

    def draft(self, tokens: Seq[int], most: int) -> Seq[int]:
        """At most so many tokens; none where the last ones never stood in `tokens` before. These may only grow."""
        behind = self._behind
        for end in range(self._end, len(tokens)):
            behind.setdefault(tuple(tokens[end - NGRAM : end]), end)
        self._end = max(self._end, len(tokens))
        start = behind.get(tuple(tokens[-NGRAM:]))
        return () if start is None else tokens[start : start + most]


class Drafts:
    """What is drafted for the next step of each sequence, at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lookups: dict[Sequence, PromptLookup] = {}
        self._drafted: dict[Sequence, Seq[int]] = {}
        self._verified: dict[Sequence, Seq[int]] = {}

    def draft(self, seq: Sequence, tokens: Seq[int]) -> None:
        """`seq` has had its next tokens: draft behind them."""
        self._drafted[seq] = self._lookups.setdefault(seq, PromptLookup()).draft(tokens, self._most)

    def take(self, seq: Sequence, count: int) -> list[int]:
        """The first `count` drafts, which are verified now. Rows without one hold token 0, which is never accepted."""
        drafts = self._verified[seq] = self._drafted.pop(seq, ())[:count]
        return [*drafts, *(0,) * (count - len(drafts))]

    def accepted(self, seq: Sequence, chosen: Seq[int]) -> Seq[int]:
        """Of the tokens chosen behind the last one and each draft, those that are the next of the sequence."""
        drafts = self._verified.pop(seq, ())
        count = next((i for i, (draft, token) in enumerate(zip(drafts, chosen, strict=False)) if draft != token), None)
        return chosen[: (len(drafts) if count is None else count) + 1]

    def drop(self, seq: Sequence) -> None:
        """`seq` is preempted: it drafts anew when it has computed again."""
        self._drafted.pop(seq, None)

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self.drop(seq)
        self._lookups.pop(seq, None)

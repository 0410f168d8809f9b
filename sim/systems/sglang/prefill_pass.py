"""`PrefillPass`: one look at the prompts, and the budgets that it may use up (SGLang 0.5's `PrefillAdder`).

Room is what is unused or idle, less what those that run are expected to generate. A prompt is admitted if it and its
whole answer fit; each that is takes whole pages, one more, and its answer, none where it is cut. Where requests never
stop before (`ignore_eos`) and no prefixes are cached, the ends of all that run are known: then a prompt is admitted
if pages last until each of them. Source: sglang 0.5.23, `managers/schedule_policy.py`, `mem_cache/prefill_budget.py`.
"""

from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from sim.engine.sequence import Sequence
from sim.systems.sglang.tree import Match

if TYPE_CHECKING:
    from sim.systems.sglang.batching import ExtendFirst

CLIP_NEW_TOKENS = 4096
"""What one request counts at most for what it will generate."""
RESERVE_TOKENS = 1
"""For each that runs, where all ends are known."""


class Verdict(Enum):
    """Whether the next request is looked at."""

    GO_ON = "go on"
    NO_TOKEN = "no room"
    """That is remembered."""
    STOP = "budget used up"


class PrefillPass:
    """What this pass has admitted, `chunks`, and what it has left."""

    def __init__(self, batching: "ExtendFirst") -> None:
        self._batching, self._memory, self.page = batching, batching.tree, batching.page
        settings = batching.settings
        self._ratio = 1.0 if settings.ignore_eos else batching.ratio
        self._knows_ends = settings.ignore_eos and not self._memory.caches_prefixes
        decodes = len(batching.running) if batching.mixes else 0
        self._input_left = settings.max_prefill_tokens - decodes
        self._splits = batching.chunk_tokens is not None
        self._chunk_left = inf if batching.chunk_tokens is None else float(batching.chunk_tokens - decodes)
        self._taken = float(decodes)
        """Of the room, with what will be generated."""
        self._taken_now = decodes
        self._taken += sum([self.kept_for(seq) for seq in batching.running])
        self._windows = self._memory.window_budget()
        self.chunks: list[tuple[Sequence, int]] = []
        """Which sequences compute, and how many tokens."""
        self.num_continued = 0
        self._goes_on_later = False
        """Whether the half-done prompt stays one."""
        self._ends: list[tuple[float, int]] | None = None

    def kept_for(self, seq: Sequence) -> float:
        """Tokens of room that are kept for one that runs."""
        return min(self._batching.to_come(seq), CLIP_NEW_TOKENS) * self._ratio

    @property
    def _room(self) -> float:
        return self._memory.free_tokens - self._taken

    def verdict(self) -> Verdict:
        """Whether another may be looked at."""
        if self._room <= 0 or self._memory.free_tokens <= self._taken_now:
            return Verdict.NO_TOKEN
        if self._windows and self._windows.left <= 0:
            return Verdict.NO_TOKEN
        return Verdict.STOP if self._input_left <= 0 or self._chunk_left <= 0 else Verdict.GO_ON

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _answer(self, seq: Sequence) -> int:
        """Tokens that a whole prompt takes for its answer: not less what it has generated already."""
        return min(self._batching.max_new_tokens(seq), CLIP_NEW_TOKENS)

    def _new_tokens(self, seq: Sequence) -> int:
        """Tokens that it may yet generate, as far as they count."""
        return min(max(self._batching.to_come(seq), 0), CLIP_NEW_TOKENS)

    def _charge(self, seq: Sequence, tokens: int, answer: int) -> None:
        self.chunks.append((seq, tokens))
        pages = self._whole_pages(tokens)
        self._taken += pages + self.page + answer
        self._taken_now += pages + self.page
        if self._windows:
            self._windows.take(pages, answer, self._chunk_left)
        self._input_left -= pages
        self._chunk_left -= pages

    def go_on(self, seq: Sequence) -> int:
        """The half-done prompt goes on, with a chunk that is returned: it passes whatever room there is.

        0 where windows have a pool of their own and there is none.
        """
        left = seq.num_tokens - seq.num_computed
        most = min(self._chunk_left, self._batching.queue.chunk_limit(left, self._chunk_left, self.page))
        room = min(most, int(self._room))
        if self._windows:
            room = min(room, self._windows.left - self.page)
            if room <= 0:
                self._goes_on_later = True
                return 0
        tokens = int(min(left, room if room > 0 else most))
        self._goes_on_later = tokens < left
        self._charge(seq, tokens, self._answer(seq) if tokens == left else 0)
        self.num_continued = 1
        return tokens

    def admit(self, seq: Sequence) -> tuple[Verdict, int]:
        """Whether `seq` starts, with how many tokens (0: it does not), and whether another is looked at."""
        if self._knows_ends:
            return self._admit_by_ends(seq)
        memory, match = self._memory, self._memory.held(seq).match
        wanted = seq.num_tokens - match.pages * self.page + self._new_tokens(seq) + self.page
        since = memory.tree.lock(match.node)
        try:
            chunk = self._select(seq, wanted, match.pages + match.host_pages, match.host_marks)
            if isinstance(chunk, Verdict):
                return chunk, 0
            if match.best is not match.node and not memory.load(seq):
                # What the host has is not brought back: it is computed, if there is room for that.
                memory.held(seq).match = Match(match.node, match.pages, match.node, 0)
                if match.host_pages:
                    chunk = self._select(seq, wanted, match.pages, 0)
                    if isinstance(chunk, Verdict):
                        return chunk, 0
            cached = memory.hold(seq)
        finally:
            memory.tree.unlock(match.node, since)
        # What is loaded may be followed by what was there.
        chunk = min(chunk, seq.num_tokens - cached)
        self._charge(seq, chunk, self._answer(seq) if cached + chunk == seq.num_tokens else 0)
        return self.verdict(), chunk

    def _select(self, seq: Sequence, wanted: int, cached_pages: int, host_marks: int) -> Verdict | int:
        """How many tokens of `seq` are computed in this step; a verdict where none are."""
        if wanted >= self._room:
            return Verdict.NO_TOKEN
        cached = cached_pages * self.page
        tokens = seq.num_tokens - cached
        pages = self._whole_pages(tokens)
        most = self._chunk_left
        if self._windows:
            most = self._windows.chunk_of(pages, self._new_tokens(seq), most, host_marks * self.page)
            if not most:
                return Verdict.NO_TOKEN
        if not self._splits and self.chunks and pages >= self._input_left:
            return Verdict.STOP
        if pages > most:
            if self._goes_on_later:
                # One is half done at a time.
                return Verdict.STOP
            tokens = int(most) // self.page * self.page
            tokens = (cached + tokens) // self.page * self.page - cached
            if tokens <= 0:
                return Verdict.STOP
        return tokens

    # -- where all ends are known --------------------------------------------------------------------------------------

    def _admit_by_ends(self, seq: Sequence) -> tuple[Verdict, int]:
        tokens = seq.num_tokens
        needed = self._whole_pages(tokens) + self.page
        if needed > min(self._memory.free_tokens - self._taken_now, self._room):
            return Verdict.NO_TOKEN, 0
        if self._windows:
            if self._windows.needed(tokens, self._new_tokens(seq), self._chunk_left) > self._windows.left:
                return Verdict.NO_TOKEN, 0
        elif not self._last_until_ends(seq, needed):
            return Verdict.NO_TOKEN, 0
        if tokens > self._chunk_left:
            if self._chunk_left <= 0:
                return Verdict.STOP, 0
            tokens = int(self._chunk_left)
        self._memory.hold(seq)
        self._charge(seq, tokens, self._answer(seq) if tokens == seq.num_tokens else 0)
        return self.verdict(), tokens

    def _last_until_ends(self, seq: Sequence, needed: int) -> bool:
        """Whether pages last until each that runs has ended, with `seq`, which needs so many tokens at once."""
        self._note_end(seq)
        ends = self._ends
        assert ends is not None, "just noted"
        freed, room = 0, self._memory.free_tokens - self._taken_now - needed
        for i, (left, occupied) in enumerate(ends):
            num_left = len(ends) - i
            if room + freed - left * num_left <= RESERVE_TOKENS * num_left:
                return False
            freed += occupied
        return True

    def _end_of(self, seq: Sequence) -> tuple[float, int]:
        """Tokens until `seq` ends, and tokens that it occupies now."""
        known = self._batching.known_tokens(seq)
        return self._batching.max_new_tokens(seq) * self._ratio - known, seq.request.prompt_tokens + known

    def _note_end(self, seq: Sequence) -> None:
        ends = self._ends
        if ends is None:
            running = [seq, *self._batching.running, *(one for one, _ in self.chunks)]
            self._ends = sorted((end for end in map(self._end_of, running) if end[0] > 0), key=lambda end: end[0])
            return
        end = self._end_of(seq)
        if end[0] > 0:
            # SGLang's: behind all others it comes before the last.
            place = next((i for i, other in enumerate(ends) if end[0] <= other[0]), max(0, len(ends) - 1))
            ends.insert(place, end)

    # -- for the sake of the more urgent -------------------------------------------------------------------------------

    def lacking(self, seq: Sequence) -> float:
        """Tokens that `seq` lacks room for, by its tokens and hits when it was last looked at; at first none."""
        held = self._memory.held(seq)
        return held.known_tokens - held.match.pages * self.page + self._answer(seq) - self._room

    def give_back(self, seq: Sequence) -> None:
        """`seq`, which runs, is preempted."""
        self._taken -= self.kept_for(seq)

"""`DecodeBatch`: the decoding sequences as aggregates, so that an iteration costs the same for 1 as for 256 of them.

Members that share a layout, that is how many layer groups of their KV lie on the host, are a `Cohort`: what an
iteration moves for them follows from its counts. Members whose KV is wholly on the GPU need none: nothing moves.

Every member takes one token an iteration, so lengths need no updating: a member's context is `batch_offset + step`.
Block growth depends only on that length modulo the block size (`_growth` counts members by residue), and completions
are known in advance (`_finishing`). Members whose last token came at another time than the batch's are listed in
`_late`: they joined, or they were left out of an iteration.
"""

from collections import OrderedDict
from collections.abc import Collection
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from sim.engine.plan import StepTimes, WindowTokens
from sim.engine.sequence import Sequence
from sim.errors import InvariantError

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


class Cohort:
    """Members with `num_hosted` layer groups on the host, as counts by length modulo the block size."""

    __slots__ = ("growth", "num_hosted", "offsets", "size")

    def __init__(self, num_hosted: int, block_size: int) -> None:
        self.num_hosted = num_hosted
        self.size = 0
        # Sum of the members' `batch_offset`: their contexts together are offsets + size * step.
        self.offsets = 0
        self.growth = [0] * block_size

    def count(self, offset: int, sign: int) -> None:
        """A member with that `batch_offset` joins (`sign` 1) or leaves (-1)."""
        self.size += sign
        self.offsets += sign * offset
        self.growth[(1 - offset) % len(self.growth)] += sign

    def blocks_needed(self, step: int) -> int:
        """Members whose token at `step` begins a new block."""
        return self.growth[step % len(self.growth)]

    def num_cached_blocks(self, step: int) -> int:
        """Blocks, in each layer group, that hold what is cached at `step`: the contexts less the tokens being fed."""
        growth = self.growth
        size = len(growth)
        # Each is rounded up to whole blocks: a member of residue i lacks (i - step) mod size tokens.
        lacking = sum(count * ((i - step) % size) for i, count in enumerate(growth) if count)
        return (self.offsets + self.size * (step - 1) + lacking) // size

    def steps_until_growth(self, step: int) -> int:
        """Iterations from `step` on that read as many blocks as this one, none of them but this one beginning any."""
        growth = self.growth
        size = len(growth)
        if growth[step % size]:
            return 1
        for i in range(1, size):
            if growth[(step + i) % size]:
                return i
        return size


class DecodeBatch:
    """Decoding sequences in scheduling order (vLLM's `running`, left to right)."""

    __slots__ = (
        "_finish_heap",
        "_finishing",
        "_growth",
        "_late",
        "block_size",
        "cohort_of",
        "cohorts",
        "context_tokens",
        "gaps",
        "last_token_s",
        "members",
        "step",
        "token_log",
    )

    def __init__(self, block_size: int, gaps: "GapCollector") -> None:
        self.block_size = block_size
        self.step = 0
        self.context_tokens = 0
        self.last_token_s = -1.0
        self.members: OrderedDict[Sequence, None] = OrderedDict()
        # By number of hosted groups, and of each member that has any.
        self.cohorts: dict[int, Cohort] = {}
        self.cohort_of: dict[Sequence, Cohort] = {}
        self._growth = [0] * block_size
        self._finishing: dict[int, list[Sequence]] = {}
        self._finish_heap: list[int] = []
        self._late: dict[Sequence, float] = {}
        self.gaps = gaps
        # Times of every token by request, kept only where asked for (`record_tokens`).
        self.token_log: dict[int, list[float]] | None = None

    @property
    def windowed(self) -> WindowTokens | None:
        """What layers with a window read in the next iteration; None where the model has none (`WindowedBatch`)."""
        return None

    @property
    def longest_tokens(self) -> int:
        """The longest context of the next iteration; 0 where nothing depends on it (`RankedBatch`)."""
        return 0

    def __len__(self) -> int:
        return len(self.members)

    def add(self, seq: Sequence, *, first: bool = False, num_hosted: int = 0) -> None:
        """Let `seq` decode from the next iteration on, at the right end of the order or (`first`) at the left.

        `num_hosted` layer groups of its KV lie on the host.
        """
        step = self.step
        self.members[seq] = None
        if first:
            self.members.move_to_end(seq, last=False)
        self.context_tokens += seq.num_tokens
        seq.batch_offset = offset = seq.num_tokens - step
        self._growth[(1 - offset) % self.block_size] += 1
        self._schedule_finish(seq, step + seq.output_tokens - seq.num_generated)
        if seq.last_token_s != self.last_token_s:
            self._late[seq] = seq.last_token_s
        if num_hosted:
            cohort = self.cohorts.get(num_hosted)
            if cohort is None:
                cohort = self.cohorts[num_hosted] = Cohort(num_hosted, self.block_size)
            cohort.count(offset, 1)
            self.cohort_of[seq] = cohort

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out and bring its own counts up to date."""
        del self.members[seq]
        offset = seq.batch_offset
        seq.num_tokens = offset + self.step
        seq.num_generated = seq.output_tokens - (seq.finish_step - self.step)
        seq.num_blocks = self.num_blocks_of(seq)
        seq.last_token_s = self._late.pop(seq, self.last_token_s)
        self.context_tokens -= seq.num_tokens
        self._growth[(1 - offset) % self.block_size] -= 1
        seq.finish_step = -1
        if self.cohort_of:
            cohort = self.cohort_of.pop(seq, None)
            if cohort is not None:
                cohort.count(offset, -1)
                if not cohort.size:
                    del self.cohorts[cohort.num_hosted]

    def num_tokens_of(self, seq: Sequence) -> int:
        """Context length that the next iteration feeds and attends to."""
        return seq.batch_offset + self.step

    def num_blocks_of(self, seq: Sequence) -> int:
        """Whole blocks that hold its KV between iterations: the last token's is written when the next one feeds it."""
        return -(-(seq.batch_offset + self.step - 1) // self.block_size)

    @property
    def num_blocks_ahead(self) -> int:
        """Blocks that members hold beyond those, for tokens that are yet to be accepted (`DraftingBatch`)."""
        return 0

    def num_generated_of(self, seq: Sequence) -> int:
        """Output tokens produced so far."""
        return seq.output_tokens - (seq.finish_step - self.step)

    def last_token_s_of(self, seq: Sequence) -> float:
        """When the member's last token came, s."""
        return self._late.get(seq, self.last_token_s)

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the next iteration needs one more block for `seq`."""
        return (seq.batch_offset + self.step - 1) % self.block_size == 0

    def blocks_needed(self, steps: int = 1) -> int:
        """Blocks that the next `steps` iterations of the whole batch allocate."""
        growth, size = self._growth, self.block_size
        begin = self.step % size
        if steps == 1:
            return growth[begin]
        cycles, needed = 0, 0
        if steps >= size:
            cycles, steps = divmod(steps, size)
        end = begin + steps
        if end <= size:
            for i in range(begin, end):
                needed += growth[i]
        else:
            # All members but those whose turn comes neither at the end of this cycle nor early in the next.
            cycles += 1
            for i in range(end - size, begin):
                needed -= growth[i]
        return cycles * len(self.members) + needed

    @property
    def late(self) -> dict[Sequence, float]:
        """When the last tokens of members came of which it was not with the batch's, s. To be read only."""
        return self._late

    @property
    def growth(self) -> list[int]:
        """Members whose token begins a new block, by the batch's step modulo the block size. To be read only."""
        return self._growth

    @property
    def due(self) -> dict[int, list[Sequence]]:
        """Steps at which members may complete; `finishing_at` says which do. To be read only."""
        return self._finishing

    def steps_within(self, blocks: int) -> int:
        """Largest number of iterations whose growth fits in `blocks`."""
        size, members = self.block_size, len(self.members)
        cycles, left = divmod(blocks, members)
        steps = cycles * size
        growth, step = self._growth, self.step
        for i in range(step, step + size):
            left -= growth[i % size]
            if left < 0:
                break
            steps += 1
        return steps

    def steps_to_finish(self) -> int:
        """Iterations until the next completion; at least 1 (a stale entry only makes it smaller)."""
        heap, step = self._finish_heap, self.step
        while heap[0] <= step:
            del self._finishing[heappop(heap)]
        return heap[0] - step

    def finishing_at(self, step: int) -> list[Sequence]:
        """Members that complete when the batch's step reaches `step`."""
        return [seq for seq in dict.fromkeys(self._finishing.get(step, ())) if seq.finish_step == step]

    def advance(self, times: StepTimes) -> list[Sequence]:
        """Give every member `times.tokens` tokens; take out and return those that are complete."""
        iterations, first_end_s, steps = times.iterations, times.first_end_s, times.tokens
        gaps = self.gaps
        size = len(self.members)
        late = self._late
        if late:
            for last_s in late.values():
                gaps.add(first_end_s - last_s, 0.0, 1, 1)
            in_step = size - len(late)
            late.clear()
        else:
            in_step = size
        if in_step:
            gaps.add(first_end_s - self.last_token_s, 0.0, 1, in_step)
        if iterations > 1:
            gaps.add(times.second_s, times.slope_s, iterations - 1, size)
        if steps > iterations:
            # Tokens of one iteration come together.
            gaps.add(0.0, 0.0, 1, (steps - iterations) * size)
        if self.token_log is not None:
            self._log_tokens(times)
        self.step = step = self.step + steps
        self.context_tokens += steps * size
        self.last_token_s = times.end_s
        finished: list[Sequence] = []
        heap = self._finish_heap
        while heap and heap[0] <= step:
            for seq in self._finishing.pop(heappop(heap)):
                if seq.finish_step == step:
                    self.remove(seq)
                    finished.append(seq)
                elif step > seq.finish_step > step - steps and seq in self.members:
                    raise InvariantError(f"{seq}: the plan went past its last token")
        if finished:
            gaps.bound_memory()
        return finished

    def _log_tokens(self, times: StepTimes) -> None:
        token_s, gap_s = times.first_end_s, times.second_s
        per_iteration = times.tokens // times.iterations
        for _ in range(times.iterations):
            for seq in self.members:
                self.token_log[seq.request.request_id].extend([token_s] * per_iteration)  # type: ignore[index]
            token_s += gap_s
            gap_s += times.slope_s

    def advance_some(self, chosen: Collection[Sequence], end_s: float) -> list[Sequence]:
        """Give only the members `chosen` a token, move them to the right end, and take out the complete ones.

        vLLM's chunked prefill does this when a half-done prompt eats the token budget: members left out come first.
        """
        finished = []
        late = self._late
        for seq in chosen:
            self.gaps.add(end_s - late.get(seq, self.last_token_s), 0.0, 1, 1)
            late[seq] = end_s
            if self.token_log is not None:
                self.token_log[seq.request.request_id].append(end_s)
            self._shift(seq)
            if seq.finish_step == self.step:
                self.remove(seq)
                finished.append(seq)
            else:
                self.members.move_to_end(seq)
        return finished

    def _shift(self, seq: Sequence) -> None:
        """One token more for `seq` than the batch's step says."""
        growth, size = self._growth, self.block_size
        residue = (1 - seq.batch_offset) % size
        growth[residue] -= 1
        growth[residue - 1] += 1
        cohort = self.cohort_of.get(seq)
        if cohort is not None:
            cohort.count(seq.batch_offset, -1)
            cohort.count(seq.batch_offset + 1, 1)
        seq.batch_offset += 1
        self.context_tokens += 1
        self._schedule_finish(seq, seq.finish_step - 1)

    def shorten(self, seq: Sequence, output_tokens: int) -> None:
        """Let a member end with its `output_tokens`-th token, which must be yet to come and no later than planned."""
        generated = self.num_generated_of(seq)
        if not generated < output_tokens <= seq.output_tokens:
            raise InvariantError(f"{seq}: has {generated} tokens and cannot end with {output_tokens}")
        seq.output_tokens = output_tokens
        self._schedule_finish(seq, self.step + output_tokens - generated)

    def _schedule_finish(self, seq: Sequence, finish_step: int) -> None:
        seq.finish_step = finish_step
        due = self._finishing.get(finish_step)
        if due is None:
            self._finishing[finish_step] = [seq]
            heappush(self._finish_heap, finish_step)
        else:
            due.append(seq)

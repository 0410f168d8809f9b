"""`DecodeBatch`: the decoding sequences as aggregates, so that an iteration costs the same for 1 as for 256 of them.

Every member takes one token an iteration, so lengths need no updating: a member's context is `batch_offset + step`.
Block growth depends only on that length modulo the block size (`_growth` counts members by residue), and completions
are known in advance (`_finishing`). Members whose last token came at another time than the batch's are listed in
`_late`: they joined, or they were left out of an iteration.
"""

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import islice

from sim.engine.itl import GapCollector
from sim.engine.plan import StepTimes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class DecodeBatch:
    """Decoding sequences in scheduling order (vLLM's `running`, left to right)."""

    __slots__ = (
        "_finish_heap",
        "_finishing",
        "_gaps",
        "_growth",
        "_late",
        "block_size",
        "context_tokens",
        "last_token_s",
        "members",
        "step",
        "token_log",
    )

    def __init__(self, block_size: int, gaps: GapCollector) -> None:
        self.block_size = block_size
        self.step = 0
        self.context_tokens = 0
        self.last_token_s = -1.0
        self.members: OrderedDict[Sequence, None] = OrderedDict()
        self._growth = [0] * block_size
        self._finishing: dict[int, list[Sequence]] = {}
        self._finish_heap: list[int] = []
        self._late: dict[Sequence, float] = {}
        self._gaps = gaps
        # Times of every token by request, kept only where asked for (`record_tokens`).
        self.token_log: dict[int, list[float]] | None = None

    def __len__(self) -> int:
        return len(self.members)

    def add(self, seq: Sequence, *, first: bool = False) -> None:
        """Let `seq` decode from the next iteration on, at the right end of the order or (`first`) at the left."""
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

    def num_tokens_of(self, seq: Sequence) -> int:
        """Context length that the next iteration feeds and attends to."""
        return seq.batch_offset + self.step

    def num_blocks_of(self, seq: Sequence) -> int:
        """Whole blocks that hold its KV between iterations: the last token's is written when the next one feeds it."""
        return -(-(seq.batch_offset + self.step - 1) // self.block_size)

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
        if steps == 1:
            return self._growth[self.step % self.block_size]
        size = self.block_size
        cycles, rest = divmod(steps, size)
        needed = cycles * len(self.members)
        begin = self.step % size
        end = begin + rest
        if end > size:
            return needed + sum(self._growth[begin:]) + sum(self._growth[: end - size])
        return needed + sum(self._growth[begin:end])

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
        """Give every member `times.steps` tokens; take out and return those that are complete."""
        steps, first_end_s, second_s, slope_s, end_s = times
        add_gap = self._gaps.add
        size = len(self.members)
        late = self._late
        if late:
            for last_s in late.values():
                add_gap((first_end_s - last_s, 0.0, 1, 1))
            in_step = size - len(late)
            late.clear()
        else:
            in_step = size
        if in_step:
            add_gap((first_end_s - self.last_token_s, 0.0, 1, in_step))
        if steps > 1:
            add_gap((second_s, slope_s, steps - 1, size))
        if self.token_log is not None:
            self._log_tokens(times)
        self.step = step = self.step + steps
        self.context_tokens += steps * size
        self.last_token_s = end_s
        finished: list[Sequence] = []
        heap = self._finish_heap
        while heap and heap[0] <= step:
            for seq in self._finishing.pop(heappop(heap)):
                if seq.finish_step == step:
                    self.remove(seq)
                    finished.append(seq)
        if finished:
            self._gaps.bound_memory()
        return finished

    def _log_tokens(self, times: StepTimes) -> None:
        token_s, gap_s = times.first_end_s, times.second_s
        for _ in range(times.steps):
            for seq in self.members:
                self.token_log[seq.request.request_id].append(token_s)  # type: ignore[index]
            token_s += gap_s
            gap_s += times.slope_s

    def advance_first(self, count: int, end_s: float) -> list[Sequence]:
        """Give only the first `count` members a token, move them to the right end, and take out the complete ones.

        vLLM's chunked prefill does this when a half-done prompt eats the token budget: who was left out comes first.
        """
        chosen = list(islice(self.members, count))
        finished = []
        late = self._late
        for seq in chosen:
            self._gaps.add((end_s - late.get(seq, self.last_token_s), 0.0, 1, 1))
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

"""`TorchDevice`: executes plans with torch and measures. The real clock's half of what the simulator prices.

One iteration: the plan's changes are replayed on block ids, copies that must come first are made, copies beside the
computation start, then the layers run (`computation`). `check_executed` compares what was done with the plan and the
ids against the scheduler's counts.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import groupby
from math import inf
from operator import itemgetter
from threading import Event
from time import perf_counter

import torch
from torch import Tensor

from gpu_runtime.computation import Computation
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.kv.replay.state_placement import StateRestore
from gpu_runtime.kv.transfers import Transfers
from gpu_runtime.layers.warm_up import run_copies, run_kernels, run_sampling
from gpu_runtime.measured.executed import Executed
from gpu_runtime.model.decode_graph import Capture
from gpu_runtime.model.decoder import Scores
from gpu_runtime.model.sampling import Sampling, choose
from gpu_runtime.tokens.drafts import Drafts
from gpu_runtime.tokens.token_ids import TokenIds
from gpu_runtime.tokens.tokens_in_flight import TokensInFlight
from sim.engine.changes import Append, Move
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.stage.speculative import Speculative
from traces.request import Request

PromptOf = Callable[[Request], Seq[int]]
"""The token ids of a request's prompt, as many as it has prompt tokens."""
OnToken = Callable[[Sequence, int, float], None]
"""Hears of every token: whose, which, and when, s."""
SamplingOf = Callable[[Request], Sampling]
"""How the tokens of a request are chosen; those that are drawn have a seed."""
WAKE_S = 0.05
"""Longest sleep while nothing is known to happen, s."""
NAP_S = 1e-4
"""Longest sleep while copies are under way, s."""


class TorchDevice:
    """A decoder, two pools of KV blocks, copy streams and a clock.

    Args:
        memory: the decoder, the blocks, and the scheduler of the engine this device serves.
        prompt_of: token ids of a request's prompt.
        on_token: hears of every token.
        stays_awake: wait for a known time without sleeping. An idle core loses its caches to others and its clock to
            power saving, and its next iteration may take half as long again.
        graph_batch_sizes: batches of decodes that `warm_up` captures as graphs (`model.capture_sizes`).
        piece_sizes: tokens of iterations with prompts that it captures in pieces.
        capture: makes the graphs; None: as CUDA graphs.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        prompt_of: PromptOf,
        on_token: OnToken | None = None,
        stays_awake: bool = False,
        graph_batch_sizes: Seq[int] = (),
        piece_sizes: Seq[int] = (),
        capture: Capture | None = None,
    ) -> None:
        self.memory, self.decoder, self.scheduler = memory, memory.decoder, memory.scheduler
        self.prompt_of, self.on_token = prompt_of, on_token
        self.sampling_of: SamplingOf | None = None
        """None: each token is the likeliest."""
        self._caches_prefixes = self.scheduler.memory.caches_prefixes
        self.tokens = TokenIds(self.scheduler.limits.block_size if self._caches_prefixes else None)
        stage = self.scheduler.stage
        self._drafts = Drafts(stage.num_tokens) if isinstance(stage, Speculative) else None
        self._plan = IterationPlan()
        self._in_flight = TokensInFlight(memory.device)
        self._transfers = Transfers(memory.placement, memory.copies)
        self._computation = Computation(memory, self._transfers, self.tokens, self._choose, self._in_flight)
        self.executed = Executed()
        """What the last iteration copied."""
        self._sizes, self._capture = (graph_batch_sizes, piece_sizes), capture
        self._stays_awake = stays_awake
        self._woken = Event()
        self._begun_s = perf_counter()
        self._progress = 0
        """Tokens and their ids added up, which on all ranks of a group are the same."""

    # -- the clock -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set the clock to zero."""
        self.memory.engine.spans.start_clock()
        self._begun_s = perf_counter()

    def now_s(self) -> float:
        group = self.decoder.group
        return self._own_s() if group is None else group.shared_s(self._own_s(), self._progress)

    def _own_s(self) -> float:
        return perf_counter() - self._begun_s

    def wait(self, until_s: float) -> None:
        if (group := self.decoder.group) is not None:
            group.due(inf)
            if group.rank > 0:
                # The first rank waits, and they for its next time.
                return
        while True:
            left_s = until_s - self._own_s()
            if left_s <= 0 or self._transfers.any_ended:
                return
            # Copies end without a signal: look again soon while there are any. Awake this thread would hardly let go of
            # the interpreter's lock, which the threads that queue copies, piece by piece, need.
            sleep_s = NAP_S if self.copies_pending else WAKE_S
            awake = self._stays_awake and left_s != inf and not (self.copies_pending and left_s > 2 * NAP_S)
            if self._is_woken_within(0.0 if awake else min(left_s, sleep_s)):
                self._woken.clear()
                return
            if left_s > WAKE_S and not awake and not self.copies_pending:
                return

    def _is_woken_within(self, seconds: float) -> bool:
        try:
            return self._woken.wait(seconds)
        except RuntimeError as error:
            # A signal came as the event had let go of its lock, and what its handler raised is lost behind that.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def wake(self) -> None:
        """Let `wait` return, now or the next time it is called. For other threads: a request may have arrived."""
        self._woken.set()

    # -- copies beside and behind the computation ------------------------------------------------------------------

    @property
    def copies_pending(self) -> bool:
        return len(self._transfers) > 0

    def ended_transfers(self) -> list[Move]:
        return self._transfers.take_ended()

    def _await_copies(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence, which is about to give its blocks back."""
        self._transfers.wait(seq)
        self._computation.tables.forget(seq)
        if self._drafts is not None:
            self._drafts.drop(seq)

    def failures(self) -> list[tuple[Sequence, str]]:
        found, self.memory.failures = self.memory.failures, []
        return found

    # -- one iteration -------------------------------------------------------------------------------------------

    def execute(self, plan: IterationPlan) -> StepTimes:
        self.launch(plan)
        end_s = self.collect()
        return StepTimes(1, end_s, 0.0, 0.0, end_s, 1)

    def launch(self, plan: IterationPlan) -> None:
        done = self.executed = Executed()
        num_tokens_of, placement = self.scheduler.batch.num_tokens_of, self.memory.placement
        copies, inputs, uncached = self.memory.copies, self.memory.inputs, self.memory.uncached
        decodes = [(seq, num_tokens_of(seq)) for seq in plan.decodes]
        under_way = self._in_flight.under_way
        self._in_flight.begin({chunk.seq: chunk.num_new for chunk in plan.chunks} | {seq: 1 for seq, _ in decodes})
        for change in plan.changes:
            if type(change) is Append:
                self.tokens.extend(change.seq, change.num_tokens)
        for copy in placement.replay(plan, self._await_copies):
            # Before the computation, as vLLM 0.5.5 swaps: the same blocks may be written next.
            if isinstance(copy, StateRestore):
                self._restore(copy)
                continue
            done.add(copy)
            if copy.source:
                copies.wait(copy.seq, [copies.start(copy)])
        for move in plan.beside:
            done.add(self._transfers.begin(move))
        if plan.chunks or decodes:
            if self.memory.has_windows:
                # What an iteration under way reads is given back one later, as the scheduler counts.
                reading = [(chunk.seq, chunk.num_cached) for chunk in plan.chunks]
                reading += [(seq, num_tokens - 1) for seq, num_tokens in decodes]
                placement.leave((seq, position - under_way.get(seq, 0)) for seq, position in reading)
            if self._drafts is None:
                placement.grow((chunk.seq, chunk.num_cached + chunk.num_new) for chunk in plan.chunks)
                placement.grow(decodes)
            else:
                self._grow_ahead(plan)
            if inputs is not None:
                inputs.begin(plan, decodes)
            if uncached is not None:
                uncached.begin(plan)
            drafts = None
            if self._drafts is not None and plan.drafts:
                drafts = {s: self._drafts.take(s, plan.drafts[s]) for s in plan.decodes if s in plan.drafts}
            self._computation.run(plan, decodes, done, drafts)
            if uncached is not None:
                uncached.end()
        self._in_flight.launched()
        self._plan = plan

    def collect(self) -> float:
        if self._drafts is not None:
            self._collect_accepted(self._drafts)
            return self.now_s()
        for seq, token, is_computed in self._in_flight.land():
            self._hear(seq, token, is_computed)
        return self.now_s()

    def _hear(self, seq: Sequence, token: int, is_computed: bool) -> None:
        """A token has come."""
        if seq not in self.tokens:
            # It has ended since: no client waits for the token.
            return
        self.tokens.append(seq, token)
        self._progress += token + 1
        if is_computed and self.on_token is not None:
            self.on_token(seq, token, self._own_s())

    # -- drafts ----------------------------------------------------------------------------------------------------

    def _grow_ahead(self, plan: IterationPlan) -> None:
        """Take blocks for drafts as well: as many as the scheduler counts."""
        size, num_blocks_of = self.memory.placement.block_tokens, self.scheduler.batch.num_blocks_of
        self.memory.placement.grow((chunk.seq, chunk.seq.num_blocks * size) for chunk in plan.chunks)
        self.memory.placement.grow((seq, num_blocks_of(seq) * size) for seq in plan.decodes)

    def _collect_accepted(self, drafts: Drafts) -> None:
        """Hear of the accepted tokens, and tell the plan how many each sequence has taken."""
        plan, taken = self._plan, dict[Sequence, int]()
        for seq, landed in groupby(self._in_flight.land(), key=itemgetter(0)):
            rows = list(landed)
            known, had = len(self.tokens.of(seq)), self.scheduler.num_generated_of(seq)
            for token in drafts.accepted(seq, [token for _, token, _ in rows]):
                # It may end with any of them.
                if had + taken.get(seq, 0) < seq.output_tokens:
                    taken[seq] = taken.get(seq, 0) + 1
                    self._hear(seq, token, rows[0][2])
            drafts.draft(seq, self.tokens.of(seq))
            if self._caches_prefixes and rows[0][2]:
                self.memory.placement.prefixes.computed([(seq, known, len(self.tokens.of(seq)) - 1)])
        plan.taken = {seq: taken[seq] for seq in plan.decodes}

    def _restore(self, copy: StateRestore) -> None:
        """Bring KV back from states, as far as there is memory."""
        states = self.memory.states
        assert states is not None
        try:
            self.executed.moves.append(states.restore(copy, self.tokens.of(copy.seq)))
        except torch.OutOfMemoryError as error:
            states.failed(copy, f"out of memory: {str(error).splitlines()[0]}")
            self.executed.given_up.add(copy.seq)

    # -- tokens --------------------------------------------------------------------------------------------------

    def named(self, request: Request) -> Request:
        return self.tokens.arrived(request, list(self.prompt_of(request)))

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        return self.tokens.named_blocks()

    def _choose(self, scores: Scores, seqs: Seq[Sequence], positions: Seq[int]) -> Tensor:
        if self.sampling_of is None:
            return scores.likeliest
        return choose(scores, [self.sampling_of(seq.request) for seq in seqs], positions)

    def forget(self, seq: Sequence) -> None:
        self.tokens.forget(seq)
        if self._drafts is not None:
            self._drafts.forget(seq)

    def warm_up(self) -> None:
        """Run every kernel that serving may reach, on free blocks, and capture graphs: set-up delays no request."""
        limits = self.scheduler.limits
        run_kernels(self.decoder, self.memory.gpu, limits)
        if self.sampling_of is not None:
            run_sampling(self.decoder, limits)
        run_copies(self.memory.engine, self.memory.gpu, self.memory.host)
        self._computation.capture(*self._sizes, self._capture)

    def close(self) -> None:
        """End the copy threads and give memory back: what is left of a run, this device with it, outlives the run."""
        self._computation.release()
        self.memory.release()
        if self.memory.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- checks --------------------------------------------------------------------------------------------------

    def check_executed(self, plan: IterationPlan) -> None:
        """InvariantError unless the plan just executed was carried out block by block, and ids in use are what the
        scheduler counts. Before the plan is committed."""
        self.executed.check(plan)
        self.memory.check()
        self.memory.check_counts()

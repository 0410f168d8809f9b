"""LayerKV (Xiong et al., "LayerKV: Optimizing LLM Serving with Layer-wise KV Cache Management"), on vLLM 0.5.5.

A prompt is admitted with the KV of as few as x layers on the GPU (Eq. 4); the other layers leave for the host behind
the prefill, so that it need not queue for blocks. Admission follows the TPOT slack of everyone decoding (Algorithm 1,
Eq. 1-3). A forecast of free blocks (Eq. 5) offloads retained layers in stages before memory runs out.

What the paper leaves open, and what is done here:
- Decode of a sequence with layers on the host: `promote` (default) parks it until its missing layers fit, copies them
  back once and lets it join; `stream` lets it decode at once and copies the missing layers back every step.
- Eq. 3 printed lacks the layer count in its attention term, Eq. 4 printed takes all heads and a link of one's own;
  `equations="paper"` decides with the printed forms, and forecasts one block a sequence and step instead of the blocks
  that the sequences' lengths say.
- "x/2 layers, then all" is read as half of the retained layers, most recently processed first: parked sequences before
  decoding ones.
- One request that can no longer meet its TPOT would stop every prefill: `drop_irrecoverable` leaves it out of Eq. 2.
- `max_num_seqs` bounds who decodes or is on the way back; parked sequences wait outside it.
- If memory runs out all the same, the last sequence of the batch is offloaded whole before the step (counted), or
  recomputed when the host is full, as vLLM would.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, Literal

from sim.cost.forms import CostModel
from sim.cost.lanes import SEND_BUFFER_LAYERS
from sim.engine.itl import GapCollector
from sim.engine.plan import Direction, IterationPlan, StepTimes, Transfer, make_transfer
from sim.engine.predictor import LengthPredictor, build_predictor
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.policies.base import Deployment, Limits, Policy, Scheduler, option
from sim.policies.slack import SlackBook
from sim.policies.vllm import WATERMARK, VllmScheduler

MAX_HORIZON_STEPS = 10_000
EXPECTED_LIMIT = 4096
"""Steps with expected ends that are kept before those that have passed are dropped."""


@dataclass(frozen=True)
class LayerKV(Policy):
    """Options of LayerKV; the defaults are the paper's system with the corrected equations."""

    name: ClassVar[str] = "layerkv"
    summary: ClassVar[str] = "LayerKV: layer-wise KV blocks, offload behind prefill, SLO-aware admission"
    # The paper's testbed has 2 TB for eight GPUs.
    default_swap_space_gib: ClassVar[float] = 256.0

    slo_aware: bool = option(True, "admit prefills only within the TPOT slack of who decodes (Algorithm 1)")
    tpot_slo_ms: float = option(200.0, "TPOT that Algorithm 1 defends, ms")
    decode: Literal["promote", "stream"] = option(
        "promote", "sequences with layers on the host wait and copy them back once, or stream them every step"
    )
    equations: Literal["corrected", "paper"] = option("corrected", "Eq. 3-5 corrected, or as printed")
    horizon_steps: int = option(8, "iterations that the Eq. 5 forecast looks ahead")
    threshold: float = option(WATERMARK, "share of the GPU's layer-blocks under which the forecast offloads")
    drop_irrecoverable: bool = option(True, "leave requests that can no longer meet their TPOT out of Eq. 2")
    predictor: Literal["oracle", "bucket", "none"] = option(
        "oracle", "output lengths are known, predicted by class with --predictor-accuracy, or unknown"
    )
    predictor_accuracy: float = option(0.85, "probability that the predictor names the right class")

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("tpot-slo-ms", self.tpot_slo_ms, 1e-3, 1e9),
            ("horizon-steps", self.horizon_steps, 1, MAX_HORIZON_STEPS),
            ("threshold", self.threshold, 0.0, 1.0),
            ("predictor-accuracy", self.predictor_accuracy, 0.0, 1.0),
        ):
            if not low <= value <= high:
                raise UserError(f"--{name}: {value} is not between {low:g} and {high:g}")

    def scheduler(self, limits: Limits, gaps: GapCollector, deployment: Deployment) -> Scheduler:
        return LayerKVScheduler(limits, gaps, deployment, self)

    def length_predictor(self, seed: int) -> LengthPredictor:
        return build_predictor(self.predictor, self.predictor_accuracy, seed)


def minimum_layers(cost: CostModel, num_tokens: int, num_layers: int, *, printed: bool) -> int:
    """Eq. 4: fewest layers x to keep so that offloading the rest hides behind the prefill (T_offload <= T_prefill)."""
    per_layer_s = cost.offload_s(num_tokens, 1, printed=printed)
    if per_layer_s <= 0.0:
        return 0
    hidden = int(cost.prefill_s(num_tokens, printed=printed) / per_layer_s)
    return max(0, num_layers - hidden)


class LayerKVScheduler(VllmScheduler):
    """vLLM's queues with layer-blocks: `batch` holds who can decode, `parked` who waits for layers to come back."""

    def __init__(self, limits: Limits, gaps: GapCollector, deployment: Deployment, options: LayerKV) -> None:
        self.layers = deployment.model.num_layers
        super().__init__(limits, gaps, swap=False, layer_group=self.layers)
        self.tally = self.counters.policy
        self.options = options
        self.cost = deployment.cost
        self.printed = options.equations == "paper"
        self.tpot_slo_s = options.tpot_slo_ms / 1e3
        self.layer_block_bytes = limits.block_bytes / self.layers
        self.watermark_units = self.watermark_blocks * self.layers
        self._threshold_floor = int(options.threshold * self.gpu.num_blocks)
        horizon = options.horizon_steps
        self._growth_per_sequence = self.layers * (horizon if self.printed else -(-horizon // limits.block_size))
        self.parked: OrderedDict[Sequence, None] = OrderedDict()
        # Of these, who has layers on the GPU that could go.
        self._retaining: OrderedDict[Sequence, None] = OrderedDict()
        self.promoting: dict[Sequence, None] = {}
        self.streaming: dict[Sequence, None] = {}
        self._background: list[Transfer] = []
        # Layer-blocks that copies on their way will free.
        self._releasing = 0
        self._host_reserved = 0
        self._expected: dict[int, list[Sequence]] = {}
        self._sizing: dict[int, tuple[float, int]] = {}
        self._now_s = 0.0
        self.lengths_known = options.predictor == "oracle"
        self.slack = SlackBook(
            self.tpot_slo_s, drop_irrecoverable=options.drop_irrecoverable, lengths_known=self.lengths_known
        )
        self._least_slack_s: float | None = None
        self._admitted_prefill_s = 0.0
        self._slack_blocks = False
        self._placement = 0
        self._last_tpot_s: float | None = None

    @property
    def num_running(self) -> int:
        return super().num_running + self.num_swapped

    @property
    def num_swapped(self) -> int:
        return len(self.parked) + len(self.promoting)

    # -- one step ------------------------------------------------------------------------------------------------

    def _before_step(self, now_s: float) -> None:
        self._now_s = now_s
        self._least_slack_s = None
        self._slack_blocks = False
        self._admitted_prefill_s = 0.0
        members = len(self.batch.members)
        # While something decodes, promotion has to wait for memory or a seat most of the time: seen at a glance.
        if self.streaming or (self.parked and (not members or self._head_may_return(members))):
            self._promote()
            members = len(self.batch.members)
        if members:
            floor = self._threshold_floor
            available = self.gpu.free + self._releasing - (members if members > floor else floor)
            if available < members * self._growth_per_sequence:
                self._forecast(available)
        if self.streaming or self._host_reserved:
            self._reserve_host_growth()

    def _after_step(self, plan: IterationPlan) -> None:
        if self._background:
            plan.background, self._background = tuple(self._background), []
        for seq, num_new, num_cached, _ in plan.chunks:
            if seq.layers_on_gpu < self.layers:
                self._offload_behind_prefill(plan, seq, num_new, num_cached)
        if self.streaming and plan.num_decodes:
            self._stream(plan)

    def _idle_plan(self) -> IterationPlan | None:
        """Nothing to compute, but perhaps copies to start."""
        if not self._background:
            return None
        plan = IterationPlan()
        plan.background, self._background = tuple(self._background), []
        return plan

    def _allow_jump(self, plan: IterationPlan) -> None:
        super()._allow_jump(plan)
        if plan.max_steps == 1:
            return
        if self._slack_blocks or self.streaming or self._background:
            # Slack changes with time; streamed bytes with every token.
            plan.max_steps = 1
            return
        # Jump no further than the forecast is sure to find enough.
        batch, horizon = self.batch, self.options.horizon_steps
        spare = self._available_units() // self.layers + batch.blocks_needed(1)
        if self.printed:
            spare -= len(batch) * horizon
            horizon = 0
        if spare // len(batch.members) * batch.block_size - horizon >= plan.max_steps:
            return
        steps = batch.steps_within(spare) - horizon if spare >= 0 else 1
        plan.max_steps = max(1, min(plan.max_steps, steps))

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        if plan.num_decodes and not plan.chunks:
            # The last iteration's duration, as a run of single steps would know it.
            if times.steps > 1:
                self._last_tpot_s = times.second_s + times.slope_s * (times.steps - 2)
            else:
                self._last_tpot_s = times.end_s - self._now_s
        shifted = list(islice(self.batch.members, plan.num_decodes)) if plan.decodes_first else ()
        super().commit(plan, times)
        for seq in shifted:
            if seq in self.batch.members:
                self.slack.update(seq, decoding=True)
                self._expect_end(seq)

    # -- Algorithm 1: how many prefills the decoding requests' TPOT allows ------------------------------------------

    def _within_slack(self, prefill_s: float) -> bool:
        """Eq. 2: whether prefills of `prefill_s` in all leave everyone who decodes their TPOT."""
        least_s = self._least_slack_s
        if least_s is None:
            batch = self.batch
            tpot_s = self._last_tpot_s
            if tpot_s is None:
                tpot_s = self.cost.decode_run(max(1, len(batch)), batch.context_tokens)[0]
            if self.slack.witness_blocks(prefill_s, self._now_s, tpot_s, batch.step):
                return False
            least_s = self._least_slack_s = self.slack.least_s(prefill_s, self._now_s, tpot_s, batch.step)
        return prefill_s < least_s

    # -- admission and placement -----------------------------------------------------------------------------------

    def _fits_now(self, seq: Sequence, blocks: int) -> bool:
        """Eq. 2, then blocks for x layers and the send buffer; decides how many layers stay (`_placement`)."""
        prefill_s, minimum = self._size_prefill(seq.num_tokens)
        prefill_s += self._admitted_prefill_s
        if self.options.slo_aware and not self._within_slack(prefill_s):
            self._slack_blocks = True
            return False
        kept = self._layers_to_keep(minimum, blocks)
        if kept is None:
            return False
        self._placement = kept
        self._admitted_prefill_s = prefill_s
        return True

    def _size_prefill(self, num_tokens: int) -> tuple[float, int]:
        """Eq. 3's prefill time, s, and Eq. 4's x; they depend on the length alone."""
        found = self._sizing.get(num_tokens)
        if found is None:
            prefill_s = self.cost.prefill_s(num_tokens, printed=self.printed)
            minimum = minimum_layers(self.cost, num_tokens, self.layers, printed=self.printed)
            found = self._sizing[num_tokens] = prefill_s, minimum
        return found

    def _layers_to_keep(self, minimum: int, blocks: int) -> int | None:
        """As many layers as memory has to spare, at least Eq. 4's x; None if not even those fit now."""
        layers = self.layers
        kept = minimum
        if not self.parked:
            spare = self.gpu.free - self._threshold_units() - self._growth_units()
            kept = max(minimum, min(layers, spare // blocks))
        while kept <= layers:
            buffer = min(SEND_BUFFER_LAYERS, layers - kept)
            if (kept + buffer) * blocks > self.gpu.free - self.watermark_units:
                if kept == minimum:
                    return None
                kept = max(minimum, min(kept - 1, (self.gpu.free - self.watermark_units) // blocks - buffer))
                continue
            if (layers - kept) * blocks <= self.host.free:
                return kept
            # A full host leaves only the GPU, all of it.
            if layers * blocks <= self.gpu.free - self.watermark_units:
                return layers
            return None
        return None

    def _allocate(self, seq: Sequence) -> None:
        kept = seq.layers_on_gpu = self._placement
        buffer = min(SEND_BUFFER_LAYERS, self.layers - kept)
        self.gpu.allocate((kept + buffer) * seq.num_blocks)
        self.host.allocate((self.layers - kept) * seq.num_blocks)
        if kept < self.layers:
            self.tally["offloaded_at_prefill_layer_blocks"] += (self.layers - kept) * seq.num_blocks
            self.tally["prefills_offloaded"] += 1

    def _offload_behind_prefill(self, plan: IterationPlan, seq: Sequence, num_new: int, cached: int) -> None:
        """Copies of one prefill chunk: its own KV out, and back in what earlier chunks left on the host."""
        layers = self.layers - seq.layers_on_gpu
        block_size = self.limits.block_size
        moved = layers * -(-num_new // block_size)
        if layers > plan.pipelined_layers:
            plan.pipelined_layers = layers
        plan.pipelined_bytes += moved * self.layer_block_bytes
        plan.pipelined_copies += 2 * moved
        if cached + num_new == seq.num_tokens:
            # The end of the last chunk's copies frees the send buffer.
            freed = min(SEND_BUFFER_LAYERS, layers) * seq.num_blocks
            plan.pipelined_d2h += (self._transfer(seq, Direction.D2H, layers, 0, freed),)
        if cached:
            blocks = layers * -(-cached // block_size)
            plan.streamed_bytes += blocks * self.layer_block_bytes
            plan.streamed_copies += 2 * blocks

    def _transfer(self, seq: Sequence, direction: Direction, layers: int, blocks: int, pool_blocks: int) -> Transfer:
        """A copy of `layers` x `blocks` layer-blocks, K and V apart; `pool_blocks` GPU layer-blocks hang on its end."""
        seq.transfers += 1
        if direction is Direction.D2H:
            self._releasing += pool_blocks
        moved = layers * blocks
        return make_transfer((seq, direction, layers, pool_blocks, moved * self.layer_block_bytes, 2 * moved))

    def _join(self, seq: Sequence, *, first: bool = False) -> None:
        if seq.layers_on_gpu == self.layers:
            self._enter_batch(seq, first=first)
        else:
            self._park(seq)
            self.tally["parked"] += 1

    def _park(self, seq: Sequence) -> None:
        seq.status = Status.PARKED
        self.parked[seq] = None
        if seq.layers_on_gpu:
            self._retaining[seq] = None
        self.slack.update(seq, decoding=False)

    def _unpark(self, seq: Sequence) -> None:
        self.parked.pop(seq, None)
        self._retaining.pop(seq, None)

    def _enter_batch(self, seq: Sequence, *, first: bool = False) -> None:
        seq.status = Status.RUNNING
        self.batch.add(seq, first=first)
        self.slack.update(seq, decoding=True)
        self._expect_end(seq)

    # -- Eq. 5: forecast and staged offload ------------------------------------------------------------------------

    def _threshold_units(self) -> int:
        """Layer-blocks that the forecast wants free."""
        size = len(self.batch.members)
        return size if size > self._threshold_floor else self._threshold_floor

    def _growth_units(self) -> int:
        """Most layer-blocks the forecast may see allocated if one more sequence joins: no admission undoes itself."""
        return (len(self.batch.members) + len(self.promoting) + 1) * self._growth_per_sequence

    def _available_units(self) -> int:
        """Layer-blocks free or on their way to be, above the threshold."""
        return self.gpu.free + self._releasing - self._threshold_units()

    def _forecast(self, available: int) -> None:
        """Avail(t+1) = Avail(t) + Released(t) - Allocated(t) over the horizon; offload if it will be too little."""
        batch, horizon = self.batch, self.options.horizon_steps
        size = len(batch.members)
        if not self.printed and available >= batch.blocks_needed(horizon) * self.layers:
            return
        released = self._predicted_releases(horizon)
        lowest = available
        for t in range(horizon):
            taken = size * (t + 1) if self.printed else batch.blocks_needed(t + 1)
            lowest = min(lowest, available - taken * self.layers)
            available += released[t]
        if lowest < 0:
            self.tally["forecast_shortages"] += 1
            self._offload_retained(-lowest)

    def _predicted_releases(self, horizon: int) -> list[int]:
        """Layer-blocks freed at the end of each step by sequences whose median predicted length is reached there."""
        batch = self.batch
        released = [0] * horizon
        for t in range(horizon):
            step = batch.step + t + 1
            for seq in batch.finishing_at(step) if self.lengths_known else self._expected.get(step, ()):
                if self.lengths_known or (seq.expected_step == step and seq in batch.members):
                    released[t] += batch.num_blocks_of(seq) * seq.layers_on_gpu
        return released

    def _expect_end(self, seq: Sequence) -> None:
        """Note at which of the batch's steps the median prediction lets `seq` end; the batch knows if it is right."""
        if self.lengths_known:
            return
        expected, step = self._expected, self.batch.step
        seq.expected_step = step + seq.predicted_median_tokens - self.batch.num_generated_of(seq)
        if seq.expected_step > step:
            expected.setdefault(seq.expected_step, []).append(seq)
        if len(expected) > EXPECTED_LIMIT:
            self._expected = {key: found for key, found in expected.items() if key > step}

    def _offload_retained(self, shortage: int) -> None:
        """Half of the retained layers, most recently processed sequence first; if that is not enough, all of them."""
        for share in (2, 1):
            for seq in list(reversed(self._retaining)):
                if shortage <= 0 or not self.host.free:
                    return
                if not seq.transfers:
                    shortage -= self._offload(seq, -(-seq.layers_on_gpu // share))
        batch = self.batch
        for seq in list(reversed(batch.members)):
            if shortage <= 0 or len(batch.members) == 1 or self.host.free < self.layers:
                return
            if seq.transfers or not seq.layers_on_gpu:
                continue
            blocks = batch.num_blocks_of(seq)
            half = -(-seq.layers_on_gpu // 2)
            layers = half if half * blocks >= shortage else seq.layers_on_gpu
            if layers * blocks <= self.host.free:
                self._leave_batch(seq)
                shortage -= self._offload(seq, layers)

    def _offload(self, seq: Sequence, layers: int) -> int:
        """Start copying `layers` retained layers of a parked sequence to the host; layer-blocks that will be freed."""
        blocks = layers * seq.num_blocks
        if blocks > self.host.free:
            return 0
        self.host.allocate(blocks)
        seq.layers_on_gpu -= layers
        if not seq.layers_on_gpu:
            self._retaining.pop(seq, None)
        self._background.append(self._transfer(seq, Direction.D2H, layers, seq.num_blocks, blocks))
        self.tally["offloaded_by_forecast_layer_blocks"] += blocks
        return blocks

    def _leave_batch(self, seq: Sequence) -> None:
        """A decoding sequence is parked; it was here before all that wait, so it stands first among them."""
        self._take_out(seq)
        self.streaming.pop(seq, None)
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        self._changed = True
        self._park(seq)
        self.parked.move_to_end(seq, last=False)

    # -- bringing layers back ----------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Copy the missing layers of parked sequences back, first come first served, while memory lasts."""
        seats = self.limits.max_num_seqs - len(self.batch.members) - len(self.promoting)
        idle = not self.batch and not self.promoting and not self._releasing and self.partial is None
        while (seq := self._next_promotable()) is not None:
            if seq in self.streaming:
                seq.num_blocks = self.batch.num_blocks_of(seq)
            elif seats <= 0:
                return
            missing = (self.layers - seq.layers_on_gpu) * seq.num_blocks
            if self.gpu.free - missing - self._growth_units() < self._threshold_units() and not (
                idle and self._make_room(seq, missing)
            ):
                return
            idle = False
            if seq.status is not Status.IGNORED:
                seats -= seq not in self.streaming
                self._start_promotion(seq)

    def _head_may_return(self, members: int) -> bool:
        """Whether there is a seat and memory for the oldest parked sequence."""
        taken = members + len(self.promoting)
        head = next(iter(self.parked))
        floor = self._threshold_floor
        room = self.gpu.free - (members if members > floor else floor) - (taken + 1) * self._growth_per_sequence
        # A head whose copies are still on their way lets others pass: look closer.
        fits = (self.layers - head.layers_on_gpu) * head.num_blocks <= room or head.transfers > 0
        return fits and taken < self.limits.max_num_seqs

    def _next_promotable(self) -> Sequence | None:
        """The oldest sequence whose copies to the host are complete."""
        for seq in chain(self.streaming, self.parked) if self.streaming else self.parked:
            if not seq.transfers:
                return seq
        return None

    def _make_room(self, seq: Sequence, missing: int) -> bool:
        """Nothing runs and `seq` does not fit above the threshold: let it use the rest, or push others' layers out."""
        if missing + self.layers <= self.gpu.free:
            return True
        if seq.num_blocks * self.layers + self.layers > self.gpu.num_blocks:
            self._give_up(seq)
            return True
        for other in list(reversed(self._retaining)):
            if other is not seq and not other.transfers:
                self._offload(other, other.layers_on_gpu)
        if not self._releasing:
            # The host is full too: whoever came last is computed again.
            self._recompute_last(seq)
        return False

    def _give_up(self, seq: Sequence) -> None:
        """A sequence that outgrew the GPU can never decode again."""
        self._unpark(seq)
        self.streaming.pop(seq, None)
        self._free(seq)
        self.ignore(seq, "sequence outgrew the GPU blocks")

    def _recompute_last(self, spared: Sequence) -> None:
        for seq in reversed(self.parked):
            if seq is not spared and not seq.transfers:
                self._unpark(seq)
                self._drop(seq)
                self.waiting.appendleft(seq)
                return

    def _drop(self, seq: Sequence) -> None:
        """Give up the KV of `seq`, for which the host has no room; it is to be computed again."""
        self._free(seq)
        seq.reset_for_recompute()
        self.counters.preemptions += 1
        self.counters.swap_space_exhausted += 1
        self._changed = True

    def _start_promotion(self, seq: Sequence) -> None:
        if seq in self.streaming:
            del self.streaming[seq]
            self._take_out(seq)
            self.slack.update(seq, decoding=False)
        else:
            self._unpark(seq)
        layers = self.layers - seq.layers_on_gpu
        self.promoting[seq] = None
        self.gpu.allocate(layers * seq.num_blocks)
        self._background.append(self._transfer(seq, Direction.H2D, layers, seq.num_blocks, 0))
        self.tally["promoted"] += 1
        self.tally["promoted_layer_blocks"] += layers * seq.num_blocks

    def transfer_done(self, transfer: Transfer) -> None:
        seq = transfer.seq
        seq.transfers -= 1
        if transfer.direction is Direction.D2H:
            self._releasing -= transfer.num_blocks
            self.gpu.release(transfer.num_blocks)
            if self.options.decode == "stream" and not seq.transfers and seq in self.parked:
                self._start_streaming(seq)
            return
        del self.promoting[seq]
        self.host.release((self.layers - seq.layers_on_gpu) * seq.num_blocks)
        seq.layers_on_gpu = self.layers
        self._enter_batch(seq)

    # -- stream: decode with layers on the host ----------------------------------------------------------------------

    def _start_streaming(self, seq: Sequence) -> None:
        """Let a parked sequence decode from the host, if a step then still keeps to the TPOT."""
        if len(self.batch.members) + len(self.promoting) >= self.limits.max_num_seqs:
            return
        if self.options.slo_aware:
            blocks = sum(self._streamed_blocks(s, self.batch.num_tokens_of(s)) for s in self.streaming)
            blocks += self._streamed_blocks(seq, seq.num_tokens)
            if self.cost.copy_s(blocks * self.layer_block_bytes, 2 * blocks, Direction.H2D) > self.tpot_slo_s:
                return
        self._unpark(seq)
        self.streaming[seq] = None
        self._enter_batch(seq)
        self.tally["streamed_sequences"] += 1

    def _streamed_blocks(self, seq: Sequence, num_tokens: int) -> int:
        return (self.layers - seq.layers_on_gpu) * -(-num_tokens // self.limits.block_size)

    def _reserve_host_growth(self) -> None:
        """Take the host blocks that streaming sequences grow into; who finds none is computed again."""
        self.host.release(self._host_reserved)
        self._host_reserved = 0
        while True:
            batch = self.batch
            needed = sum(self.layers - seq.layers_on_gpu for seq in self.streaming if batch.needs_block(seq))
            if needed <= self.host.free:
                self.host.allocate(needed)
                self._host_reserved = needed
                return
            seq, _ = self.streaming.popitem()
            self._take_out(seq)
            self._drop(seq)
            self.waiting.appendleft(seq)

    def _stream(self, plan: IterationPlan) -> None:
        """Every step brings in the missing layers again; blocks that they grow by lie on the host."""
        batch = self.batch
        decoding = set(islice(batch.members, plan.num_decodes)) if plan.decodes_first else batch.members
        for seq in self.streaming:
            if seq not in decoding:
                continue
            blocks = self._streamed_blocks(seq, batch.num_tokens_of(seq))
            plan.streamed_bytes += blocks * self.layer_block_bytes
            plan.streamed_copies += 2 * blocks
            if batch.needs_block(seq):
                # The batch took a whole block on the GPU; of the reserved host blocks these are now in use.
                missing = self.layers - seq.layers_on_gpu
                self.gpu.release(missing)
                self._host_reserved -= missing

    # -- out of memory, and the end ----------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence, plan: IterationPlan) -> None:
        """The forecast came too late: offload the victim before the step, or have it computed again."""
        if seq is self.partial:
            super()._preempt(seq, plan)
            return
        blocks = self.batch.num_blocks_of(seq)
        if seq in self.streaming or blocks * self.layers > self.host.free:
            self._take_out(seq)
            self.streaming.pop(seq, None)
            self._drop(seq)
            self._preempted.append(seq)
            return
        self._leave_batch(seq)
        self.gpu.release(blocks * self.layers)
        self.host.allocate(blocks * self.layers)
        seq.layers_on_gpu = 0
        self._retaining.pop(seq, None)
        plan.swapped_out_blocks += blocks
        self.counters.swap_out_blocks += blocks
        self.tally["emergency_offloads"] += 1

    def _free(self, seq: Sequence) -> None:
        """Give back what `seq` holds on both sides, the send buffer of a half-done prefill included."""
        self.slack.remove(seq)
        missing = self.layers - seq.layers_on_gpu
        buffer = min(SEND_BUFFER_LAYERS, missing) if seq.prefilling else 0
        self.gpu.release((seq.layers_on_gpu + buffer) * seq.num_blocks)
        self.host.release(missing * seq.num_blocks)
        seq.num_blocks = 0

    def _end(self, seq: Sequence, end_s: float) -> None:
        self.streaming.pop(seq, None)
        super()._end(seq, end_s)

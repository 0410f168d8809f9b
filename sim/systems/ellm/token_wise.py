"""`TokenWiseMemory`: blocks of a few layers, and the first tokens of every sequence in none of them (eLLM section 3.2).

A share of all tokens, the first of each sequence, is uncached: every decode brings their KV back between the layers.
Some layers compute it again, the others copy it in from the host, where it lies in blocks of the same shape. What one
pass holds of it at a time is scratch (M_o). A map table finds the blocks.
"""

from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING, ClassVar

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Move, Place, Rebuilt, Release, Tier, Uncache
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.memory import Memory
from sim.parts.catalogue import class_at
from sim.parts.needs import Need
from sim.systems.ellm.equations import (
    CONFIGURATIONS,
    Configuration,
    StepCosts,
    thread_loss,
    threads_for_recomputation,
)
from sim.systems.ellm.preset import TokenWiseOptions
from sim.systems.ellm.solver import Batch, feasible_ratios
from sim.systems.ellm.solver import Memory as Room

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class TokenWiseMemory(Memory):
    """Blocks of `layers_per_block` layers, for the tokens that are cached.

    Args:
        limits: of the engine, in whole blocks.
        num_layers: of the model, a multiple of `layers_per_block` (F).
        options: blocks, kernels, and the share of tokens that is uncached in any case, or may be. Where equations are
            `printed`, room for scratch is planned as for sequences as long as the longest.
        times: the volumes of the kernels that bring uncached tokens' KV back.
        allots: what these are taken to be where threads are split between fused kernels (Eq. 8-9).
    """

    name: ClassVar[str] = "token-wise"
    options: ClassVar[type | None] = TokenWiseOptions
    needs: ClassVar[tuple[Need, ...]] = (Need("admission", "is told what to leave uncached", names=("token-wise",)),)
    takes_chunks = False
    can_receive = False
    unexecutable = (
        "ellm layer-order: interleaved layers cannot compute uncached KV again on a device, since their inputs are the "
        "outputs of the copied layers between them: give layer-order=contiguous, or simulate it"
    )

    @classmethod
    def build(cls, b: "Builder") -> "TokenWiseMemory":
        """With layers in the order asked for."""
        b.refuse_unlike_layers()
        options = b.options(TokenWiseOptions)
        times = replace(options, equations="corrected").step_times(b.deployment, b.limits.block_size)
        allots = options.step_times(b.deployment, b.limits.block_size)
        kind = cls
        if options.layer_order == "contiguous":
            kind = class_at("sim.systems.ellm.first_layers:FirstLayersAgain")
        return kind(b.limits, b.deployment.model.num_layers, options, times, allots)

    def __init__(
        self, limits: Limits, num_layers: int, options: TokenWiseOptions, times: StepCosts, allots: StepCosts
    ) -> None:
        layers_per_block = options.layers_per_block
        if num_layers % layers_per_block:
            raise UserError(
                f"ellm layers-per-block: {layers_per_block} does not divide the model's {num_layers} layers"
            )
        groups = num_layers // layers_per_block
        super().__init__(limits, groups)
        self.num_layers, self.layers_per_block = num_layers, layers_per_block
        self.times, self.allots = times, allots
        self.fused, self.overlapped, self.threads = options.fused, options.overlapped, options.threads
        self.lookup_s = options.map_lookup_us / 1e6
        """One access of the map table, of which a layer group takes one in each pass."""
        self.all_groups = tuple(range(groups))
        self.uncached: dict[Sequence, int] = {}
        """Tokens of sequences that have some uncached."""
        self.lacking: dict[Sequence, int] = {}
        """Tokens whose KV is not on the GPU before the next pass: the uncached ones, and those on their way back."""
        self.ratio = 0.0
        self.room = Room(
            gpu_tokens=limits.num_gpu_blocks * self.block_size,
            scratch=tuple(self.scratch_groups(c) / groups for c in CONFIGURATIONS),
            host_tokens=limits.num_cpu_blocks * self.block_size,
            hosted=tuple(self.hosted_groups(c) / groups for c in CONFIGURATIONS),
            lost_tokens=self.block_size,
            least_ratio=options.least_uncached_ratio,
            most_ratio=options.most_uncached_ratio,
            by_longest=options.printed,
        )
        """What the choice of a ratio counts with."""
        self._hosted_blocks: dict[Sequence, int] = {}
        self._swapped_out = 0
        # What the last pass had on the host, where that has changed since.
        self._before: Configuration | None = None
        self._set(CONFIGURATIONS[-1])

    # -- what a sequence takes ---------------------------------------------------------------------------------------

    def scratch_groups(self, configuration: Configuration) -> int:
        """Layer groups that a block of uncached tokens takes on the GPU."""
        return -(-configuration.scratch_layers // self.layers_per_block)

    def hosted_groups(self, configuration: Configuration) -> int:
        """Layer groups that it takes on the host."""
        swapped = self.num_layers - configuration.recomputed_layers(self.num_layers)
        return -(-swapped // self.layers_per_block)

    def _set(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._scratch, self._hosted = self.scratch_groups(configuration), self.hosted_groups(configuration)

    def _gpu_blocks(self, blocks: int, uncached: int) -> int:
        size = self.block_size
        return (blocks - uncached // size) * self.num_groups - uncached // -size * self._scratch

    def _host_blocks(self, uncached: int) -> int:
        return -(uncached // -self.block_size) * self._hosted

    def _uncached_of(self, num_tokens: int) -> int:
        """Of a sequence of so many tokens, the one being fed included, which is on the GPU in any case."""
        return min(floor(self.ratio * num_tokens), num_tokens - 1)

    def held_blocks(self, seq: Sequence) -> int:
        batch = self.batch
        blocks = batch.num_blocks_of(seq) if seq in batch.members else seq.num_blocks
        return self._gpu_blocks(blocks, self.uncached.get(seq, 0))

    # -- prompts -----------------------------------------------------------------------------------------------------

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        return bool(feasible_ratios(Batch([seq.num_tokens], self.block_size), self.room)[1].any())

    def fits(self, seq: Sequence, keep_free: int) -> bool:
        uncached = self._uncached_of(seq.num_tokens)
        on_gpu = self._gpu_blocks(-(-seq.num_tokens // self.block_size), uncached)
        return on_gpu <= self.gpu.free and self._host_blocks(uncached) <= self.host.free

    def place(self, seq: Sequence, num_tokens: int) -> None:
        blocks = seq.num_blocks = -(-seq.num_tokens // self.block_size)
        uncached = self._uncached_of(seq.num_tokens)
        if uncached:
            self.uncached[seq] = self.lacking[seq] = uncached
            hosted = self._hosted_blocks[seq] = self._host_blocks(uncached)
            self.host.allocate(hosted)
        self.gpu.allocate(self._gpu_blocks(blocks, uncached))
        self.scheduler.changes.append(Place(seq, self.all_groups, blocks - uncached // self.block_size, 0))

    # -- decodes -----------------------------------------------------------------------------------------------------

    def grow(self, batch: DecodeBatch, spare: int = 1) -> bool:
        # The ratio was chosen so that there is room; none need be left.
        return super().grow(batch, 0)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        if self.lacking or self.ratio:
            return 1
        batch = self.batch
        spare = self.gpu.free // self.unit + batch.blocks_needed(1)
        return max(1, min(steps, batch.steps_within(spare)))

    def choose(self, ratio: float, configuration: Configuration) -> None:
        """From now on `ratio` of the tokens are uncached.

        What becomes uncached leaves for the host before the step, in the layers that will be copied in. What is cached
        again comes back with the next pass over the decodes, and keeps its place on the host until then.
        """
        batch = self.batch
        before = self._on_gpu()
        if ratio > 0.0 and configuration != self.configuration:
            if self.lacking:
                self._before = self._before or self.configuration
            self._set(configuration)
        self.ratio = ratio
        for seq in batch.members if ratio > 0.0 or self.uncached else ():
            uncached = self._uncached_of(batch.num_tokens_of(seq))
            if not uncached:
                self.uncached.pop(seq, None)
                continue
            self.uncached[seq] = uncached
            self.lacking[seq] = max(self.lacking.get(seq, 0), uncached)
            hosted, held = self._host_blocks(uncached), self._hosted_blocks.get(seq, 0)
            if hosted > held:
                self._hosted_blocks[seq] = hosted
                self.host.allocate(hosted - held)
                self._swapped_out += hosted - held
                move = Move(seq, self.all_groups, 0, uncached, Tier.GPU, Tier.HOST, hosted - held, 0, False)
                self.scheduler.changes.append(move)
        self._resize_gpu(before)

    def _on_gpu(self) -> int:
        """GPU blocks beside those of whole sequences, negative where there are fewer."""
        return sum(self._gpu_blocks(0, uncached) for uncached in self.uncached.values())

    def _resize_gpu(self, before: int) -> None:
        more = self._on_gpu() - before
        if more > 0:
            self.gpu.allocate(more)
        elif more:
            self.gpu.release(-more)

    def complete(self, plan: IterationPlan) -> None:
        """Decodes bring back what they lack; prompts send out what they are not to keep; all look blocks up."""
        plan.added_s = self.lookup_s * self.num_groups
        if self._swapped_out:
            plan.swapped_out_blocks += self._swapped_out
            self.scheduler.counters.swap_out_blocks += self._swapped_out
            self._swapped_out = 0
        if not self.lacking:
            return
        for chunk in plan.chunks:
            seq = chunk.seq
            if blocks := self._hosted_blocks.get(seq, 0):
                groups, end = self._sent_behind(seq, chunk.num_new)
                plan.behind += (Move(seq, groups, 0, end, Tier.GPU, Tier.HOST, blocks, 0, False),)
                plan.behind_blocks += blocks
                plan.behind_groups = self._hosted
        if plan.num_decodes:
            self._rebuild(plan)

    def _sent_behind(self, seq: Sequence, num_tokens: int) -> tuple[tuple[int, ...], int]:
        """Layer groups of a prompt that leave behind it, and the end of the tokens whose KV does."""
        return self.all_groups, num_tokens

    def _rebuild(self, plan: IterationPlan) -> None:
        lacking = {seq: tokens for seq, tokens in self.lacking.items() if seq in self.batch.members}
        if not lacking:
            return
        tokens, recomputed = sum(lacking.values()), self._recomputed(lacking)
        hosted = -((self.num_layers - len(recomputed)) // -self.layers_per_block)
        read = sum(-(count // -self.block_size) for count in lacking.values()) * hosted
        loss = None
        if self.fused:
            squares = sum(count * count for count in lacking.values())
            sums = plan.num_decodes, plan.decode_context_tokens, tokens, squares, self.configuration
            threads = threads_for_recomputation(*self.allots.volumes(*sums), self.threads)
            loss = thread_loss(*self.times.volumes(*sums), threads / self.threads)
        self._tally(plan, tokens)
        written, after = self._update_host(lacking)
        record = Rebuilt(0, read, written, tuple(lacking.items()), recomputed, loss, self.overlapped, after)
        plan.streamed = (*plan.streamed, record)
        for seq in lacking:
            if uncached := self.uncached.get(seq, 0):
                self.lacking[seq] = uncached
            else:
                del self.lacking[seq]

    def _recomputed(self, lacking: dict[Sequence, int]) -> tuple[int, ...]:
        """The layers that compute the KV of these tokens again.

        Layers that did so in the last pass have nothing on the host.
        """
        now, before = self.configuration, self._before or self.configuration
        return tuple(i for i in range(self.num_layers) if now.is_recomputed(i) or before.is_recomputed(i))

    def _update_host(self, lacking: dict[Sequence, int]) -> tuple[int, tuple[Uncache, ...]]:
        """The pass brings this KV back: the host keeps what stays uncached. Blocks that go there, and what is said."""
        self._before = None
        for seq, held in list(self._hosted_blocks.items()):
            kept = self._host_blocks(self.uncached.get(seq, 0))
            self.host.release(held - kept)
            if kept:
                self._hosted_blocks[seq] = kept
            else:
                del self._hosted_blocks[seq]
        return 0, ()

    def _tally(self, plan: IterationPlan, rebuilt: int) -> None:
        tally, cached = self.scheduler.counters.policy, plan.decode_context_tokens - sum(self.uncached.values())
        tally["rebuilding_iterations"] += 1
        tally["rebuilt_tokens"] += rebuilt
        tally["context_tokens"] += plan.decode_context_tokens
        tally["held_block_layers"] += (self.gpu.num_blocks - self.gpu.free) * self.layers_per_block
        tally["filled_token_layers"] += cached * self.num_layers
        tally["filled_token_layers"] += sum(self.uncached.values()) * self.configuration.scratch_layers

    # -- the way out -------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        self.gpu.release(self.held_blocks(seq))
        self.host.release(self._hosted_blocks.pop(seq, 0))
        self.uncached.pop(seq, None)
        self.lacking.pop(seq, None)
        seq.num_blocks = 0
        self.scheduler.changes.append(Release(seq))

    def recount(self) -> tuple[int, int]:
        members = [*self.batch.members, *(seq for seq, _ in self.scheduler.holders())]
        return sum(map(self.held_blocks, members)), sum(self._hosted_blocks.get(seq, 0) for seq in members)

"""`Speculative`: prefilled sequences decode, several tokens at a time (Leviathan et al. 2023; vLLM's `--spec-method`).

Some method drafts k tokens for each sequence; the next iteration feeds them behind the last token, and accepts the
first of them that the model would have sampled itself, and one token more. So an iteration gives a sequence 1 to k + 1
tokens, (1 - p^(k+1)) / (1 - p) of them where each is accepted with chance p (their Eq. 1). What is accepted is drawn
(`Acceptance`). No two iterations are alike: nothing jumps.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.cost.drafting import build_drafter, rows_s
from sim.engine.acceptance import Acceptance
from sim.engine.plan import IterationPlan, StepTimes, WindowTokens
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.parts.needs import Need
from sim.parts.stage.direct import Direct
from sim.parts.stage.speculative_options import SpeculativeOptions
from sim.specs.kv_format import window_pairs

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Speculative(Direct):
    """Charges what drafting and verifying take, and says what is accepted; the batching does the rest."""

    name: ClassVar[str] = "speculative"
    options: ClassVar[type | None] = SpeculativeOptions
    drafts: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        Need("batching", "drafts tokens, which are of no use unless a batching verifies them", offers="verifies"),
        Need("memory", "takes slots ahead of the tokens, block by block", names=("paged",)),
        Need("eviction", "computes victims again", names=("recompute",)),
    )

    @classmethod
    def build(cls, b: "Builder") -> Self:
        options = b.options(SpeculativeOptions)
        if options.spec_method is None:
            raise UserError(f"stage={cls.name}: spec-method is missing; give one, spec-tokens and acceptance-rate")
        model = b.deployment.model
        limits = b.limits
        if limits.has_window_groups or limits.states is not None or limits.kept_of_prompt is not None:
            raise UserError(
                f"spec-method={options.spec_method}: {model.name} has layers that keep a window, a state or a part of "
                "a prompt, in which slots ahead are not simulated; take another model, or leave out --sparse-attention"
            )
        return cls(options, b)

    def __init__(self, options: SpeculativeOptions, b: "Builder") -> None:
        self.num_tokens = options.spec_tokens or 0
        self.lookahead, self.reads_next_token = options.lookahead, options.reads_next_token
        self.input_slots = int(options.spec_method == "draft_model")
        """Of the budget, what drafting takes of it for each sequence (vLLM's `max_num_new_slots_for_drafting`)."""
        self.method = options.spec_method or ""
        self.acceptance: Acceptance | None = Acceptance(options.chances(), b.deployment.seed)
        """None: a device says what is accepted, in the plan that it has carried out."""
        self._cost, self.drafter = b.deployment.cost, build_drafter(options, b.deployment)
        self._window = b.limits.window.tokens if b.limits.window else 0
        """Of what is kept, most tokens that are attended to; 0: all."""

    def num_accepted(self, seq: Sequence, num_generated: int, num_drafted: int) -> int:
        """`Acceptance.num_accepted`; none as long as a device has yet to say."""
        return self.acceptance.num_accepted(seq, num_generated, num_drafted) if self.acceptance is not None else 0

    def complete(self, plan: IterationPlan) -> None:
        """What verifying takes beyond the plan without drafts, and drafting for the next iteration."""
        cost, batch = self._cost, self.batch
        rows = read = plain = longest = within = 0
        drafts = plan.drafts or {}
        for seq in plan.decodes:
            tokens, drafted = batch.num_tokens_of(seq), drafts.get(seq, 0)
            rows += (drafted + 1) * tokens + drafted * (drafted + 1) // 2
            read += tokens + drafted
            plain += tokens
            longest = max(longest, tokens + drafted)
            if self._window:
                within += window_pairs(tokens - 1, drafted + 1, self._window)
        plan.decode_longest_tokens = longest if cost.follows_longest else 0
        plain_s = cost.iteration_s(plan)
        sampled = 0 if self.drafter is None else self._num_drafted_next(plan)
        num_decodes, context, shared = plan.num_decodes, plan.decode_context_tokens, plan.decode_shared_tokens
        # While it is priced, a plan whose drafted tokens are decodes.
        plan.num_decodes, plan.decode_shared_tokens = num_decodes + sum(drafts.values()), rows - read
        # Chunks of single tokens have theirs there, too.
        plan.decode_context_tokens = rows + context - plain
        if self._window:
            within += min(context - plain, plan.num_single_chunks * self._window)
            plan.decode_window = WindowTokens(within, 0)
        seconds = rows_s(cost, plan, num_decodes) - plain_s
        if self.drafter is not None and sampled:
            seconds += self.drafter.seconds(plan, sampled, read)
        plan.num_decodes, plan.decode_context_tokens, plan.decode_shared_tokens = num_decodes, context, shared
        # As the plan itself is priced: nothing says what is within windows.
        plan.decode_window = None
        plan.added_s += seconds

    def _num_drafted_next(self, plan: IterationPlan) -> int:
        """Sequences that tokens are drafted for behind this step: all that sample, where one of them may go on."""
        batch = self.batch
        sampling = [chunk.seq for chunk in plan.chunks if chunk.num_cached + chunk.num_new == chunk.seq.num_tokens]
        goes_on = any(batch.num_generated_of(seq) + 1 < seq.output_tokens for seq in plan.decodes) or any(
            seq.num_generated + 1 < seq.output_tokens for seq in sampling
        )
        return len(sampling) + plan.num_decodes if goes_on else 0

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if plan.drafts:
            counted = self.scheduler.counters.policy
            for seq, drafted in plan.drafts.items():
                if plan.taken and seq in plan.taken:
                    counted["drafted_tokens"] += drafted
                    counted["accepted_tokens"] += plan.taken[seq] - 1
                    counted["num_drafts"] += 1

"""Options of speculative decoding: vLLM's `--spec-*` and the keys of its `--speculative-config`."""

from typing import Literal

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, option, vllm_option

MOST_DRAFTED = 64
MOST_READ = 1 << 24
DRAFTS = Only("spec_method")


@frozen
class SpeculativeOptions(CheckedOptions):
    """What drafts tokens, how many, and which of them are accepted. Nothing is drafted unless a method is given."""

    spec_method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp", "sparse_kv"] | None = vllm_option(
        None, "what drafts tokens that are verified together, several in a step"
    )
    spec_tokens: int | None = vllm_option(
        None, "tokens drafted for each sequence in a step (num_speculative_tokens)", only=DRAFTS
    )
    spec_model: str | None = vllm_option(
        None, "the draft model of --spec-method draft_model, named as --model is", only=DRAFTS
    )
    spec_kv_budget: int | None = option(
        None,
        "tokens of a context that the model itself reads when it drafts (--spec-method sparse_kv)",
        within=(1, MOST_READ),
        only=DRAFTS,
    )
    synthetic_acceptance_rates: str | None = vllm_option(
        None,
        "chances that the first drafted token, the first two, and so on are all accepted: '0.8 0.6 0.5'",
        only=DRAFTS,
    )
    acceptance_rate: float | None = option(
        None,
        "chance that a drafted token is accepted where those before it are, at any place",
        within=(0.0, 1.0),
        only=DRAFTS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spec_method is None:
            return
        if self.spec_tokens is None or not 1 <= self.spec_tokens <= MOST_DRAFTED:
            found = "is missing" if self.spec_tokens is None else f"{self.spec_tokens}"
            raise UserError(
                f"spec-tokens: {found}; with spec-method={self.spec_method} give how many tokens are drafted in a "
                f"step, 1 to {MOST_DRAFTED}"
            )
        if (self.spec_method == "draft_model") != (self.spec_model is not None):
            raise UserError(
                f"spec-model: {self.spec_model or 'is missing'}; spec-method=draft_model needs one, and no other takes "
                f"one (spec-method={self.spec_method})"
            )
        if (self.spec_method == "sparse_kv") != (self.spec_kv_budget is not None):
            raise UserError(
                f"spec-kv-budget: {self.spec_kv_budget or 'is missing'}; spec-method=sparse_kv needs one, and no other "
                f"takes one (spec-method={self.spec_method})"
            )
        if self.acceptance_rate is not None and self.synthetic_acceptance_rates is not None:
            raise UserError("acceptance-rate and synthetic-acceptance-rates: both are given; give one")
        self.chances()

    def chances(self) -> tuple[float, ...]:
        """Of each drafted token, that it is accepted where those before it are; none where no rate is given.

        UserError for rates that are none.
        """
        if self.acceptance_rate is not None:
            return (self.acceptance_rate,) * (self.spec_tokens or 0)
        if self.synthetic_acceptance_rates is None:
            return ()
        given, before, found = self.synthetic_acceptance_rates.split(), 1.0, []
        if len(given) != self.spec_tokens:
            raise UserError(f"synthetic-acceptance-rates: {len(given)} given; give one for each of {self.spec_tokens}")
        for word in given:
            try:
                rate = float(word)
            except ValueError:
                raise UserError(f"synthetic-acceptance-rates: {word!r} is not a number") from None
            if not 0.0 <= rate <= before:
                raise UserError(
                    f"synthetic-acceptance-rates: {word} is not between 0 and the one before it, {before:g}: each is "
                    "the chance that all tokens up to it are accepted"
                )
            found.append(rate / before if before else 0.0)
            before = rate
        return tuple(found)

    @property
    def reads_next_token(self) -> bool:
        """Whether KV of the drafting model depends on the token behind it, as that of a head on the target does."""
        return self.spec_method in ("eagle", "eagle3", "mtp")

    @property
    def lookahead(self) -> int:
        """Slots beyond those of verified tokens, where a drafting model writes KV (vLLM's `num_lookahead_tokens`)."""
        return 0 if self.spec_method == "ngram" else self.spec_tokens or 0

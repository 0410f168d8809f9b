"""Options of the stage `nixl`."""

from dataclasses import dataclass

from sim.errors import UserError
from sim.parts.options import option


@dataclass(frozen=True)
class NixlOptions:
    """Which prompts are prefilled where they decode."""

    local_prefill_tokens: int = option(
        0, "prompts with at most so many tokens that the engine that decodes has not cached are prefilled there"
    )

    def __post_init__(self) -> None:
        if self.local_prefill_tokens < 0:
            raise UserError(f"local-prefill-tokens: {self.local_prefill_tokens} must be 0 or more; 0 sends all prompts")

"""`Choice`: one of the answers to a request, its text as far as it can be sent, and the stop strings that end it."""

from collections.abc import Sequence

from gpu_runtime.serve.text import TextOf
from gpu_runtime.serve.ticket import Ticket, Token


class Choice:
    """Grows token by token.

    Text that may be the beginning of a stop string is kept back until that is known.

    Args:
        ticket: of the request that computes it.
        text_of: renders its tokens.
        stop: strings that end it, and are not part of it, once it has `ticket.min_tokens` tokens.
    """

    def __init__(self, ticket: Ticket, text_of: TextOf, stop: Sequence[str] = ()) -> None:
        self.ticket = ticket
        self._text_of, self._stop = text_of, stop
        self._held = ""
        self.tokens: list[int] = []
        self.reason: str | None = None
        """Why it ended."""

    def add(self, found: Token) -> str:
        """One token more; the text that can be sent. `reason` is set where that ends in a stop string."""
        self.tokens.append(found.token)
        text = self._held + ("" if found.is_stop else self._text_of(found.token))
        if len(self.tokens) < self.ticket.min_tokens:
            return text
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.reason = "stop"
            return text[: min(ends)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self, reason: str) -> str:
        """Nothing follows; the text that was kept back."""
        self.reason = reason
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

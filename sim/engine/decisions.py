"""`DecisionLog`: one hash over what a scheduler decided, to compare it with another's (vLLM's) without its log."""

import hashlib


class DecisionLog:
    """SHA-256 over a line a step: its number, entries `request:tokens` in the engine's order, the preempted."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.num_steps = 0

    def __call__(self, line: str) -> None:
        """A step that did something."""
        self._digest.update(f"{self.num_steps} {line}\n".encode())
        self.num_steps += 1

    def copies(self, line: str, *, of_last: bool) -> None:
        """What a step copies, if anything: the last one told, or one that did nothing else."""
        self._digest.update(f"{self.num_steps - of_last}{line}\n".encode())

    @property
    def sha256(self) -> str:
        """Of all steps so far, hexadecimal."""
        return self._digest.hexdigest()

"""`TokensInFlight`: tokens that have been chosen on the device and that the host has yet to read, by iteration.

The host launches an iteration while the one before it runs. What that one chooses stays on the device and is put where
the next one reads its tokens (`LateTokens`), so that neither waits for the host.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_runtime.device_stream import mark, to_device, wait
from sim.engine.sequence import Sequence as Seq


class LateTokens:
    """Which of an iteration's tokens are those that the iteration before it has chosen."""

    def __init__(self, chosen: Tensor, places: Mapping[Seq, int]) -> None:
        """`chosen` [n] by the iteration before, on the device, and each sequence's place there."""
        self._chosen, self._places_of = chosen, places
        self._rows: list[int] = []
        self._places: list[int] = []

    def take(self, row: int, seq: Seq) -> bool:
        """Whether the last token of `seq` is one of them; if so it becomes token `row`."""
        place = self._places_of.get(seq)
        if place is None:
            return False
        self._rows.append(row)
        self._places.append(place)
        return True

    def fill(self, token_ids: Tensor) -> None:
        """Put them among an iteration's `token_ids` [N], whose entry there is a filler; without waiting for them."""
        if self._rows:
            rows, places = (to_device(part, token_ids.device) for part in (self._rows, self._places))
            token_ids.index_copy_(0, rows, self._chosen.index_select(0, places).to(token_ids.dtype))


@dataclass(eq=False)
class Flight:
    """One iteration: whose tokens it chooses, in order, and where these are."""

    num_new: Mapping[Seq, int] = field(default_factory=dict)
    """Tokens that it computes of each sequence."""
    seqs: list[Seq] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    failed: list[Seq] = field(default_factory=list)
    """Sequences that it could not compute: each takes a filler."""
    chosen: Tensor | None = None
    """[len(seqs)], on the device; None without any."""
    read: Tensor | None = None
    """The same on the host, once `ended` is over."""
    ended: torch.cuda.Event | None = None


class TokensInFlight:
    """Iterations launched on one device, the oldest first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flying: deque[Flight] = deque()
        self._current = Flight()
        self._places: dict[Seq, int] = {}
        """Of the sequences of the latest iteration launched before."""

    @property
    def under_way(self) -> Mapping[Seq, int]:
        """Tokens of each sequence that the latest iteration launched computes; none once it has been read."""
        return self._flying[-1].num_new if self._flying else {}

    def begin(self, num_new: Mapping[Seq, int]) -> None:
        """An iteration is about to be launched, which computes so many tokens of each sequence."""
        self._current = Flight(num_new)
        latest = self._flying[-1] if self._flying else Flight()
        self._places = {seq: place for place, seq in enumerate(latest.seqs)}

    def chose(self, seqs: Sequence[Seq], chosen: Tensor) -> None:
        """It chooses `chosen` [n], on the device, for these sequences; nothing where there are none."""
        if seqs:
            self._current.seqs += seqs
            self._current.parts.append(chosen)

    def keep(self) -> None:
        """The iteration goes on part by part, and graphs may overwrite what they have chosen: set it apart.

        All that was launched has ended.
        """
        if self._current.parts:
            self._current.parts = [torch.cat(self._current.parts)]
        if self._flying and (read := self._flying[-1].read) is not None:
            self._flying[-1].chosen = read.to(self._device, copy=True)

    def give_up(self, seqs: Sequence[Seq]) -> None:
        """It could not compute these, whose tokens are fillers."""
        self._current.failed += seqs

    def launched(self) -> None:
        """All of it has been queued: what it chooses is on its way to the host."""
        flight = self._current
        if flight.parts:
            # Of a graph a view, which its next run overwrites, but for those that read it before.
            flight.chosen = chosen = flight.parts[0] if len(flight.parts) == 1 else torch.cat(flight.parts)
            pin = self._device.type == "cuda"
            flight.read = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=pin)
            flight.read.copy_(chosen, non_blocking=pin)
        flight.ended = mark(self._device)
        self._flying.append(flight)

    def late(self) -> LateTokens | None:
        """For the iteration that is being launched: what the one before it has chosen; None if that has been read."""
        chosen = self._flying[-1].chosen if self._flying else None
        return None if chosen is None else LateTokens(chosen, self._places)

    def land(self) -> Iterator[tuple[Seq, int, bool]]:
        """Wait for the oldest iteration; its tokens, and whether each was computed."""
        flight = self._flying.popleft()
        wait(flight.ended)
        if flight.read is not None:
            for seq, token in zip(flight.seqs, flight.read.numpy().tolist(), strict=True):
                yield seq, token, True
        for seq in flight.failed:
            yield seq, 0, False

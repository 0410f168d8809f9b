"""`nixl`: engines that prefill and engines that decode as vLLM v1 has them with its NIXL connector.

The engine that prefills keeps a prompt's blocks until they have been pulled, and the token that it samples is dropped.
The engine that decodes pulls what it has not cached, first come first served, and computes the prompt's last token
again: that samples the first token, so that TTFT has the copy in it. A request that waits for its KV holds blocks and
no seat. Short prompts may be prefilled where they decode (`local_prefill_tokens`).

After vLLM 0.33, `v1/core/sched/scheduler.py` (WAITING_FOR_REMOTE_KVS) and `kv_transfer/kv_connector/v1/nixl`. A request
of one token ends at the engine that prefills it; there, it would be sent on as well.
"""

from math import inf
from typing import TYPE_CHECKING, ClassVar

from sim.engine.sequence import Sequence
from sim.parts.base import Stage
from sim.parts.needs import Need
from sim.parts.stage.direct import Direct
from sim.parts.stage.hand_over import HandOver
from sim.parts.stage.nixl_options import NixlOptions
from sim.parts.stage.pull import Pull

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Nixl(HandOver):
    """Of an engine that prefills."""

    name: ClassVar[str] = "nixl"
    options: ClassVar[type | None] = NixlOptions

    @classmethod
    def build(cls, b: "Builder") -> Stage:
        role = b.deployment.role
        return Direct() if role == "both" else cls() if role == "prefill" else NixlPull()

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        super().enter(seq, first=first)
        if (log := self.batch.token_log) is not None:
            log[seq.request.request_id].pop()

    def continued(self, seq: Sequence) -> Sequence:
        copy = super().continued(seq)
        copy.num_tokens -= 1
        copy.num_generated -= 1
        copy.first_token_s = copy.last_token_s = -1.0
        # Until all of it is there nothing of it can be hit.
        copy.num_computed, copy.prefilling = 0, True
        return copy


class NixlPull(Pull):
    """Of an engine that decodes."""

    name: ClassVar[str] = "nixl"
    pulls_within_steps: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        *Pull.needs,
        Need("batching", "computes a prompt's last token again, in vLLM v1's way", offers="is_unified"),
    )

    def __init__(self) -> None:
        super().__init__(waiting_share=inf)

    @property
    def num_pulling(self) -> int:
        return self.num_parked + len(self.offered)

    def prepare(self, now_s: float) -> None:
        """Nothing: batching asks, when those that run have their blocks."""

    def _sent_tokens(self, seq: Sequence) -> int:
        # The whole prompt's, though its last token is computed again.
        return seq.num_tokens

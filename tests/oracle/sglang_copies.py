"""Runs the SGLang oracle with copies between GPU and host that take time, over its virtual clock.

SGLang's cache, controller and acknowledgements stay its own. Replaced is what moves bytes (`L2TransferEngine`): a copy
takes so long a token, on a lane each way. It waits for the batches launched before it (SGLang's fence). A batch
waits for what it loads layer by layer. Where SGLang waits for a copy (written back), so does its clock.
"""

from pathlib import Path
from typing import Any, NamedTuple

LAYERS = 4
"""Of the model that is priced; as `kvtwin.testing.engines.linear_machine` has."""
LOOP = "sch.metrics_reporter.start_scheduler_time_accounting()"
"""The oracle's last line before SGLang's loop begins."""


class Copies:
    """The two lanes; `names` are the oracle's own variables."""

    def __init__(self, names: dict[str, Any], copy_s: float) -> None:
        self.names, self.copy_s = names, copy_s
        self.free_s = {"out": 0.0, "in": 0.0}
        self.load: tuple[float, float, float] | None = None
        scheduler = names["sch"]
        self.controller = scheduler.tree_cache.cache_controller
        engine = self.controller.l2_transfer_engine
        engine.submit_device_to_host = lambda transfers: self.copied(transfers, "out")[0]
        engine.submit_host_to_device = self.loaded
        self.forward, self.idle = scheduler.tp_worker.forward_batch_generation, scheduler.on_idle
        scheduler.tp_worker.forward_batch_generation = self.computed
        scheduler.on_idle = self.idled

    def copied(self, transfers: list, way: str) -> tuple["Completion", float, float]:
        """A copy begins; what SGLang asks about it, when it begins, and for how long."""
        begin_s = max(self.names["t"], self.names["device_free"], self.free_s[way])
        seconds = len(transfers[0].device_indices) * self.copy_s
        self.free_s[way] = begin_s + seconds
        event = Ended(self.names, begin_s + seconds)
        return Completion(event, event, False), begin_s, seconds

    def loaded(self, transfers: list, **others: object) -> "Completion":
        completion, begin_s, seconds = self.copied(transfers, "in")
        self.load = begin_s, seconds, self.names["device_free"]
        return completion

    def computed(self, batch: Any, *args: Any, **others: Any) -> Any:
        """A batch, which the oracle has priced as if nothing were loaded."""
        if self.load is not None:
            (begin_s, seconds, free_s), self.load = self.load, None
            done_s = max(self.names["t"], free_s)
            layer_s = (self.names["device_free"] - done_s) / LAYERS
            for layer in range(LAYERS):
                done_s = max(done_s, begin_s + seconds * (layer + 1) / LAYERS) + layer_s
            self.names["device_free"] = done_s
        return self.forward(batch, *args, **others)

    def idled(self) -> None:
        """With nothing to compute, the next thing to happen is a copy's end or an arrival."""
        self.idle()
        acks = [*self.controller.ack_write_queue[:1], *self.controller.ack_load_queue[:1]]
        if acks:
            ends = [ack.finish_event.end_s for ack in acks]
            trace, place = self.names["trace"], self.names["nxt"]
            ends += [trace[place][0]] if place < len(trace) else []
            self.names["t"] = max(self.names["t"], min(ends))
            # Its clock stands still no longer.
            self.names["idle"] = 0


class Completion(NamedTuple):
    """As SGLang's `TransferCompletion`."""

    start_event: "Ended"
    finish_event: "Ended"
    timing_enabled: bool


class Ended:
    """An event that happens at `end_s`."""

    def __init__(self, names: dict[str, Any], end_s: float) -> None:
        self.names, self.end_s = names, end_s

    def query(self) -> bool:
        return self.end_s <= self.names["t"] + 1e-12

    def synchronize(self) -> None:
        self.names["t"] = max(self.names["t"], self.end_s)


def run(oracle: str, copy_s: float) -> None:
    """Run the script `oracle`, which reads its own arguments."""
    text = Path(oracle).read_text(encoding="utf-8")
    assert text.count(LOOP) == 1, "another oracle"
    names: dict[str, Any] = {"__name__": "__main__", "__file__": oracle}
    names["copies_take_time"] = lambda: Copies(names, copy_s)
    exec(compile(text.replace(LOOP, f"copies_take_time(); {LOOP}"), oracle, "exec"), names)

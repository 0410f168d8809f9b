"""`Bench`: from a point to the seconds of its repeats. Holds what points share: a model's layers, buffers, a clock."""

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from itertools import repeat as again

import torch
from torch import Tensor

from calib.measure.capacity import Capacity
from calib.measure.clocks import Clock, CudaClock, HostClock, Unmeasurable, Work
from calib.measure.copy_ops import AllReduce, CopyBuffers
from calib.measure.engine_steps import engine_steps
from calib.measure.graphs import captured
from calib.measure.layer_ops import ModelWork
from calib.measure.plan import Plan
from calib.measure.points import Point
from calib.measure.timing import Rule, repeat
from calib.samples import COPY_OPS, PIECES, TOKEN_OPS, fault_of
from sim.errors import UserError
from sim.specs.model_spec import ModelSpec

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
"""What torch's messages say where it has no class for it."""
HOST_TIMED = frozenset({"launch", "host_memcpy"})
"""Operations whose time is the host's, from asking to having."""
OWN_GRAPHS = frozenset({"launch"})
"""Operations whose work comes with a graph where one is asked for."""


class Bench:
    """Measures points of one plan on one device."""

    def __init__(
        self,
        plan: Plan,
        models: Mapping[str, ModelSpec],
        limits: Capacity,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._plan, self._models = plan, models
        self._device, self._dtype, self._seed = device, dtype, seed
        self._copies = CopyBuffers(plan.copy_bytes, device, seed)
        self._model: tuple[str, ModelWork] | None = None
        self._refused: dict[str, str] = {}
        self._graph_fault = ""
        self._stream: torch.cuda.Stream | None = None
        on_cuda = device.type == "cuda"
        self._clock: Clock = CudaClock(device, limits.cache_bytes) if on_cuda else HostClock()

    def measure(self, point: Point, rule: Rule) -> list[float]:
        """Seconds of every repeat.

        Raises:
            Unmeasurable: there is not enough memory, or the machine cannot do it; says which.
        """
        try:
            with torch.inference_mode():
                repeats_s = self._measure(point, rule)
        except (RuntimeError, MemoryError) as error:
            # Only the words leave this block: the error's traceback holds the tensors that filled the memory.
            reason = _memory_reason(error)
            if not reason:
                raise
            repeats_s = []
        else:
            reason = fault_of(point.sample(repeats_s))
        if reason:
            self._free()
            raise Unmeasurable(reason)
        return repeats_s

    def _measure(self, point: Point, rule: Rule) -> list[float]:
        if point.op == "all_reduce":
            return repeat(AllReduce(point, self._dtype).once, rule)
        if point.op == "step":
            repeats = rule.min_repeats * 2 if rule.budget_s else rule.min_repeats
            return engine_steps(self._model_work(point.model).decoder, self._models[point.model], point, repeats)
        works = self._as_served(point, self._works(point))
        if point.op in TOKEN_OPS:
            self._clock.keep_busy(next(works), rule.steady_s)
        self._clock.synchronize()
        return repeat(self._once(point, works), rule)

    def _once(self, point: Point, works: Iterator[Work]) -> Callable[[], float]:
        clock = self._clock
        if point.op in HOST_TIMED:
            return lambda: clock.host_s(next(works))
        # A copy is asked for when its turn has come: what asking costs belongs to it.
        lead = point.op not in COPY_OPS
        return lambda: clock.device_s(next(works), lead=lead)

    def _as_served(self, point: Point, works: Iterator[Work]) -> Iterator[Work]:
        """A point's own work, from a graph where it says so."""
        if point.graph == PIECES:
            # Captured when the first is asked for.
            return chain([self._capturing(lambda: next(works))], works)
        return again(self._captured(next(works))) if point.graph and point.op not in OWN_GRAPHS else works

    def _captured(self, work: Work) -> Work:
        """A graph of the work."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        return self._capturing(partial(captured, work, self._stream))

    def _capturing(self, capture: Callable[[], Work]) -> Work:
        """What a capture makes. Once one has failed no other is tried: it leaves torch's allocator in disorder."""
        if self._graph_fault:
            raise Unmeasurable(self._graph_fault)
        try:
            return capture()
        except Unmeasurable as fault:
            self._graph_fault = str(fault)
            raise

    def _works(self, point: Point) -> Iterator[Work]:
        """What executes a point, execution by execution."""
        if point.op == "launch":
            return again(self._launch(point))
        if point.op in COPY_OPS:
            try:
                return again(self._copies.work(point))
            except UserError as error:
                raise Unmeasurable(str(error)) from error
        return self._model_work(point.model).works(point)

    def _launch(self, point: Point) -> Work:
        """Additions to a single element, one after the other."""
        element = torch.zeros(1, device=self._device)

        def launch() -> Tensor:
            for _ in range(point.num_copies):
                element.add_(1)
            return element

        return self._captured(launch) if point.graph else launch

    def _model_work(self, name: str) -> ModelWork:
        """The layers of a model; one model at a time is held."""
        if name in self._refused:
            raise Unmeasurable(self._refused[name])
        if self._model is None or self._model[0] != name:
            self._model = None
            self._free()
            try:
                plan = self._plan
                work = ModelWork(
                    self._models[name], num_layers=plan.built_layers[name], kv_blocks=plan.kv_blocks[name],
                    longest=plan.longest[name], device=self._device, dtype=self._dtype, seed=self._seed,
                )  # fmt: skip
                self._model = (name, work)
            except (RuntimeError, MemoryError) as error:
                reason = _memory_reason(error)
                if not reason:
                    raise
                self._refused[name] = f"the model's layers and KV cache do not fit: {reason}"
            if self._model is None:
                raise Unmeasurable(self._refused[name])
        return self._model[1]

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda" and not self._graph_fault:
            torch.cuda.empty_cache()


def _memory_reason(error: Exception) -> str:
    """The first line of an error that says memory ran out; empty for any other."""
    text = str(error)
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_memory or any(words in text.lower() for words in OUT_OF_MEMORY):
        return f"out of memory: {text.splitlines()[0] if text else type(error).__name__}"
    return ""

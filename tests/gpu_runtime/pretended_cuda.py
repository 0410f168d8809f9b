"""CUDA's rules on a CPU: streams, events, page-locked memory and graphs that compute at once and watch what waited.

Every operation on a tensor of the device belongs to the current stream, and `happens_before` knows which granules it
reads and writes. Kernels of Triton are stood in for by torch (`pretended_kernels`).
"""

import ctypes
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from happens_before import GRANULE, Memory, Order, Place, Region
from pretended_streams import Event, Graph, Stream, WatchedFlag, WatchedQueue, WatchedThread, Work
from pretended_tensors import DEVICE, OnDevice, elements, whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpu_runtime.kv import batched_copies, copy_worker, page_locked
from gpu_runtime.model import backend

DEFAULT = 1
"""Handle of the legacy default stream."""
aten = torch.ops.aten
INDEXING = {
    aten.index.Tensor: False,
    aten.index_put_.default: False,
    aten.index_select.default: True,
    aten.index_select.out: True,
    aten.index_copy_.default: True,
}
"""Operations that touch of their first argument what an index names, and whether that is along one dimension."""


def leaves_of(value: Any) -> list[Any]:
    """What is in tuples, lists and dictionaries, in less time than torch's own trees take."""
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, tuple | list) else [value]


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same with other leaves."""
    if isinstance(value, dict):
        return {name: changed(item, change) for name, item in value.items()}
    return type(value)([changed(item, change) for item in value]) if isinstance(value, tuple | list) else change(value)


def inner_of(leaf: Any) -> Any:
    """The values of a tensor on the device."""
    return leaf.inner if isinstance(leaf, OnDevice) else leaf


@cache
def written_by(func: Any) -> list[tuple[int, str]]:
    """Which of its arguments an operation writes: place and name."""
    arguments = enumerate(func._schema.arguments)
    return [(i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]


class Machine(TorchDispatchMode):
    """The device, and the torch that drives it. Entered once in each thread."""

    device = DEVICE

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and each operation would pass dynamo, which takes seconds to import."""
        return False

    def __init__(self, order: Order, seed: int = 0) -> None:
        super().__init__()
        self.order, self.dice = order, random.Random(seed)
        self.syncs: list[str] = []
        """Operations that made the host wait for the device, by name."""
        self._local = threading.local()
        self._handles = DEFAULT
        self.Stream, self.Event = (type(kind.__name__, (kind,), {"machine": self}) for kind in (Stream, Event))
        self._default = self.Stream()
        self._capturing: tuple[Graph, Stream] | None = None
        self._pinned: dict[int, Memory] = {}
        # By the address of their storage.
        self._kept: list[Tensor] = []
        # Page-locked tensors of torch's own allocator, which waits for copies before it gives them out again.
        self._on_device: dict[int, ref[Memory]] = {}

    # -- torch.cuda ----------------------------------------------------------------------------------------------------

    def next_handle(self) -> int:
        """Of a new stream."""
        self._handles += 1
        return self._handles - 1

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._local, "stream", self._default)

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def capture(self, graph: Graph, pool: object = None, stream: Stream | None = None) -> Iterator[None]:
        assert stream is not None
        self.synchronize()
        with self.on_stream(stream):
            self._capturing = graph, stream
            try:
                yield
            finally:
                self._capturing = None

    def synchronize(self, device: object = None) -> None:
        self.must_not_capture("synchronising")
        for agent in self.order.streams():
            self.order.thread.hear(agent.tell())

    def must_not_capture(self, what: str) -> None:
        if self._capturing is not None:
            self.order.complain(f"{what} while a graph is captured")

    def lock(self, address: int, num_bytes: int, _: int) -> int:
        self.must_not_capture("page-locking memory")
        self._pinned[address] = Memory(self.order, "a pinned pool", num_bytes, None)
        return 0

    def unlock(self, address: int) -> int:
        """As if all of it were written: nothing may be under way."""
        memory = self._pinned.pop(address)
        self.order.access(self.order.thread, "cudaHostUnregister", [], [(memory, slice(0, memory.count))])
        return 0

    # -- operations ----------------------------------------------------------------------------------------------------

    def watch(self, work: Work, stream: Stream | None = None) -> None:
        """An operation is launched on a stream by this thread."""
        agent = (stream or self.current_stream()).agent
        agent.hear(self.order.thread.tell())
        self.order.access(agent, work.name, *work.places())

    def launch(self, work: Work) -> Any:
        """Watch it and compute it, or take it into a graph; what it returns."""
        self._take(work)
        with _disable_current_modes():
            return work.run()

    def _take(self, work: Work) -> None:
        """Watch an operation, or take it into the graph that its stream is captured for."""
        if self._capturing is None or self.current_stream() is not self._capturing[1]:
            self.watch(work)
        else:
            self._capturing[0].work.append(work)

    def host_memory(self, tensor: Tensor) -> Memory | None:
        """Of a page-locked tensor; None of others."""
        return self._pinned.get(tensor.untyped_storage().data_ptr())

    def at(self, address: int) -> Place:
        """The memory that an address lies in, and from which byte on."""
        # Copies are made in one go: other threads allocate and free meanwhile.
        alive = {start: found for start, kept in self._on_device.copy().items() if (found := kept()) is not None}
        known = alive | self._pinned.copy()
        starts = sorted(known)
        start = starts[bisect_right(starts, address) - 1]
        return known[start], address - start

    def fresh(self, inner: Tensor) -> OnDevice:
        """A tensor whose storage has just been allocated on the current stream."""
        storage = inner.untyped_storage()
        memory = Memory(self.order, f"memory of {list(inner.shape)}", storage.nbytes(), self.current_stream().agent)
        self._on_device[storage.data_ptr()] = ref(memory)
        return OnDevice(inner, memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = leaves_of((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        wanted = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", None)
        if func is aten.pin_memory.default or (pinned and not given):
            return self._page_locked(args[0].clone() if pinned is None else func(*args, **kwargs))
        if func is aten.is_pinned.default:
            return not given and self.host_memory(args[0]) is not None
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if to_device and isinstance(leaves[0], Tensor) and not given:
            return self._sent(args[0], kwargs)
        if given and wanted is not None and not to_device:
            return self._fetched(args[0], kwargs)
        if not given and not to_device:
            self._host_access(func, leaves, args, kwargs)
            if wanted is not None:
                kwargs["device"] = wanted
            return func(*args, **kwargs)
        if func is aten.copy_.default and not all(isinstance(a, OnDevice) for a in args[:2]):
            return self._crossing(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if func is aten._local_scalar_dense.default:
            return self._fetched(args[0], {}).item()
        return self._launched(func, args, kwargs, given)

    def _launched(self, func: Any, args: Any, kwargs: Any, given: list[OnDevice]) -> Any:
        plain = changed((args, kwargs), inner_of)
        written = [leaf for place, _ in written_by(func) if place < len(args) for leaf in leaves_of(args[place])]
        written += [kwargs[name] for _, name in written_by(func) if name in kwargs]
        known = {tensor.inner.untyped_storage().data_ptr(): tensor.memory for tensor in given}
        outputs: list[Tensor] = []

        def is_view(out: Tensor) -> bool:
            return out.untyped_storage().data_ptr() in known

        def places() -> tuple[list[Place], list[Place]]:
            read = [t for t in given if not any(t is w for w in written)]
            reads = [(t.memory, self._part(func, t, args)) for t in read]
            writes = [(t.memory, self._part(func, t, args)) for t in written]
            # In place: it was read as well, at least where it was written.
            return reads, writes + [(t.memory, whole(t.inner)) for t in outputs]

        work = Work(str(func), lambda: func(*plain[0], **plain[1]), places)
        found = work.run()
        made = [leaf for leaf in leaves_of(found) if isinstance(leaf, Tensor)]
        if made and not written and all(is_view(out) for out in made):
            # Nothing is computed.
            return changed(
                found,
                lambda out: OnDevice(out, known[out.untyped_storage().data_ptr()]) if isinstance(out, Tensor) else out,
            )
        wrapped = changed(found, lambda out: self.fresh(out) if isinstance(out, Tensor) and not is_view(out) else out)
        outputs += [out for out in leaves_of(wrapped) if isinstance(out, OnDevice)]
        work.keep = [
            (out, place) for place, out in enumerate(leaves_of(found)) if isinstance(out, Tensor) and not is_view(out)
        ]
        # Its outputs are there already.
        self._take(work)
        return written[0] if written else wrapped

    def _part(self, func: Any, tensor: OnDevice, args: Any) -> Region:
        """What an operation touches of a tensor: of an indexed one, the places that the index names."""
        if func not in INDEXING or tensor is not args[0]:
            return whole(tensor.inner)
        inner = tensor.inner
        at = torch.from_numpy(elements(tuple(inner.shape), inner.stride(), inner.storage_offset()))
        index = changed(args, inner_of)
        found = at.index_select(*index[1:3]) if INDEXING[func] else aten.index.Tensor(at, index[1])
        return found.numpy() * inner.element_size() // GRANULE

    # -- between the host and the device -------------------------------------------------------------------------------

    def _page_locked(self, inner: Tensor) -> Tensor:
        self.must_not_capture("page-locking memory")
        storage = inner.untyped_storage()
        self._pinned[storage.data_ptr()] = Memory(self.order, f"pinned {list(inner.shape)}", storage.nbytes(), None)
        self._kept.append(inner)
        return inner

    def _host_access(self, func: Any, leaves: list[Any], args: Any, kwargs: Any) -> None:
        """An operation of the host on page-locked memory."""
        pinned = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self.host_memory(leaf) is not None]
        if not pinned:
            return
        writes = {id(args[place]) for place, _ in written_by(func) if place < len(args)}
        if not writes and any(r.alias_info is not None for r in func._schema.returns):
            return
        places = [(self.host_memory(t), whole(t), id(t) in writes) for t in pinned]
        self.order.access(
            self.order.thread,
            str(func),
            [(memory, region) for memory, region, is_write in places if memory and not is_write],
            [(memory, region) for memory, region, is_write in places if memory and is_write],
        )

    def touch_numpy(self, tensor: Tensor) -> None:
        """The host is about to write to page-locked memory through an array."""
        memory = self.host_memory(tensor)
        if memory is not None:
            self.order.access(self.order.thread, "numpy()", [], [(memory, whole(tensor))])

    def _sent(self, source: Tensor, kwargs: Any) -> OnDevice:
        target = self.fresh(torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype))
        self._crossing(target, source, kwargs.get("non_blocking", False))
        return target

    def _fetched(self, source: OnDevice, kwargs: Any) -> Tensor:
        target = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        self._crossing(target, source, False)
        return target

    def _crossing(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        """A copy between the host and the device; whatever is not page-locked makes the host wait."""
        host = source if isinstance(target, OnDevice) else target
        pinned = self.host_memory(host)
        to, of = (t.inner if isinstance(t, OnDevice) else t for t in (target, source))

        def place(tensor: Tensor) -> list[Place]:
            memory = tensor.memory if isinstance(tensor, OnDevice) else pinned
            inner = tensor.inner if isinstance(tensor, OnDevice) else tensor
            return [] if memory is None else [(memory, whole(inner))]

        self.launch(Work("copy_", lambda: to.copy_(of), lambda: (place(source), place(target))))
        if pinned is None or not non_blocking:
            self.must_not_capture("a copy that waits")
            self.syncs.append(f"copy of {list(host.shape)}")
            self.order.thread.hear(self.current_stream().agent.tell())
        return target

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, *rest: Any) -> tuple[int]:
        """`cudaMemcpyBatchAsync` on the stream whose handle is last."""
        assert rest[-1] == self.current_stream().cuda_stream > DEFAULT

        def places(addresses: Any) -> list[Place]:
            found = [(self.at(address), size) for address, size in zip(addresses, sizes, strict=True)]
            return [(memory, slice(at // GRANULE, -(-(at + size) // GRANULE))) for (memory, at), size in found]

        def run() -> None:
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)

        self.launch(Work("cudaMemcpyBatchAsync", run, lambda: (places(sources), places(targets))))
        return (0,)


@contextmanager
def pretended_cuda(seed: int = 0) -> Iterator[Machine]:
    """Within, torch has a CUDA device, and the machine's order finds races of the runtime's code on it."""
    machine = Machine(Order(), seed)
    make_tensor, to_numpy = torch.tensor, Tensor.numpy

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make_tensor(data, **options)
        return made if device is None else made.to(device)

    def numpy(self: Tensor, **options: Any) -> Any:
        machine.touch_numpy(self)
        return to_numpy(self, **options)

    watched = {
        kind: type(kind.__name__, (kind,), {"machine": machine}) for kind in (WatchedQueue, WatchedFlag, WatchedThread)
    }
    threads = SimpleNamespace(Event=watched[WatchedFlag], Thread=watched[WatchedThread])
    runtime = SimpleNamespace(cudaHostRegister=machine.lock, cudaHostUnregister=machine.unlock)
    bindings = SimpleNamespace(
        cudaMemcpyAttributes=SimpleNamespace,
        cudaMemcpySrcAccessOrder=SimpleNamespace(cudaMemcpySrcAccessOrderStream=1),
        cudaMemcpyBatchAsync=machine.copy_batch,
    )
    cuda = {
        "Stream": machine.Stream, "Event": machine.Event, "current_stream": machine.current_stream,
        "stream": machine.on_stream, "set_stream": machine.set_stream, "synchronize": machine.synchronize,
        "empty_cache": lambda: None, "CUDAGraph": lambda: Graph(machine), "graph": machine.capture,
        "graph_pool_handle": lambda: (0, 0), "_lazy_init": lambda: None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Tensor, "numpy", numpy)
        patch.setattr(copy_worker, "threading", threads)
        patch.setattr(copy_worker, "SimpleQueue", watched[WatchedQueue])
        patch.setattr(page_locked, "_runtime", lambda: runtime)
        patch.setattr(batched_copies, "_runtime", lambda: bindings)
        patch.setattr(backend, "uses_triton", lambda tensor: tensor.is_cuda)
        with machine:
            yield machine

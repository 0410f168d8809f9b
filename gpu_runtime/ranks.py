"""Tensor parallelism over processes (Megatron-LM, Shoeybi et al. 2019), a rank each: `Group` is a rank's side of it.

Every rank has its share of each layer's heads and of its MLP's width, and of the vocabulary at the head; embedding and
norms it has whole. All run the same engine over the same requests. What an engine decides depends on nothing but what
it is told and when: so ranks share rank 0's clock, and with it every plan, block table and token. No plan is sent.
"""
# torch.distributed exports stores only where it was built.
# pyright: reportPrivateImportUsage=false

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sim.errors import InvariantError, UserError
from sim.options.scenario import Scenario

if TYPE_CHECKING:
    from gpu_runtime.live import LiveOptions
    from sim.run.prepare import Setup

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
PATIENCE = timedelta(days=7)
"""Ranks wait for one another as long as rank 0 waits for requests. A process that ends breaks its connections."""
HANG_S = 600.0
"""Rank 0 waits so long within an iteration, or for others to do what it has done. NCCL's own limit would not do: its
kernels in a graph it does not watch."""
LOOK_S = 1.0
"""How often that is looked at."""
LAST_WORDS_S, END_S = 2.0, 5.0
"""How long a broken group waits for a reason, and for a process to end when it is told to."""


def when_ended(sentinels: Sequence[int], act: Callable[[], object]) -> None:
    """Do so, in a thread, when one of these processes has ended."""

    def watch() -> None:
        if wait(sentinels):
            act()

    Thread(target=watch, daemon=True, name="watches ranks").start()


class Group:
    """One rank of `size`. Collectives are asked for by all ranks, in one order."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: str) -> None:
        self.rank, self.size, self._device = rank, size, device
        # It would end a process that notices an error, and with it what is finished: ranks watch each other instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)

    def sum(self, part: Tensor) -> Tensor:
        """`part` summed over all ranks, in place: what a row-parallel product leaves to do."""
        dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """[rows, size n] of [rows, n], rank 0's first."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    def shared_s(self, time_s: float, progress: int) -> float:
        """Rank 0's `time_s`. InvariantError on a rank whose `progress` is another: it has gone another way."""
        shared_s, expected = self.of_first([time_s, progress])
        if progress != expected:
            raise InvariantError(f"computed other tokens than rank 0 ({progress}, not {expected:.0f}) by {shared_s} s")
        return shared_s

    def of_first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, as many."""
        self.due(HANG_S)
        told = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(told, 0)
        return told.tolist()

    def due(self, seconds: float) -> None:
        """From now on other ranks are waited for at most so long: `inf` where this one waits for requests."""

    def abort(self) -> None:
        """Break off what a GPU waits for: NCCL's kernels do not notice that another rank has ended; gloo does."""
        if self._device == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD._get_backend(torch.device("cuda")).abort()

    @contextmanager
    def serving(self, setup: "Setup") -> Iterator[None]:
        """Within, all ranks serve a set-up's requests. On other ranks than the first nothing is left to do."""
        yield

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class FirstGroup(Group):
    """Rank 0's, which starts the others as processes of its own and ends them."""

    def __init__(self, scenario: Scenario, options: "LiveOptions", serve_others: Callable[..., object]) -> None:
        """Start the others, which load their parts of the model while the caller loads its own `together`."""
        # Any free port, on which all meet. A store that made its own would listen on all of the machine's addresses.
        meeting = socket.create_server((LOOPBACK, 0))
        port = meeting.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, scenario.tp, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach()
        )
        self._others: list[Connection] = []
        self._closes, self._hangs, self._due_s = False, False, inf
        context, threads = get_context("spawn"), max(1, torch.get_num_threads() // scenario.tp)
        self._processes = []
        for rank in range(1, scenario.tp):
            here, there = context.Pipe()
            facts = (rank, port, there, scenario, options, threads)
            self._processes.append(context.Process(target=serve_others, args=facts, daemon=True, name=f"rank {rank}"))
            self._others.append(here)
            self._processes[-1].start()
            there.close()
        Thread(target=self._watch, daemon=True, name="watches ranks").start()
        if options.device == "cpu":
            torch.set_num_threads(threads)
        with self.together():
            # None waits for one that has not come so far.
            pass
        with self._telling():
            super().__init__(0, scenario.tp, store, options.device)

    @contextmanager
    def serving(self, setup: "Setup") -> Iterator[None]:
        with self.together():
            for other in self._others:
                other.send((setup.scenario, setup.label, setup.policy))
            # Warming up computes with them before a time is asked for.
            self.due(HANG_S)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, this rank does what the others do; behind, each of them has done it.

        Raises:
            UserError: a rank failed, which ends all; in its words.
        """
        with self._telling():
            yield
            self.due(HANG_S)
            for other in self._others:
                if (words := other.recv()) is not None:
                    raise UserError(words)
            self.due(inf)

    def due(self, seconds: float) -> None:
        self._due_s = monotonic() + seconds

    def _watch(self) -> None:
        """Until a rank has ended, or hangs and is ended. What this one does next with them fails, and tells why."""
        while not wait([process.sentinel for process in self._processes], LOOK_S):
            if monotonic() > self._due_s:
                self._hangs = True
                for process in self._processes:
                    process.kill()
        if not self._closes:
            self.abort()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, whatever fails ends the other ranks; where one of them is the reason, its words are told."""
        try:
            yield
        except BaseException as error:
            words = self._last_words() if isinstance(error, RuntimeError | EOFError | OSError) else None
            self.close()
            if words is not None:
                raise UserError(words) from error
            raise

    def _last_words(self) -> str | None:
        """Why the first rank that failed did; None if none has."""
        # The group may not have been formed.
        size = 1 + len(self._processes)
        if self._hangs:
            return (
                f"the {size} ranks stand still: rank 0 has been in an iteration, or waited for the others, "
                f"for {HANG_S:g} s. All were ended; on GPUs NCCL_DEBUG=INFO says what NCCL waits for"
            )
        for process, other in zip(self._processes, self._others, strict=True):
            try:
                words = other.recv() if other.poll(LAST_WORDS_S) else None
            except (EOFError, OSError):
                process.join(END_S)
                words = f"{process.name} of {size} ended with status {process.exitcode}"
            if words is not None:
                return words
        return None

    def close(self) -> None:
        """End the other ranks, and leave the group."""
        self._closes = True
        for other in self._others:
            other.close()
        for process in self._processes:
            process.terminate()
            process.join(END_S)
        super().close()

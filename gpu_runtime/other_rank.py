"""A process of tensor parallelism beside the first (`gpu_runtime.ranks`)."""
# torch.distributed exports stores only where it was built.
# pyright: reportPrivateImportUsage=false

import os
import signal
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gpu_runtime.live import LiveOptions, load_decoder, perform
from gpu_runtime.ranks import LOOPBACK, Group, when_ended
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.traffic import requests_of


def serve_others(
    rank: int, port: int, first: Connection, scenario: Scenario, options: LiveOptions, threads: int
) -> None:
    """A rank beside the first: load its part of the model, then serve what it is told to, until rank 0 is gone."""
    # An interrupt is rank 0's to handle, which then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    if (parent := parent_process()) is not None:
        # Killed, it ends no other process; a GPU would go on waiting for it.
        when_ended([parent.sentinel], partial(os._exit, 1))
    try:
        first.send(None)
        if options.device == "cuda":
            torch.cuda.set_device(rank)
        store = dist.TCPStore(LOOPBACK, port, scenario.tp, is_master=False)
        group = Group(rank, scenario.tp, store, options.device)
        decoder = load_decoder(scenario.model, scenario.dtype, options, group)
        first.send(None)
        while True:
            setup = prepare(*first.recv())
            perform(setup, requests_of(setup), None, Recording(), decoder, options)
            first.send(None)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        # Where rank 0 has failed first, no process reads it.
        with suppress(OSError):
            first.send(f"rank {rank} of {scenario.tp}: {told.splitlines()[0]}")

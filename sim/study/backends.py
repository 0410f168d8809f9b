"""Where the runs of a study are performed: on this machine's cores, or on a cluster of Dask or Ray that exists.

Each gives outcomes as they come, in any order. Traces are handed over once, not with every task.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from time import sleep
from typing import Any, Literal, get_args

from sim.errors import UserError
from sim.study.points import Outcome, Task, perform
from sim.study.shared_trace import SharedTrace

Backend = Literal["loky", "dask", "ray"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
WATCH_S = 1.0
"""Between looks of a worker whether the process that started it is alive."""
PACKAGES = {"dask": "distributed", "ray": "ray"}
"""What a backend imports; extras of these names install it."""


def outcomes(
    tasks: Sequence[Task],
    traces: Mapping[str, SharedTrace],
    backend: Backend = "loky",
    *,
    address: str | None = None,
    jobs: int | None = None,
) -> Iterator[Outcome]:
    """Perform the tasks; `jobs` processes (default: a core each) where the backend starts its own.

    Raises:
        UserError: the backend is not installed or not reached, or a worker died.
    """
    if backend not in BACKENDS:
        raise UserError(f"--backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if address is not None and backend == "loky":
        raise UserError(f"--address {address}: of a cluster of --backend dask or ray; leave it out, or give one")
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: {jobs} is less than 1; leave it out for one a core")
    if backend == "loky":
        return _loky(tasks, traces, jobs)
    try:
        module: Any = import_module(PACKAGES[backend])
    except ImportError as error:
        raise UserError(f"--backend {backend}: {error}; install kvtwin[{backend}]") from error
    return (_dask if backend == "dask" else _ray)(module, tasks, traces, address, jobs)


def _loky(tasks: Sequence[Task], traces: Mapping[str, SharedTrace], jobs: int | None) -> Iterator[Outcome]:
    joblib: Any = import_module("joblib")  # slow to import
    from joblib.externals.loky.process_executor import BrokenProcessPool  # noqa: PLC0415

    workers = min(jobs or joblib.cpu_count(), len(tasks))
    if workers <= 1:
        yield from (perform(task, _of(task, traces)) for task in tasks)
        return
    # joblib maps large arrays into every worker. One task at a time: what has ended is kept at once.
    parallel = joblib.Parallel(
        n_jobs=workers, backend="loky", batch_size=1, return_as="generator_unordered", max_nbytes=1024
    )
    try:
        yield from parallel(joblib.delayed(_perform)(os.getpid(), task, _of(task, traces)) for task in tasks)
    except BrokenProcessPool as error:
        text = "a worker died (killed, or out of memory); give fewer --jobs"
        raise UserError(f"{text}; finished points are kept, and the same command goes on") from error


def _perform(parent: int, task: Task, trace: SharedTrace | None) -> Outcome:
    """In a worker, that ends with the process that wants its outcomes, even if that is killed."""
    _end_with(parent)
    return perform(task, trace)


@cache
def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _of(task: Task, traces: Mapping[str, SharedTrace]) -> SharedTrace | None:
    return traces.get(task.trace or "")


def _dask(
    distributed: Any,  # noqa: ANN401
    tasks: Sequence[Task],
    traces: Mapping[str, SharedTrace],
    address: str | None,
    jobs: int | None,
) -> Iterator[Outcome]:
    own = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": None}
    try:
        client = distributed.Client(address) if address else distributed.Client(**own)
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(f"--address {address}: no Dask scheduler answers there ({_line(error)})") from error
    with client:
        shared = {name: client.scatter(trace, broadcast=True) for name, trace in traces.items()}
        # Pure: tasks are told apart by their arguments; ours have a key each.
        futures = [client.submit(perform, task, shared.get(task.trace or ""), pure=False) for task in tasks]
        try:
            for future in distributed.as_completed(futures):
                yield future.result()
        except distributed.KilledWorker as error:
            raise UserError(f"a worker died ({_line(error)}); the same command goes on") from error
        finally:
            client.cancel(futures)


def _ray(
    ray: Any,  # noqa: ANN401
    tasks: Sequence[Task],
    traces: Mapping[str, SharedTrace],
    address: str | None,
    jobs: int | None,
) -> Iterator[Outcome]:
    own = {"num_cpus": jobs, "include_dashboard": False}
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, **({} if address else own))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"--address {address}: no Ray cluster answers there ({_line(error)})") from error
    try:
        remote = ray.remote(perform)
        shared = {name: ray.put(trace) for name, trace in traces.items()}
        waiting = [remote.remote(task, shared.get(task.trace or "")) for task in tasks]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield ray.get(done[0])
    except ray.exceptions.RayError as error:
        raise UserError(f"a worker died ({_line(error)}); the same command goes on") from error
    finally:
        ray.shutdown()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

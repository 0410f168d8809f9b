"""Workers of this machine, Dask and Ray perform the same tasks; what goes wrong with them is told in a line."""

import importlib
from types import SimpleNamespace

import pytest
from joblib.externals.loky.process_executor import BrokenProcessPool
from test_sweep import command, written

import kvtwin
from sim.errors import UserError
from sim.study.backends import outcomes
from sim.study.points import Task, perform


def test_an_unreachable_cluster_is_one_line():
    dask = pytest.importorskip("dask", reason="dask is not installed")
    pytest.importorskip("distributed", reason="distributed is not installed")
    task = Task("k", {"workload": "fixed"}, None)
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(UserError, match="no Dask scheduler answers there"),
    ):
        list(outcomes([task], {}, "dask", address="tcp://127.0.0.1:9"))


def test_a_worker_of_this_machine_that_dies_is_one_line(monkeypatch):
    class Dying:
        def __init__(self, n_jobs, **how):
            # What has ended is given at once, and a trace is mapped rather than sent.
            assert how == {
                "backend": "loky", "batch_size": 1, "return_as": "generator_unordered", "max_nbytes": 1024,
            }  # fmt: skip
            self.jobs = n_jobs

        def __call__(self, calls):
            yield from (f"{self.jobs} workers", *(task.key for _, (_, task, _), _ in calls))
            raise BrokenProcessPool("it was killed")

    monkeypatch.setattr("joblib.Parallel", Dying)
    monkeypatch.setattr("joblib.cpu_count", lambda: 7)
    tasks = [Task(key, {}, None) for key in "abcde"]
    assert [next(outcomes(tasks, {}, jobs=jobs)) for jobs in (None, 3)] == ["5 workers", "3 workers"]
    found = outcomes(tasks[:2], {}, jobs=3)
    assert [next(found), next(found), next(found)] == ["2 workers", "a", "b"]
    with pytest.raises(UserError) as caught:
        next(found)
    assert str(caught.value) == (
        "a worker died (killed, or out of memory); give fewer --jobs; finished points are kept, and the same command "
        "goes on"
    )


class Dask:
    """Stands for `distributed`: tasks are performed as they are asked for, and one may kill its worker."""

    class KilledWorker(Exception):
        """As distributed's."""

    def __init__(self, dies_after):
        self.dies_after, self.done = dies_after, []

    def Client(self, address=None, **own):
        self.done.append((address, own))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.done.append("closed")

    def scatter(self, trace, broadcast):
        assert broadcast
        return f"shared {trace}"

    def submit(self, function, task, trace, pure):
        assert function is perform and not pure
        return SimpleNamespace(result=lambda: (task.key, trace))

    def as_completed(self, futures):
        yield from futures[: self.dies_after]
        if self.dies_after < len(futures):
            raise self.KilledWorker("out of memory\nof many")

    def cancel(self, futures):
        self.done.append(f"{len(futures)} cancelled")


class Ray:
    """Stands for `ray`, likewise."""

    exceptions = SimpleNamespace(RayError=Dask.KilledWorker)

    def __init__(self, dies_after):
        self.dies_after, self.done = dies_after, []

    def init(self, address, **options):
        assert not options.pop("log_to_driver") and not options.pop("configure_logging")
        self.done.append((address, options))

    def shutdown(self):
        self.done.append("closed")

    def remote(self, function):
        assert function is perform
        return SimpleNamespace(remote=lambda task, trace: (task.key, trace))

    def put(self, trace):
        return f"shared {trace}"

    def wait(self, waiting):
        return waiting[:1], waiting[1:]

    def get(self, one):
        if self.dies_after == 0:
            raise self.exceptions.RayError("out of memory\nof many")
        self.dies_after -= 1
        return one


OWN = {"dask": {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}}
OWN["ray"] = {"num_cpus": 2, "include_dashboard": False}


@pytest.mark.parametrize("address", [None, "tcp://there:1"])
@pytest.mark.parametrize("dies_after", [1, 3])
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_cluster_gets_traces_once_and_says_what_died(monkeypatch, backend, dies_after, address):
    """And is left, its tasks with it, however the runs end."""
    cluster = {"dask": Dask, "ray": Ray}[backend](dies_after)
    monkeypatch.setattr(importlib.import_module("sim.study.backends"), "import_module", lambda name: cluster)
    tasks = [Task("a", {}, "t"), Task("b", {}, "t"), Task("c", {}, None)]
    found = outcomes(tasks, {"t": "trace"}, backend, address=address, jobs=2)
    wanted = [("a", "shared trace"), ("b", "shared trace"), ("c", None)]
    if dies_after == 1:
        assert next(found) == wanted[0]
        with pytest.raises(UserError) as caught:
            next(found)
        assert str(caught.value) == "a worker died (out of memory); the same command goes on"
    else:
        assert list(found) == wanted
    own = {} if address else OWN[backend]
    assert cluster.done == [(address, own), *(["3 cancelled"] if backend == "dask" else []), "closed"]


def test_a_ray_cluster_that_does_not_answer_is_one_line(monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")

    def unreachable(address, **_):
        raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(ray, "init", unreachable)
    with pytest.raises(UserError, match=r"^--address nowhere:9: no Ray cluster answers there \(.*nobody"):
        list(outcomes([Task("k", {"workload": "fixed"}, None)], {}, "ray", address="nowhere:9"))


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib.import_module("sim.study.backends"), "import_module", absent)
    with pytest.raises(UserError, match=r"install kvtwin\[ray\]"):
        outcomes([], {}, "ray")


@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_clusters_give_the_same_tables(backend, package, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,90,5\n0.5,70,3\n1.0,20,9\n")
    study = {"trace": str(tmp_path / "t.csv"), "policy": ["vllm-v1", "layerkv"]}
    study |= {"sweep": {"grid": {"rate-scale": [1, 2, 4]}}}
    path = written(tmp_path / "s.toml", study)
    assert kvtwin.main(command(path, tmp_path / "loky", "--jobs", "2", "--quiet")) == 0
    assert kvtwin.main(command(path, tmp_path / backend, "--backend", backend, "--jobs", "1", "--quiet")) == 0
    for name in ("table.csv", "summary.json"):
        assert (tmp_path / "loky" / name).read_bytes() == (tmp_path / backend / name).read_bytes()

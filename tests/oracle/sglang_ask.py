"""Asks SGLang's own scheduler about many small workloads: imports it once, then answers each in a process of its own.

    python sglang_ask.py ORACLE JOBS      # in an environment where sglang 0.5.23 is installed

ORACLE is a script that drives SGLang's `Scheduler` over a virtual clock and writes an answer in the form that
`sglang_replay.py` reads. JOBS has a line of JSON a workload: that script's arguments, and perhaps, last, those of
`sglang_copies.py`: `--copy_s`, seconds that a token takes between GPU and host, and what storage takes. A line is
printed for each: 0, or the status that the script ended with.
"""

import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import types
import typing
from pathlib import Path

import sglang_copies

LIMIT_S = 120
STATEFUL = (
    "sglang.srt.arg_groups.mamba_hook",
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup",
)
RECEIVES = "types.SimpleNamespace(recv_requests=recv)"
LEAK = "assert left == sch.max_total_num_tokens"
"""Where ORACLE checks its one pool at the end."""


class _Named(type):
    """A class of which every attribute is another such class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Pretended(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for compiled packages that SGLang imports and that no decision calls."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in ("torchvision", "sgl_kernel"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Pretended(spec.name)
        module.__dict__.update(__path__=[], __version__="99.0")
        return module

    def exec_module(self, module):
        pass


def pretend_states() -> None:
    """What a model with layers that keep a state asks of a GPU, and no decision does."""
    import torch  # noqa: PLC0415

    arguments, attention = typing.cast("list[typing.Any]", [importlib.import_module(name) for name in STATEFUL])
    arguments._platform_supports_mamba_cache_extra_buffer = lambda: True
    attention.attn_backend_wrapper = lambda runner, backend: backend
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    host = typing.cast("typing.Any", importlib.import_module("sglang.srt.mem_cache.pool_host.mamba")).MambaPoolHost
    for name in ("load_to_device_per_layer", "backup_from_device_all_layer"):
        setattr(host, name, lambda *args, **kwargs: None)


def whole(scheduler) -> bool:
    """Whether all that is not cached of the pools of a model with windows or states is free."""
    pools, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    states = getattr(scheduler.req_to_token_pool, "mamba_allocator", None)
    if states is not None:
        cached = (0, 0) if tree.disable else (tree.full_evictable_size(), tree.mamba_evictable_size())
        free = (pools.available_size() + cached[0], states.available_size() + cached[1])
        return free == (pools.size, states.size)
    cached = (0, 0) if tree.disable else (tree.full_evictable_size(), tree.swa_evictable_size())
    free = (pools.full_available_size() + cached[0], pools.swa_available_size() + cached[1])
    return free == (pools.size_full, pools.size_swa)


def skipping(names: dict[str, typing.Any]) -> typing.Any:
    """ORACLE's receiver behind SGLang's own rule of when it looks: idle, it takes no time until it does."""
    scheduler, receive = names["sch"], names["recv"]

    def looked(local_reqs: list | None = None) -> list:
        skipper, last = scheduler.recv_skipper, scheduler.last_batch
        while skipper is not None and not skipper.handle(last):
            if not names["idle_now"]:
                return list(local_reqs or [])
        return receive(local_reqs)

    return types.SimpleNamespace(recv_requests=looked)


def run(oracle: str, settings: dict[str, float]) -> None:
    """ORACLE with the arguments in `sys.argv`; with `settings` copies take time."""
    source = Path(oracle).read_text(encoding="utf-8")
    names: dict[str, typing.Any] = {"__name__": "__main__", "__file__": oracle, "_whole": whole}
    assert RECEIVES in source, f"{oracle} has another receiver"
    names["_skipping"] = lambda: skipping(names)
    source = source.replace(RECEIVES, "_skipping()")
    if any('"model_path"' in argument for argument in sys.argv):
        assert LEAK in source, f"{oracle} has another check"
        source = source.replace(LEAK, "assert _whole(sch)")
        pretend_states()
    if settings:
        source = sglang_copies.timed(source, names, settings)
    exec(compile(source, oracle, "exec"), names)


def main() -> None:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="1")
    sys.meta_path.insert(0, _Finder())
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    for module in ("sglang.srt.managers.scheduler", "sglang.srt.models.registry"):
        # The second takes longest, and each scheduler asks for it.
        importlib.import_module(module)

    oracle = sys.argv[1]
    for line in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines():
        child = os.fork()
        if not child:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            if "SGLANG_ASK_VERBOSE" not in os.environ:
                os.dup2(quiet, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            sys.argv = [oracle, *json.loads(line)]
            try:
                place = sys.argv.index("--copy_s") if "--copy_s" in sys.argv else len(sys.argv)
                names, values = sys.argv[place::2], map(float, sys.argv[place + 1 :: 2])
                del sys.argv[place:]
                run(oracle, {name[2:]: value for name, value in zip(names, values, strict=True)})
            except BaseException:
                import traceback  # noqa: PLC0415

                traceback.print_exc()
            finally:
                os._exit(1)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()

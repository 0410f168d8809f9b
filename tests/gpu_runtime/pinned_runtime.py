"""What the live runtime refuses, fits, reads and moves, and what a server answers: a line each, in `golden/*.txt`.

    python tests/gpu_runtime/pinned_runtime.py      # writes golden/*.txt anew

Read the difference: it is what a user sees change, or which blocks an iteration copies.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "sim"), str(HERE.parent / "pins"), str(HERE)]

import msgspec  # noqa: E402
import pinned_answers  # noqa: E402
import test_runtime_config  # noqa: E402
import torch  # noqa: E402
from pinned import digest, rounded, short  # noqa: E402
from runtime_variants import CONTIGUOUS, STREAM, TIERED, TREES, policy_of  # noqa: E402

from gpu_runtime import live_memory  # noqa: E402
from gpu_runtime.instance import LiveInstance  # noqa: E402
from gpu_runtime.kv.pool import KVPool  # noqa: E402
from gpu_runtime.live_memory import fit_to_machine  # noqa: E402
from gpu_runtime.model.config import DecoderConfig  # noqa: E402
from gpu_runtime.model.rotary import RotaryEmbedding  # noqa: E402
from kvtwin.testing import linear_machine, requests  # noqa: E402
from kvtwin.testing.engines import build_engine  # noqa: E402
from kvtwin.testing.live import ALIKE, GROWING, SMALL, CheckedDevice, alike, build_device, small_decoder, tight_limits  # noqa: E402
from kvtwin.testing.pretended import PretendedDevice  # noqa: E402
from sim.clock.arrivals import Arrivals  # noqa: E402
from sim.engine.plan import IterationPlan, StepTimes  # noqa: E402
from sim.errors import UserError  # noqa: E402
from sim.scenario import Scenario  # noqa: E402
from sim.specs.models import built_in_models, load_model  # noqa: E402

GOLDEN = HERE / "golden"


def told(act: Callable[..., object], *given: Any, **options: Any) -> str:
    """What comes of it, in one line."""
    try:
        return str(act(*given, **options))
    except (UserError, ValueError) as error:
        return f"! {error}"


# -- memory ------------------------------------------------------------------------------------------------------------

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"swap_space": 0.25},
    {"num_gpu_blocks_override": 100},
    {"max_num_seqs": 7, "max_num_batched_tokens": 4096, "max_model_len": 1000, "block_size": 32},
)
FITTED = ("vllm-v1", "layerkv:decode=stream", "hcache:keeps=turns")
REFUSED = (
    "ellm",
    "mooncake",
    "vllm-v1:kv-offloading-size=1",
    "vllm-v1:async-scheduling=true",
    "adaptive:memory=tiered-states",
)
PLAIN = Scenario(
    model="qwen3-0.6b", gpu="l20", workload="fixed", input_len=9, output_len=9, engine_profile="kvtwin", swap_space=None
)
MOST = 1 << 36
"""Bytes that are enough for everything."""


def fitted(scenario: Scenario, policy: str, device: str, decoder: Any, free: dict[str, int]) -> str:
    """What is made smaller of a scenario, where there are so many bytes free."""

    def fit() -> object:
        found = fit_to_machine(scenario, policy_of(policy), device, decoder)
        return {f.name: new for f in fields(found) if (new := getattr(found, f.name)) != getattr(scenario, f.name)}

    with patch.object(live_memory, "free_bytes", free.__getitem__):
        return told(fit)


def fitting() -> Iterator[str]:
    """From how many bytes on pools fit, whole and made smaller, and what is said below that."""
    small = small_decoder()
    for policy in FITTED:
        for asked in ASKED if policy == "vllm-v1" else ASKED[:1]:
            scenario = replace(PLAIN, **asked)
            kinds = (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"))
            for device, tight in kinds if policy == "vllm-v1" else kinds[:2]:
                yield from edges(
                    f"{policy} {asked} on {device}", tight, partial(fitted, scenario, policy, device, small)
                )
    yield from edges("nothing that computes", "cpu", partial(fitted, PLAIN, "vllm-swap", "cpu", None))
    everything = {"cpu": MOST, "cuda": MOST}
    for policy in REFUSED:
        yield f"{policy}: {fitted(PLAIN, policy, 'cpu', None, everything)}"
    for profile in ("vllm-v1", "vllm-v1-async"):
        found = fitted(replace(PLAIN, engine_profile=profile), "vllm-v1", "cpu", None, everything)
        yield f"{profile}: {found}"


def edges(what: str, tight: str, fit: Callable[[dict[str, int]], str]) -> Iterator[str]:
    """What fits into so many bytes of one kind of memory, where that changes."""

    @cache
    def at(free: int) -> str:
        return fit({"cpu": MOST, "cuda": MOST, tight: free})

    first = [least(lambda free, kind=kind: kind_of(at(free)) >= kind) for kind in (1, 2)]
    yield f"{what}, {tight}'s memory"
    for free in sorted({0, *(max(number - 1, 0) for number in first), *first}):
        yield f"  {free}: {at(free)}"


def kind_of(outcome: str) -> int:
    """0: refused, 1: something is made smaller, 2: nothing is."""
    return 0 if outcome.startswith("!") else 1 if outcome != "{}" else 2


def least(holds: Callable[[int], bool]) -> int:
    """The fewest bytes with which it holds; `MOST` where it never does."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


# -- models ------------------------------------------------------------------------------------------------------------

LLAMA = test_runtime_config.PLAIN | {"max_position_embeddings": 12}
LLAMA3 = test_runtime_config.LLAMA3 | {"original_max_position_embeddings": 40}
COUNTS = (None, 0, 1, 3, -1, 2.0, 2.5, True, "2")
FIELDS: dict[str, tuple[Any, ...]] = {
    **{name: COUNTS for name in LLAMA if name != "model_type"},
    "model_type": (None, "llama", "mistral", "qwen2", "qwen3", "gemma", "opt", "mixtral"),
    "hidden_act": (None, "silu", "swish", "gelu", 5),
    "attention_bias": (None, True, False, 1),
    "mlp_bias": (None, True, False, 1),
    "tie_word_embeddings": (None, True, False, 1),
    "quantization_config": ({}, {"quant_method": "awq"}),
    "num_experts": (None, 0, 1, 8),
    "num_local_experts": (None, 0, 1, 8),
    "sliding_window": (None, 0, 5, 64),
    "rms_norm_eps": (None, 0, 1, 0.0, 1.0, 1e-5, 0.5, True, "1e-5"),
    "partial_rotary_factor": (None, 1, 1.0, 0.5, 2),
    "rope_theta": (None, 0, 1, 5e5, -1.0, float("inf"), True, "1"),
    "rope_scaling": (
        None,
        {},
        [],
        "linear",
        {"type": "linear", "factor": 2},
        {"rope_type": "linear", "factor": 0},
        LLAMA3,
        {"type": "yarn"},
        {**LLAMA3, "low_freq_factor": 4.0},
        {**LLAMA3, "low_freq_factor": 5.0},
        {**LLAMA3, "factor": None},
        {**LLAMA3, "high_freq_factor": True},
        {"type": "default", "rope_theta": 7.0},
        {"partial_rotary_factor": 0.5},
    ),
    "rope_parameters": (
        None,
        {"rope_theta": 9.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 3},
        {"partial_rotary_factor": 1},
    ),
}


def configuring() -> Iterator[str]:
    """Models as their configs say, and the angles of their positions."""
    for kind in ("llama", "qwen2", "qwen3"):
        for field, values in FIELDS.items():
            for value in values:
                config = LLAMA | {"model_type": kind} | {field: value}
                yield f"{kind} {field} {value!r}: {told(configured, config)}"
        for field in LLAMA:
            config = {name: value for name, value in (LLAMA | {"model_type": kind}).items() if name != field}
            yield f"{kind} without {field}: {told(configured, config)}"
    for name in built_in_models():
        yield f"{name}: {told(shaped, name)}"


def shaped(name: str) -> object:
    """What a spec of a model says."""
    return rounded(msgspec.structs.asdict(DecoderConfig.from_spec(load_model(name))))


def configured(config: dict[str, Any]) -> str:
    """What differs from the usual model, how many weights it has, and the first angles and the sum of all."""
    found, usual = (msgspec.structs.asdict(DecoderConfig.from_hf(one)) for one in (config, LLAMA))
    read = DecoderConfig.from_hf(config)
    cosines = RotaryEmbedding(read, "cpu").table
    places = [f"{value:.4f}" for value in (*cosines[-1, :3].tolist(), float(cosines.sum()))]
    return (
        f"{ {name: found[name] for name in found if found[name] != usual[name]} } {read.num_weights} {' '.join(places)}"
    )


# -- plans carried out -------------------------------------------------------------------------------------------------


class NotedDevice(CheckedDevice):
    """Has a clock that its cost model sets; notes which blocks are copied and held."""

    clock: PretendedDevice
    notes: list[str]

    def now_s(self) -> float:
        return self.clock.now_s()

    def wait(self, until_s: float) -> None:
        self.clock.clock_s = until_s

    def execute(self, plan: IterationPlan) -> StepTimes:
        super().execute(plan)
        places = self.memory.placement
        held = {seq.request.request_id: (own.gpu, own.host, own.slots) for seq, own in places.held.items()}
        free = places.gpu.num_free, places.host.num_free
        self.notes.append(f"{plan.kind} holding {held}, free {free}, cached {list(places.cached.lists())}")
        return self.clock.execute(plan)


def carried_out(variant: str, rows: Any, caches: bool, **sizes: Any) -> Iterator[str]:
    """What a device does for requests: how many iterations and copies there are, and digests of all ids."""
    policy = policy_of(variant)
    arrivals = alike(requests(*rows)) if caches else requests(*rows)
    limit = replace(tight_limits(policy, **sizes), enable_prefix_caching=caches)
    machine = linear_machine(limit.block_bytes, layers=SMALL.num_layers)
    ended: list[Any] = []
    engine = build_engine(policy, limit, machine, ended.append)
    device = build_device(engine.scheduler, kind=NotedDevice, inline_copies=True)
    assert isinstance(device, NotedDevice)
    device.clock, device.notes = PretendedDevice(machine, engine.scheduler), []
    copied: list[str] = []

    def noted(copy: Callable[..., object]) -> Callable[..., object]:
        def note(*given: Any) -> object:
            copied.append(str([part for part in given if not isinstance(part, torch.Tensor | KVPool)]))
            return copy(*given)

        return note

    copies = device.memory.engine
    for name in ("copy_blocks", "copy_layer", "copy_rows"):
        setattr(copies, name, noted(getattr(copies, name)))
    with torch.inference_mode():
        LiveInstance(engine, device, Arrivals(arrivals)).serve()
    device.close()
    told = f"{len(device.notes)} iterations {digest(device.notes)}, {len(copied)} copies {digest(copied)}"
    yield f"{variant} {caches} {sizes}: {told}"
    yield from (line[:200] for line in (*device.notes[20:22], *copied[5:7]))


CROWDED = (
    "vllm-recompute",
    "vllm-swap",
    "vllm-swap:batching=sarathi",
    "layerkv",
    "layerkv:batching=sarathi",
    STREAM,
    CONTIGUOUS,
    "hcache",
    "kvpr",
    "orca",
    "fastserve",
    "fastserve:memory=reserved",
    "distserve",
    "pensieve",
    "radix",
    "batchllm",
    "adaptive",
)
CACHING = ("vllm-v1", *TIERED, *TREES, "batchllm:batching=sglang", "hcache:keeps=turns", "pensieve")
SIZES = ({"gpu": 16, "seqs": 3}, {"gpu": 16, "seqs": 3, "chunked": True})


def moving() -> Iterator[str]:
    """Every policy in pools that are too small."""
    for number, variant in enumerate(CROWDED):
        yield from carried_out(variant, GROWING[:4], False, **SIZES[number % 2])
    for number, variant in enumerate(CACHING):
        yield from carried_out(variant, ALIKE[:6], True, **SIZES[number % 2])


TOPICS = {"fitting": fitting, "configuring": configuring, "moving": moving} | pinned_answers.TOPICS


def lines(topic: Callable[[], Iterable[str]]) -> list[str]:
    """Of a topic."""
    return [short(line, 300) for line in topic()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, topic in TOPICS.items():
        (GOLDEN / f"{name}.txt").write_text("\n".join(lines(topic)) + "\n")

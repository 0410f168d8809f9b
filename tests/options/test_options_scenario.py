"""Flags and scenario files: the same names and the same results, every option in the result, units as documented."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import msgspec
import pytest

import kvtwin
from sim import systems
from sim.errors import UserError
from sim.options.policies import all_policy_options, options_of, owned_option, parse_policy
from sim.options.scenario import Outputs, Scenario, build_scenario
from sim.options.scenario_file import read_scenario
from sim.options.values import base_type, convert, flag, option_fields
from sim.parts.options import option
from sim.run.prepare import prepare
from sim.specs.models import load_model
from sim.systems import POLICIES, policy_named
from sim.systems.vllm055 import VllmRecompute
from traces.generators import generate
from traces.workloads import ABOUT, OPTIONS, WORKLOADS, option_type, takers

BASE = {"workload": "fixed", "num-prompts": 4, "input-len": 20, "output-len": 3, "request-rate": 5.0, "gpu": "l20"}


def words_of(options):
    """Options as flags; True stands for a bare flag, a list for several words."""
    found = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [f"--{name}", *map(str, values)]
    return found


def run(out, options, *words):
    """Exit 0 and the result."""
    arguments = ["run", *words_of(options), "--out", str(out), *words, "--quiet"]
    if "policy" not in options and "--scenario" not in words:
        arguments += ["--policy", "vllm-recompute"]
    assert kvtwin.main(arguments) == 0
    return json.loads((out / "result.json").read_text())


def scenario_file(folder, options):
    text = {True: "true", False: "false"}
    lines = (f"{key} = {text[v] if isinstance(v, bool) else json.dumps(v)}" for key, v in options.items())
    path = folder / "scenario.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def trace(folder, *rows):
    path = folder / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path


# -- files and flags -------------------------------------------------------------------------------------------------

WRITTEN = [
    {"enable-chunked-prefill": True, "max-num-batched-tokens": 64, "max-num-seqs": 8, "policy": "vllm-swap"},
    {"goodput": ["ttft:3000", "tpot:200"], "block-size": 8, "swap-space": 0.5, "seed": 3, "policy": "vllm-recompute"},
    {
        "policy": "layerkv",
        "layerkv-decode": "stream",
        "layerkv-slo-aware": False,
        "layerkv-threshold": 0.05,
        "layerkv-horizon-steps": 3,
    },
]


@pytest.mark.parametrize("options", WRITTEN)
def test_a_scenario_file_is_worth_its_flags(tmp_path, options):
    """With `-` or `_` between words."""
    options = BASE | options
    spelled = {key.replace("-", "_" if "seq" in key or "slo" in key else "-"): v for key, v in options.items()}
    flags = {f"no-{key}" if value is False else key: value or True for key, value in options.items()}
    from_flags = run(tmp_path / "flags", flags)
    from_file = run(tmp_path / "file", {}, "--scenario", str(scenario_file(tmp_path, spelled)))
    assert from_file == from_flags
    options_ = from_flags["scenario"]["policy_options"]
    chosen = from_flags["scenario"] | {f"layerkv_{name}": value for name, value in options_.items()}
    for key, value in options.items():
        assert chosen[key.replace("-", "_")] == value


def test_a_flag_overrides_the_file(tmp_path):
    written = BASE | {"policy": ["layerkv", "vllm-swap"], "seed": 1, "timeline": True, "enable-chunked-prefill": True}
    path = str(scenario_file(tmp_path, written | {"out": str(tmp_path / "unused")}))
    flags = ["--policy", "vllm-recompute", "--seed", "2", "--no-timeline", "--no-enable-chunked-prefill"]
    result = run(tmp_path / "out", {}, "--scenario", path, *flags)
    scenario = result["scenario"]
    assert (scenario["policy"], scenario["seed"], scenario["enable_chunked_prefill"]) == ("vllm-recompute", 2, False)
    assert scenario["input_len"] == 20
    assert not (tmp_path / "out" / "timeline.json.gz").exists()
    assert not (tmp_path / "unused").exists()


def test_the_file_may_ask_for_outputs_and_name_the_folder(tmp_path):
    names = {"out": str(tmp_path / "out"), "timeline": True, "save-detailed": True, "quiet": True}
    path = scenario_file(tmp_path, BASE | names | {"policy": "vllm-recompute"})
    assert kvtwin.main(["run", "--scenario", str(path)]) == 0
    assert (tmp_path / "out" / "timeline.json.gz").exists()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["itls"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num-promts = 3", ["unknown key 'num-promts'", "did you mean 'num-prompts'?"]),
        ("layerkv-slo-awar = true", ["unknown key 'layerkv-slo-awar'", "did you mean 'layerkv-slo-aware'?"]),
        ("polices = 'layerkv'", ["unknown key 'polices'", "did you mean 'policy'?"]),
        ("num-prompts = 'many'", ["num-prompts: 'many' is not a whole number"]),
        (f"seed = {10**30}", ["seed: 1000", "is not a whole number (of 64 bits)"]),
        ("request-rate = nan", ["request-rate: nan is not a number"]),
        ("model = 5", ["model: 5 is not text in quotes"]),
        ("policy = ['layerkv', 1]", ["policy: ['layerkv', 1] is not a list of words"]),
        ("layerkv-slo-aware = 'maybe'", ["layerkv-slo-aware: 'maybe' is not true or false"]),
        ("layerkv-decode = 'later'", ["layerkv-decode: 'later' is not promote or stream"]),
        ("tp = 2020-01-01", ["tp: datetime.date(2020, 1, 1) is not a whole number"]),
        ("max-num-seqs = 1\nmax_num_seqs = 2", ["key 'max_num_seqs' stands twice"]),
        ("seed = 1\nseed = 2\ntp = 1", ["not a TOML file", "line 2"]),
    ],
)
def test_a_bad_scenario_file_is_refused_with_file_key_and_value(tmp_path, text, parts):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_scenario(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_slos_given_apart_count_together(tmp_path, capsys):
    """`vllm bench serve` takes them behind one flag; the last of two flags alone would count silently."""
    words = words_of(BASE | {"out": tmp_path, "quiet": True})
    assert kvtwin.main(["run", *words, "--goodput", "ttft:3000", "--goodput", "tpot:200"]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["scenario"]["goodput"] == ["ttft:3000", "tpot:200"]
    capsys.readouterr()
    assert kvtwin.main(["run", *words, "--goodput", "ttft:3000", "tpot:200", "--goodput", "ttft:4000"]) == 2
    assert capsys.readouterr().err == "kvtwin: --goodput: ttft is given twice; name each once\n"


def test_a_linear_profile_knows_no_other_type_of_kv(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(
        '{"form": "linear", "prefill": [0.01, 1e-4, 0], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}'
    )
    asked = Scenario(workload="fixed", gpu="l20", profile=str(path))
    policy = parse_policy("vllm-recompute", {})
    assert prepare(asked, *policy).warnings == []
    assert prepare(replace(asked, kv_cache_dtype="fp8"), *policy).warnings == [
        "--kv-cache-dtype: times of profile p are those of the KV it was measured with"
    ]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("adaptive", {}),
        ("adaptive:ttft-slo-ms=3000", {"ttft": 3000}),
        ("layerkv", {"tpot": 200}),
        ("layerkv:slo-aware=false", {}),
        ("ellm", {"tpot": 200}),
        ("sarathi:admission=slack", {"tpot": 200}),
        ("vllm-v1", {}),
    ],
)
def test_a_policy_that_keeps_other_slos_than_goodput_counts_says_so(policy, told):
    label, built = parse_policy(policy, {})
    for goodput in (("ttft:1000", "tpot:50"), ("ttft:3000", "tpot:200")):
        warnings = prepare(Scenario(workload="sharegpt", goodput=goodput), label, built).warnings
        found = {warning.split(":")[0].split()[1]: warning for warning in warnings if warning.startswith("--goodput")}
        if goodput[0] == "ttft:1000":
            assert found.keys() == told.keys()
            assert all(f"keeps to {told[name]} ms" in found[name] for name in told)
        elif "50" not in policy:
            assert not found


def test_a_value_out_of_range_names_the_file_unless_a_flag_gave_it(tmp_path, capsys):
    path = scenario_file(tmp_path, BASE | {"block-size": -1, "policy": "vllm-recompute"})
    command = ["run", "--scenario", str(path), "--out", str(tmp_path / "out")]
    assert kvtwin.main(command) == 2
    assert capsys.readouterr().err == f"kvtwin: {path}: --block-size: -1 is not greater than 0; give more\n"
    assert kvtwin.main([*command, "--block-size", "-2"]) == 2
    assert capsys.readouterr().err == "kvtwin: --block-size: -2 is not greater than 0; give more\n"


# -- every option ----------------------------------------------------------------------------------------------------


def test_every_option_has_a_flag_and_a_line_of_help(capsys):
    for command in ("run", "compare"):
        with pytest.raises(SystemExit) as caught:
            kvtwin.main([command, "--help", "all"])
        assert caught.value.code == 0
        words = capsys.readouterr().out.replace(",", " ").split()
        flags = {flag(f.name) for owner in (Scenario, Outputs) for f in fields(owner)}
        flags |= {"--scenario", "--policy", "--out", *map(flag, all_policy_options())}
        assert flags - set(words) == set()


OWN_VALUES = {
    "range_ratio": 0.0, "end_rate": 9.0, "burst_factor": 3.0, "burst_period": 20.0, "burst_duration": 2.0,
    "turns": 1.5, "think_time": 2.0, "shared_prefix": 0, "prefix_groups": 3, "max_context": 900, "hash_block_tokens": 8,
    "documents": 2, "document_len": 48, "corpus": 20, "skew": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("workload", OPTIONS)
def test_a_workload_has_its_options_in_run_as_in_the_library(tmp_path, workload):
    own = {name: OWN_VALUES[name] for name in OPTIONS[workload]}
    general = {"num_prompts": 30, "request_rate": 4.0, "seed": 2, "input_len": 40, "output_len": 6}
    asked = {"workload": workload, "gpu": "l20", **general, **own}
    found = run(tmp_path / "flags", {name.replace("_", "-"): value for name, value in asked.items()})
    wanted = list(generate(workload, **general, **own))
    assert found["start_times"] == pytest.approx([request.arrival_s for request in wanted])
    assert found["input_lens"] == [request.prompt_tokens for request in wanted]
    assert {name: found["scenario"][name] for name in own} == own
    again = run(tmp_path / "file", {}, "--scenario", str(scenario_file(tmp_path, asked | {"policy": "vllm-recompute"})))
    assert again == found


@pytest.mark.parametrize("name", ABOUT)
def test_an_option_of_other_workloads_is_refused(name):
    for workload in WORKLOADS.keys() - takers(name):
        with pytest.raises(UserError, match=f"{flag(name)}: 3.* goes with .*--workload {takers(name)[0]}"):
            build_scenario({"workload": workload, name: 3})
    if name != "hash_block_tokens":
        with pytest.raises(UserError, match=f"{flag(name)}: 3.* goes with --workload"):
            build_scenario({"trace": "t.csv", name: 3})
    assert option_type(name) is {f.name: base_type(hint) for f, hint in option_fields(Scenario)}[name]


def other_values(kind):
    """A value that is not the default for each option of a policy, as text."""
    values = {}
    for name, default in ((found.name, found.field.default) for found in options_of(kind)):
        values[name] = str(not default).lower() if isinstance(default, bool) else str(default)
        if isinstance(default, int | float) and not isinstance(default, bool):
            values[name] = str(default + 1 if isinstance(default, int) else default / 2 or 0.5)
    own = {"sglang": {"schedule_policy": "lof"}, "ragcache": {"replacement": "lru"}}
    words = OTHER_WORDS | own.get(kind.name, {})
    return values | {name: value for name, value in words.items() if name in values}


OTHER_WORDS = {
    "scheduling_policy": "priority", "schedule_policy": "fcfs", "balancing_threshold": "2.0", "rejection": "early",
    "decode": "stream", "equations": "paper", "predictor": "none",
}  # fmt: skip
OTHER_WORDS |= {"threads": "512", "layers_per_block": "8", "layer_order": "contiguous", "keeps": "turns"}
OTHER_WORDS |= {"caching": "both", "mechanism": "swap"}
OTHER_WORDS |= {"kv_offloading_size": "1.5", "cpu_chunks": "30", "eviction_policy": "arc"}
OTHER_WORDS |= {"schedule_policy": "fcfs", "load_s_per_block": "0.001", "store_s_per_block": "0.002"}
OTHER_WORDS |= {"tool_kv": "swap", "hicache_write_policy": "write_back"}
OTHER_WORDS |= {"radix_eviction_policy": "lfu", "retraction_policy": "priority"}
OTHER_WORDS |= {"ttft_slo_ms": "900", "tpot_slo_ms": "45"}
OTHER_WORDS["max_lora_rank"] = "32"
OTHER_WORDS |= {"spec_method": "draft_model", "spec_tokens": "2", "spec_model": "llama-2-7b", "acceptance_rate": "0.5"}
OTHER_WORDS |= {"tool_ttl_s": "3.5", "late": "refuse", "replacement": "pgdsf"}
OTHER_WORDS |= {"hicache_storage_prefetch_policy": "best_effort", "hicache_storage_space": "2.5"}
OTHER_WORDS |= {"load_balance_method": "total_tokens", "moe_a2a_backend": "deepep", "deepep_mode": "normal"}
OTHER_WORDS |= {"max_tokens_per_image": "1280", "encoder_tokens_per_s": "5000"}
OTHER_WORDS["mamba_radix_cache_strategy"] = "extra_buffer"
ALONE = {"async_scheduling", "predictor_accuracy", "ignore_eos", "disable_radix_cache", "enable_hierarchical_cache"}
ALONE |= {"prefill_decode_interval", "prefill_decode_interval_min_bs", "scheduler_recv_interval"}
ALONE |= {"synthetic_acceptance_rates", "spec_kv_budget", "hicache_storage_backend", "radix_eviction_policy_config"}
"""Options that go with some others only, and are tested by themselves."""


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_option_is_set_by_its_flag_as_in_place(name):
    options = options_of(kind := POLICIES[name])
    values = {key: value for key, value in other_values(kind).items() if key not in ALONE}
    by_flags = parse_policy(name, {own.full_name: values[own.name] for own in options if own.name in values})[1]
    words = ",".join(f"{key.replace('_', '-')}={value}" for key, value in values.items())
    assert by_flags == parse_policy(f"{name}:{words}" if words else name, {})[1]
    plain = parse_policy(name, {})[1]
    assert {own.name for own in options if getattr(by_flags, own.name) == getattr(plain, own.name)} <= ALONE


@dataclass(frozen=True)
class Swap(VllmRecompute):
    """A preset whose option's flag is another's: `--vllm-swap-first` is `first` of vllm-swap as well."""

    name: ClassVar[str] = "vllm"
    swap_first: bool = option(False, "collides")


@dataclass(frozen=True)
class SwapToo(VllmRecompute):
    """The other one."""

    name: ClassVar[str] = "vllm-swap"
    first: bool = option(False, "collides")


@pytest.fixture
def only(request) -> Callable[[dict[str, str]], None]:
    """Makes these the policies that are known; afterwards they are those of before, in their order."""
    before = dict(systems._PLACES)

    def become(places: dict[str, str]) -> None:
        systems._PLACES.clear()
        systems._PLACES.update(places)

    request.addfinalizer(lambda: become(before))
    return become


def test_options_of_two_policies_with_one_flag_are_refused(only):
    only({"vllm": f"{__name__}:Swap", "vllm-swap": f"{__name__}:SwapToo"})
    with pytest.raises(UserError, match=r"--vllm-swap-first: an option of vllm and vllm-swap alike"):
        all_policy_options()
    with pytest.raises(UserError, match="vllm and vllm-swap alike"):
        owned_option("vllm_swap_first")


def test_a_name_is_registered_once(request):
    request.addfinalizer(lambda: systems._PLACES.pop("mine"))
    systems.register("mine", f"{__name__}:Swap")
    assert policy_named("mine") is Swap
    with pytest.raises(UserError, match=r"policy 'layerkv' is .* already"):
        systems.register("layerkv", f"{__name__}:Swap")


def test_only_the_policies_that_are_named_are_imported(tmp_path):
    code = (
        "import sys, kvtwin; kvtwin.main(sys.argv[1:]); print([m for m in sys.modules if m.startswith('sim.systems.')])"
    )
    words = ["run", "--workload", "fixed", "--num-prompts", "2", "--input-len", "8", "--output-len", "2", "--quiet"]
    words += ["--policy", "sarathi", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert "sim.systems.sarathi" in done.stdout
    assert not any(f"sim.systems.{name}'" in done.stdout for name in ("layerkv", "orca", "fastserve", "vllm055"))


def test_an_option_in_place_wins_over_its_flag():
    label, policy = parse_policy("layerkv:tpot-slo-ms=50", {"layerkv_tpot_slo_ms": "80", "layerkv_decode": "stream"})
    assert label == "layerkv:tpot-slo-ms=50"
    assert (policy.tpot_slo_ms, policy.decode) == (50.0, "stream")


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("9007199254740993", int, 9007199254740993),
        ("1e3", int, 1000),
        (2.0, int, 2),
        (str(-(2**63)), int | None, -(2**63)),
        ("inf", float, float("inf")),
        ("3", float | None, 3.0),
        ("Yes", bool, True),
        ("0", bool, False),
        ("a b", tuple[str, ...], ("a", "b")),
    ],
)
def test_values_are_read_as_written(text, hint, value):
    found = convert("--x", text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("text", "hint"), [(str(2**63), int), ("1e400", int), ("0.5", int), ("", float), (None, str)])
def test_values_that_do_not_fit_their_type_are_refused(text, hint):
    with pytest.raises(UserError, match=r"^--x: .* is not "):
        convert("--x", text, hint)


# -- what the options do ---------------------------------------------------------------------------------------------


def test_limits_are_those_of_vllm(tmp_path):
    def limits(**options):
        scenario = run(tmp_path / "out", BASE | {key.replace("_", "-"): value for key, value in options.items()})[
            "scenario"
        ]
        return scenario["max_model_len"], scenario["max_num_batched_tokens"]

    assert limits() == (4096, 4096)
    assert limits(max_model_len=1000) == (1000, 2048)
    assert limits(enable_chunked_prefill=True) == (4096, 512)
    assert limits(enable_chunked_prefill=True, max_num_batched_tokens=300) == (4096, 300)


def test_pools_are_those_given(tmp_path):
    options = {"num-gpu-blocks-override": 77, "num-cpu-blocks-override": 5, "block-size": 8}
    scenario = run(tmp_path / "out", BASE | options)["scenario"]
    assert (scenario["num_gpu_blocks"], scenario["num_cpu_blocks"]) == (77, 5)
    # 8 tokens x 32 layers x K and V x 4096 x 2 bytes.
    assert scenario["block_bytes"] == 8 * 32 * 2 * 4096 * 2
    # --swap-space is GiB per GPU: 1 GiB holds 2**30 / 4 MiB blocks.
    assert run(tmp_path / "out", BASE | {"swap-space": 1, "block-size": 8})["scenario"]["num_cpu_blocks"] == 256


def test_arrivals_are_scaled_taken_and_replaced(tmp_path):
    path = trace(tmp_path, *((i * 1.0, 10, 2) for i in range(6)))

    def starts(**options):
        return run(tmp_path / "out", {"trace": path} | options)["start_times"]

    assert starts() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert starts(**{"rate-scale": 4, "num-prompts": 3}) == [0.0, 0.25, 0.5]
    random = starts(**{"request-rate": 100})
    assert random[0] == 0.0 and 0.0 < random[-1] < 1.0
    assert starts(**{"request-rate": 100, "rate-scale": 2}) == pytest.approx([start / 2 for start in random])
    assert starts(**{"request-rate": 100, "seed": 1}) != random


@pytest.mark.parametrize(("length", "flags", "chunked", "budget"), [
    (32768, [], False, 32768), (40000, [], True, 512), (40000, ["--no-enable-chunked-prefill"], False, 40000),
])  # fmt: skip
def test_long_contexts_turn_chunked_prefill_on_as_in_vllm(tmp_path, capsys, length, flags, chunked, budget):
    command = ["run", "--workload", "fixed", "--num-prompts", "2", "--model", "llama-3.1-8b", "--out", str(tmp_path)]
    command += ["--max-model-len", str(length), "--policy", "vllm-recompute", "--quiet", *flags]
    assert kvtwin.main(command) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["scenario"]["enable_chunked_prefill"] is chunked
    assert result["scenario"]["max_num_batched_tokens"] == budget
    assert ("chunked prefill is on" in capsys.readouterr().err) is (chunked and not flags)


# -- vLLM's names ----------------------------------------------------------------------------------------------------


def refusal(capsys, tmp_path, *words):
    assert kvtwin.main(["run", *words_of(BASE), *words, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    return capsys.readouterr().err


def test_options_may_be_called_as_vllm_calls_them(tmp_path, capsys):
    file = scenario_file(tmp_path, BASE | {"tensor-parallel-size": 2})
    for i, said in enumerate((["--tp", "2"], ["--tensor-parallel-size", "2"])):
        assert run(tmp_path / str(i), BASE, *said)["scenario"]["tp"] == 2
    assert run(tmp_path / "file", {}, "--scenario", str(file))["scenario"]["tp"] == 2
    both = scenario_file(tmp_path, BASE | {"tensor-parallel-size": 2, "tp": 2})
    assert "key 'tp' stands twice, in two spellings" in refusal(capsys, tmp_path, "--scenario", str(both))
    assert "--tp: 0 is not greater than 0" in refusal(capsys, tmp_path, "--tensor-parallel-size", "0")


def test_nvfp4_has_four_and_a_half_bits_a_weight_and_a_rate_of_its_own(tmp_path):
    """The head keeps 16 bits. Of an H100, which has no such products, the run says that it does not know them."""
    model = BASE | {"model": "llama-3.1-8b", "gpu": "b200"}
    runs = [run(tmp_path / kind, model | {"quantization": kind}) for kind in ("fp8", "modelopt_fp4")]
    assert runs[1]["scenario"]["quantization"] == "modelopt_fp4"
    assert runs[1]["mean_tpot_ms"] < runs[0]["mean_tpot_ms"]
    plain = load_model("llama-3.1-8b")
    saved = plain.weight_bytes() - plain.with_quantization("nvfp4").weight_bytes()
    assert saved == plain.linear_weight_bytes * (1 - 4.5 / 16)
    old = run(tmp_path / "h100", model | {"gpu": "h100", "quantization": "modelopt_fp4"})
    assert any("NVFP4 products are priced at the rate of 16 bits" in warning for warning in old["warnings"])


def test_quantization_halves_the_weights_of_projections_and_nothing_else(tmp_path, capsys):
    plain, fp8 = (load_model("llama-3.1-8b"), load_model("llama-3.1-8b").with_quantization("fp8"))
    assert fp8.linear_weight_bytes == plain.linear_weight_bytes / 2
    assert fp8.head_weight_bytes == plain.head_weight_bytes
    assert plain.weight_bytes() - fp8.weight_bytes() == plain.linear_weight_bytes / 2
    assert fp8.with_quantization("fp8") == fp8
    runs = [
        run(tmp_path / str(bool(more)), BASE | {"model": "llama-3.1-8b"} | more)
        for more in ({}, {"quantization": "fp8"})
    ]
    assert runs[1]["scenario"]["quantization"] == "fp8"
    assert "quantization" not in runs[0]["scenario"]
    assert runs[1]["scenario"]["num_gpu_blocks"] > runs[0]["scenario"]["num_gpu_blocks"]
    assert runs[1]["mean_tpot_ms"] < runs[0]["mean_tpot_ms"]
    with pytest.raises(UserError, match=r"--quantization fp8: llama-3.1-8b has weights of 0.5 bytes already"):
        msgspec.structs.replace(plain, mlp_dtype_bytes=0.5).with_quantization("fp8")


def test_two_spellings_of_one_option_are_refused(tmp_path, capsys):
    """The last would count silently."""
    words = ["run", "--workload", "fixed", "--tp", "1", "--tensor-parallel-size", "2", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        kvtwin.main(words)
    assert "--tp and --tensor-parallel-size are one option; keep one" in capsys.readouterr().err


def test_the_model_and_the_gpu_that_were_taken_are_told(tmp_path, capsys):
    words = ["run", "--workload", "fixed", "--num-prompts", "2", "--request-rate", "1", "--no-figures", "--out"]
    assert kvtwin.main([*words, str(tmp_path / "out")]) == 0
    assert "taken, as not given: --model llama-2-7b, --gpu a100-80g" in capsys.readouterr().err
    for more in (["--model", "llama-2-7b", "--gpu", "a100-80g"], ["--quiet"]):
        assert kvtwin.main([*words, str(tmp_path / "other"), *more]) == 0
        assert "taken" not in capsys.readouterr().err

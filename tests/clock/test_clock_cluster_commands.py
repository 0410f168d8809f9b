"""`kvtwin run` and `compare` over several engines: what their files say, and what is refused."""

import csv
import gzip
import json
from dataclasses import replace

import pytest

import kvtwin
from sim.files import CsvTable
from sim.options.scenario import Scenario
from sim.results import result as result_module
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.systems.distserve import DistServe
from sim.topology import ROUTERS

WORKLOAD = ["--workload", "sharegpt", "--num-prompts", "60", "--request-rate", "20", "--seed", "3", "--gpu", "l20"]


@pytest.fixture(autouse=True)
def plain_tables(monkeypatch):
    """CSV, whether pyarrow is installed or not."""
    monkeypatch.setattr("sim.run.files.ParquetTable", CsvTable)
    monkeypatch.setattr("sim.run.files.TABLE_FILES", ("requests.csv", "requests.csv"))


def run(out, *words, policy="vllm-recompute", command="run"):
    return kvtwin.main([command, "--policy", policy, "--out", str(out), "--quiet", *WORKLOAD, *words])


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_series_timelines_and_results_say_which_engine(tmp_path):
    assert run(tmp_path, "--replicas", "3", "--timeline", "--figures") == 0
    table = rows(tmp_path / "requests.csv")
    assert list(table[0]) == [*TABLE_COLUMNS, "engine"]
    assert {row["request_id"]: row["engine"] for row in table} == {str(i): str(i % 3) for i in range(60)}
    found = result_module.read_result(tmp_path / "result.json")
    assert found.engines is not result_module.UNSET
    assert [(use.engine, use.num_prompts) for use in found.engines] == [(0, 20), (1, 20), (2, 20)]
    assert found.num_iterations == sum(use.num_iterations for use in found.engines)
    mean_s = sum(use.lanes.compute.busy_s for use in found.engines) / 3
    assert found.lanes.compute.busy_s == pytest.approx(mean_s)
    series = rows(tmp_path / "series.csv")
    assert {row["engine"] for row in series} == {"0", "1", "2"}
    times = [float(row["time_s"]) for row in series]
    assert times == sorted(times)
    events = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2, 3}
    assert (tmp_path / "figures" / "engines.png").exists()


def test_short_prompts_are_prefilled_where_they_decode(tmp_path):
    pools = ["--prefill-replicas", "1", "--decode-replicas", "2", "--link-gbps", "100"]
    assert run(tmp_path, *pools, policy="vllm-v1:stage=nixl,local-prefill-tokens=100") == 0
    long = sum(int(row["prompt_tokens"]) > 100 for row in rows(tmp_path / "requests.csv"))
    found = result_module.read_result(tmp_path / "result.json")
    assert found.engines is not result_module.UNSET
    assert 0 < long < 60
    assert [use.num_prompts for use in found.engines] == [long, *[use.num_prompts for use in found.engines[1:]]]
    assert sum(use.num_prompts for use in found.engines) == 60 + long


def test_one_replica_leaves_the_files_of_one_engine(tmp_path):
    assert run(tmp_path / "one", "--timeline") == 0
    assert run(tmp_path / "same", "--replicas", "1", "--timeline") == 0
    for name in ("requests.csv", "series.csv", "timeline.json.gz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert "replicas" not in json.loads((tmp_path / "one" / "result.json").read_text())["scenario"]


# -- pools -----------------------------------------------------------------------------------------------------------

POOLS = ["--prefill-replicas", "2", "--decode-replicas", "1", "--link-gbps", "200"]


def test_tables_and_results_say_what_prefilled_and_what_decoded(tmp_path):
    words = [*POOLS, "--prefill-tp", "2", "--decode-gpu", "a100-80g", "--timeline"]
    assert run(tmp_path, *words, policy="distserve") == 0
    table = rows(tmp_path / "requests.csv")
    assert list(table[0]) == [*TABLE_COLUMNS, *ENGINE_COLUMNS]
    assert {row["engine"] for row in table if int(row["output_tokens"]) > 1} == {"2"}
    assert {row["prefill_engine"] for row in table} == {"0", "1"}
    found = result_module.read_result(tmp_path / "result.json")
    assert found.engines is not result_module.UNSET
    assert [(use.role, use.gpu, use.tp) for use in found.engines] == [
        ("prefill", "l20", 2), ("prefill", "l20", 2), ("decode", "a100-80g", 1),
    ]  # fmt: skip
    assert [list(use.links) for use in found.engines if use.links] == [["link out"], ["link out"], ["link in"]]
    # 200 Gbit/s are 25 GB/s; a block of 16 tokens of Llama-2-7B is 16 x 512 KiB over all GPUs of an engine.
    seconds = found.counters.policy["handed_over_blocks"] * 16 * 524_288 / 25e9
    assert found.engines[2].links["link in"].busy_s == pytest.approx(seconds)
    events = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"link in", "link out"} <= names


def test_requests_that_are_turned_away_count_as_ignored_and_against_attainment(tmp_path):
    words = [*POOLS, "--goodput", "ttft:30", "tpot:200"]
    words += ["--mooncake-rejection", "early", "--mooncake-ttft-slo-ms", "30"]
    assert run(tmp_path, *words, policy="mooncake") == 0
    found = result_module.read_result(tmp_path / "result.json")
    reason = "rejected: its first token would come too late"
    assert 0 < found.ignored < 60
    assert found.completed + found.ignored == 60
    assert any(reason in warning for warning in found.warnings)
    assert found.goodput_attainment is not result_module.UNSET
    assert found.goodput_attainment <= found.completed / 60


def test_a_pipeline_is_as_many_virtual_engines_with_a_share_of_the_blocks_each(tmp_path):
    found = {}
    for stages in (1, 2):
        assert run(tmp_path, "--pipeline-parallel-size", str(stages)) == 0
        found[stages] = result_module.read_result(tmp_path / "result.json")
    one, two = found[1], found[2]
    assert two.scenario.pipeline_parallel_size == 2
    assert two.engines is not result_module.UNSET
    assert [(use.tp, use.num_prompts) for use in two.engines] == [(1, 31), (1, 29)]
    # Half of the weights (of 13.5 GB), of 32 layers' graphs and of every block on each GPU; each batch has half of the
    # blocks.
    assert two.scenario.block_bytes == one.scenario.block_bytes / 2
    more = 2 * two.scenario.num_gpu_blocks * two.scenario.block_bytes
    more -= one.scenario.num_gpu_blocks * one.scenario.block_bytes
    assert more == pytest.approx((13.5e9 + 32 * 24e6) / 2, rel=0.01)
    assert two.engines[0].lanes.compute.busy_s == pytest.approx(two.engines[1].lanes.compute.busy_s)


@pytest.mark.parametrize(("policy", "words"), [("vllm-recompute", ["--replicas", "3"]), ("distserve", POOLS)])
def test_gaps_between_tokens_are_those_of_all_engines(tmp_path, policy, words):
    assert run(tmp_path, *words, "--save-detailed", "--num-gpu-blocks-override", "150", policy=policy) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert [len(gaps) + 1 for gaps in found["itls"]] == found["output_lens"]
    for gaps, ttft, latency in zip(found["itls"], found["ttfts"], found["latencies"], strict=True):
        assert ttft + sum(gaps) == pytest.approx(latency)
    gaps = [gap * 1e3 for one in found["itls"] for gap in one]
    assert found["mean_itl_ms"] == pytest.approx(sum(gaps) / len(gaps))


def test_prompts_that_decode_engines_can_never_hold_are_ignored_and_nothing_is_kept_of_those_that_ended():
    scenario = Scenario(
        workload="uniform", num_prompts=40, request_rate=20.0, input_len=200, output_len=30, gpu="l20", seed=2,
        max_model_len=1024, prefill_replicas=2, decode_replicas=2, link_gbps=10.0,
    )  # fmt: skip
    setup = prepare(scenario, "distserve", DistServe())
    assert setup.decode is not None
    few = replace(setup.decode, limits=replace(setup.decode.limits, num_gpu_blocks=14))
    finished = execute(build_run(replace(setup, decode=few), traffic(scenario)))
    assert finished.log.ended == 40
    assert finished.log.ignored > 0 < finished.log.completed
    assert all(not parts.prefilled_by for parts in finished.engines)
    found = result_module.assemble(finished)
    assert found.engines is not result_module.UNSET
    assert sum(use.num_prompts for use in found.engines if use.role == "prefill") == 40
    assert sum(use.num_prompts for use in found.engines if use.role == "decode") == 40


@pytest.mark.parametrize(("router", "made"), [("round-robin", [7]), (None, [])])
def test_what_prefills_is_chosen_by_the_router_that_is_named(monkeypatch, router, made):
    """Else by the policy's own."""
    seeds, real = [], ROUTERS["round-robin"]

    def named(seed):
        seeds.append(seed)
        return real(seed)

    monkeypatch.setitem(ROUTERS, "round-robin", named)
    pools = {"prefill_replicas": 2, "decode_replicas": 1, "link_gbps": 100.0, "router": router, "seed": 7}
    setup = prepare(Scenario(workload="fixed", num_prompts=4, request_rate=0.01, **pools), "distserve", DistServe())
    run = execute(build_run(setup, traffic(setup.scenario)))
    assert seeds == made and run.log.completed == 4
    # One at a time: in turn, or to the first of two that are idle.
    used = [instance.iterations > 0 for instance in run.instances]
    assert used == [True, router is not None, True]

"""The printed reports and the comparison's files: exact texts and numbers from small hand-made results."""

import json

import pytest
from msgspec import structs
from small_results import counts, lanes, small_result

from sim.results.comparison import Cell, comparison_lines, table, write_comparison
from sim.results.comparison_sentences import sentences
from sim.results.load import mean_decoding
from sim.results.report import ATTAINED, metric_values, run_lines
from sim.results.sections import SLOClass, TierUse


def result_of(policy="vllm-recompute", **changes):
    figures = {
        "duration": 100.0, "completed": 200, "ignored": 1, "request_throughput": 2.0, "output_throughput": 400.0,
        "total_token_throughput": 1400.0, "request_goodput": 1.5, "goodput_attainment": 0.75, "num_preemptions": 40,
        "makespan_s": 101.0, "lanes": lanes(compute=50.5),
    }  # fmt: skip
    for name, mean in (("ttft", 5100.0), ("queue", 4800.0), ("tpot", 41.0), ("itl", 40.0), ("e2el", 15_100.0)):
        figures |= {f"mean_{name}_ms": mean, f"median_{name}_ms": mean / 2, f"p99_{name}_ms": mean * 3}
    return small_result(policy=policy, **(figures | changes))


def layerkv(policy="layerkv", **changes):
    changed = {
        "mean_ttft_ms": 408.0, "p99_ttft_ms": 1000.0, "mean_queue_ms": 102.0, "mean_tpot_ms": 82.0,
        "p99_tpot_ms": 200.0, "mean_e2el_ms": 20_408.0, "num_preemptions": 0, "counters": counts(parked=120),
        "goodput_attainment": 0.9,
    }  # fmt: skip
    return result_of(policy, **(changed | changes))


def host_blocks(folder, **changes):
    (line,) = (line for line in run_lines(result_of(**changes), folder) if line.startswith("Host KV blocks"))
    return line.partition(":")[2].strip()


def test_host_blocks_are_those_of_the_tier_that_keeps_prefixes_if_there_is_one(tmp_path):
    """10,240 offloaded blocks in place of a swap space of 512 that is not used; a disk below is neither."""
    given = {"hit_tokens": 0, "num_loads": 0, "stored_blocks": 0, "evicted_blocks": 0, "saved_s": 0.0, "lost_s": 0.0}
    disk, host = TierUse(tier="disk", num_blocks=99, **given), TierUse(tier="host", num_blocks=10_240, **given)
    assert host_blocks(tmp_path) == host_blocks(tmp_path, tiers=[disk]) == "512 (4.0 GiB per GPU)"
    both = {"tiers": [disk, host]}
    assert host_blocks(tmp_path, **both) == "10,240 (80.0 GiB per GPU)"
    assert [metric_values(result_of(**of))["host_memory_gib"] for of in ({}, both)] == [4.0, 80.0]


def test_the_share_of_prompts_that_was_cached_is_told_where_prefixes_are(tmp_path):
    """90 of 360 tokens; what preempted sequences hit when they came back is no prompt's."""
    hit = structs.replace(counts(), prefix_query_tokens=360, prefix_hit_tokens=90, prefix_rehit_tokens=500)
    cached, none = result_of("vllm-v1", counters=hit), result_of("vllm-v1")
    assert "Prompt tokens hit:                90 (25.0 %)" in run_lines(cached, tmp_path)
    assert not [line for line in run_lines(none, tmp_path) if line.startswith("Prompt tokens hit")]
    assert [metric_values(one)["prefix_hit_percent"] for one in (cached, none)] == [25.0, None]


def test_no_factor_stands_beside_what_prints_as_nothing():
    """0.04 % printed as 0.0: 5.0 is no 125 times that."""
    base = result_of(goodput_attainment=0.0004)
    (row,) = (row for row in table([base, layerkv(goodput_attainment=0.05)]) if row.name.startswith("SLOs met"))
    assert [(cell.value, cell.ratio) for cell in row.cells] == [("0.0", ""), ("5.0", "")]


def test_each_class_of_slos_has_its_row(tmp_path):
    """Beneath all of them, with what is best of it; a policy whose result tells of none has nothing there."""
    rest = SLOClass(slos="--goodput", num_prompts=160, good=80)
    tight = SLOClass(slos="ttft:500 tpot:50", num_prompts=40, good=10)
    runs = [
        result_of(slo_classes=[rest, tight]),
        layerkv(slo_classes=[structs.replace(rest, good=160), structs.replace(tight, good=5)]),
        layerkv("vllm-swap"),
    ]
    named = {row.name: row.cells for row in table(runs) if row.key == ATTAINED}
    assert [*named] == ["SLOs met (% of requests)", "SLOs met: --goodput (%)", "SLOs met: ttft:500 tpot:50 (%)"]
    assert named["SLOs met: --goodput (%)"] == [
        Cell("50.0", "", best=False), Cell("100.0", "(2.00x)", best=True), Cell("-", "", best=False)
    ]  # fmt: skip
    assert [cell.best for cell in named["SLOs met: ttft:500 tpot:50 (%)"]] == [True, False, False]
    assert any(line.startswith("SLOs met: ttft:500 tpot:50 (%)") for line in comparison_lines(runs, tmp_path))


def empty(policy="vllm-recompute"):
    """A run of which no request completed."""
    return small_result(policy=policy)


def test_run_is_summed_up_in_80_columns(tmp_path):
    (tmp_path / "requests.csv").touch()
    lines = run_lines(result_of(), tmp_path)
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["Constants"] == "l20-derived (derived, not measured)"
    assert rows["Requests completed"] == "200"
    assert rows["Requests ignored"] == "1"
    assert rows["Output tokens (1/s)"] == "400.0"
    assert rows["Goodput (requests/s)"] == "1.500 (75.0 % of requests meet their SLOs)"
    assert rows["SLOs (ms)"] == "ttft:3000 tpot:200"
    assert rows["Queueing's share of mean TTFT"] == "94.1 %"
    assert rows["GPU KV blocks"] == "3,467 (27.1 GiB per GPU)"
    assert rows["Host KV blocks"] == "512 (4.0 GiB per GPU)"
    assert rows["Preemptions"] == "40"
    assert rows["GPU compute busy"] == "50.0 % of the time"
    assert rows["Results"] == str(tmp_path / "result.json")
    assert rows["Beside it"] == "requests.csv"
    assert "Time to first token            5,100.00     2,550.00    15,300.00" in lines
    assert max(len(line) for line in lines if not line.startswith("Results")) <= 80
    assert all(line.isascii() for line in lines if not line.startswith("Results"))


def test_requests_past_their_first_token_follow_littles_law():
    # 200 requests in 100 s that stay 15.1 - 5.1 = 10 s each: 20 at a time.
    assert mean_decoding(result_of()) == pytest.approx(20.0)
    assert metric_values(result_of())["queue_share_percent"] == pytest.approx(4800 / 51)
    assert mean_decoding(empty()) is None


def test_comparison_shows_ratios_to_the_first_and_stars_the_best(tmp_path):
    lines = [" ".join(line.split()) for line in comparison_lines([result_of(), layerkv()], tmp_path)]
    assert lines[1] == "constants: l20-derived (derived, not measured)"
    assert "vllm-recompute layerkv" in lines
    assert "Mean TTFT (ms) 5,100.0 408.0 (0.08x) *" in lines
    assert "Mean TPOT (ms) 41.0 * 82.0 (2.00x)" in lines
    assert "Preemptions 40 0 (0x) *" in lines
    assert "Requests completed 200 200 (1.00x)" in lines  # equal: no star
    assert "SLOs met (% of requests) 75.0 90.0 (1.20x) *" in lines


def test_what_is_the_same_within_one_percent_is_no_winner():
    """A tie at the top is starred together; where all are the same no policy is."""
    runs = [result_of(), layerkv(mean_tpot_ms=41.3), layerkv("layerkv:slo-aware=false", mean_tpot_ms=82.0)]
    (row,) = [row for row in table(runs) if row.key == "mean_tpot_ms"]
    assert [cell.best for cell in row.cells] == [True, True, False]
    (row,) = [row for row in table(runs[:2]) if row.key == "mean_tpot_ms"]
    assert not any(cell.best for cell in row.cells)


@pytest.mark.parametrize("count", [1, 6])
def test_comparison_of_many_policies_keeps_to_80_columns(count):
    names = ["layerkv:slo_aware=false,drop_irrecoverable=false,horizon_steps=16", "vllm-swap", "layerkv"]
    results = [result_of(), *(layerkv(f"{names[i % 3]}{i}") for i in range(count - 1))]
    lines = comparison_lines(results, "out")
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("Mean TTFT (ms)") for line in lines) >= count // 3
    assert not any("None" in line or "nan" in line for line in lines)


def test_sentences_say_what_differs_and_by_how_much():
    assert sentences([result_of(), layerkv()]) == [
        "With layerkv instead of vllm-recompute, mean TTFT falls from 5.1 s to 408 ms (0.08x): requests wait 102 ms in "
        "the queue on average (25 % of TTFT) instead of 4.8 s (94.1 %). "
        "Queueing falls by 4.7 s, prefill rises by 6 ms. "
        "Mean TPOT rises from 41 ms to 82 ms (2.00x), with 40 instead of 20 requests past their first token at a time. "
        "After a prefill a request had to wait for room for all its layers on the GPU 120 times, part of its TPOT. "
        "Preemptions: 0 instead of 40. End to end a request takes 20.4 s instead of 15.1 s on average. "
        "The SLOs are met by 90 % of the requests, instead of 75 %."
    ]


def test_comparison_files_hold_metrics_ratios_and_links(tmp_path):
    path = write_comparison(tmp_path / "new", [result_of(), layerkv(mean_itl_ms=None)])
    assert path == tmp_path / "new" / "comparison.md"
    assert sorted(p.name for p in path.parent.iterdir()) == ["comparison.json", "comparison.md"]
    data = json.loads((path.parent / "comparison.json").read_text())
    assert data["baseline"] == "vllm-recompute"
    assert data["policies"] == ["vllm-recompute", "layerkv"]
    assert data["metrics"]["layerkv"]["mean_ttft_ms"] == 408.0
    assert data["ratios_to_baseline"]["layerkv"]["mean_ttft_ms"] == pytest.approx(0.08)
    assert data["ratios_to_baseline"]["layerkv"]["mean_itl_ms"] is None
    assert data["profiles"]["layerkv"]["status"] == "derived"
    page = path.read_text()
    assert "| | `vllm-recompute` | `layerkv` |" in page
    assert "| Mean TTFT (ms) | 5,100.0 | **408.0 (0.08x)** |" in page
    assert "| Mean ITL (ms) | 40.0 | - |" in page
    for name in ("ttft_tpot", "queueing", "memory", "lanes"):
        assert f"(figures/{name}.png)" in page
    assert "- `layerkv`: l20-derived (derived, not measured), sha256 `0123456789ab`" in page
    assert sentences([result_of(), layerkv(mean_itl_ms=None)])[0] in page


def test_comparison_of_nothing_is_still_a_page(tmp_path):
    assert "No policy was run." in write_comparison(tmp_path, []).read_text()
    assert comparison_lines([], tmp_path) == ["no policy was run"]


def test_columns_of_large_numbers_do_not_merge(tmp_path):
    huge = {f"{s}_{name}_ms": 12_345_678.9 for s in ("mean", "median", "p99") for name in ("ttft", "e2el")}
    lines = run_lines(result_of(**huge), tmp_path)
    assert next(line for line in lines if line.startswith("End to end")).split()[3:] == ["12,345,678.90"] * 3
    assert max(len(line) for line in lines if not line.startswith("Results")) <= 80
    rows = [line.split() for line in comparison_lines([result_of(**huge), layerkv(**huge)], tmp_path)]
    assert ["Mean", "E2EL", "(ms)", "12,345,678.9", "12,345,678.9", "(1.00x)"] in rows

"""result.json and the files beside it: vLLM's names, statistics recomputed from the arrays, exact times by hand."""

import csv
import errno
import gzip
import io
import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from small_results import flags

import kvtwin
from sim.engine.sequence import Sequence
from sim.files import CsvTable, InOrder, ParquetTable
from sim.results import metrics
from sim.results.series import COLUMNS
from sim.run.files import RowsAtOnce
from traces.request import Request

POLICIES = ["vllm-recompute", "vllm-swap", "layerkv"]
# p0 + p1 tokens + p2 squares; d0 + d1 batch + d2 context: every time below is worked out from these.
LINEAR = {"form": "linear", "prefill": [0.01, 1e-4, 1e-6], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}
TTFT_MS, TPOT_MS, E2EL_MS = 3000.0, 75.0, 6000.0
TOO_LONG = 17


def refuse(text):
    raise AssertionError(f"{text} is not JSON")


def read_result(folder):
    return json.loads((folder / "result.json").read_text(), parse_constant=refuse)


def read_table(folder):
    """Rows as dicts, numbers as floats, from whichever table there is."""
    if (folder / "requests.parquet").exists():
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(folder / "requests.parquet").to_pylist()
    with (folder / "requests.csv").open(newline="") as file:
        return [{k: v if k == "status" else float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def write_inputs(folder, rows):
    lines = ["arrival_s,prompt_tokens,output_tokens", *(",".join(map(str, row)) for row in rows)]
    (folder / "trace.csv").write_text("\n".join(lines) + "\n")
    (folder / "linear.json").write_text(json.dumps(LINEAR))
    return ["--trace", str(folder / "trace.csv"), "--profile", str(folder / "linear.json")]


def simulate(folder, rows, *words, policy="vllm-recompute", out="out"):
    inputs = write_inputs(folder, rows)
    assert kvtwin.main(["run", *inputs, "--policy", policy, "--out", str(folder / out), "--quiet", *words]) == 0
    return read_result(folder / out)


def crowded():
    """60 requests for a pool that holds about five of them; every tenth has one token, one can never fit."""
    rows = [(i * 0.05, 20 + i * 37 % 200, 1 if i % 10 == 0 else 2 + i * 7 % 40) for i in range(60)]
    rows[TOO_LONG] = (rows[TOO_LONG][0], 3000, 5)
    return rows


CROWDED = flags(
    num_gpu_blocks_override=60, num_cpu_blocks_override=40, save_detailed=True, timeline=True,
    goodput=(f"ttft:{TTFT_MS:g}", f"tpot:{TPOT_MS:g}", f"e2el:{E2EL_MS:g}"),
)  # fmt: skip


@pytest.fixture(scope="module", params=POLICIES)
def crowd(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return simulate(folder, crowded(), *CROWDED, policy=request.param), folder / "out"


def completed(result):
    """ttft, latency and output length of the requests without an error, as arrays."""
    done = np.array([not error for error in result["errors"]])
    return [np.array(result[name])[done] for name in ("ttfts", "latencies", "output_lens")]


# -- statistics recomputed -------------------------------------------------------------------------------------------


def test_the_names_of_vllm_bench_serve_are_there(crowd):
    result, _ = crowd
    names = {"backend", "model_id", "num_prompts", "request_rate", "duration", "completed", "total_input_tokens"}
    names |= {"total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput"}
    names |= {"request_goodput", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"}
    names |= {"queue_times", "errors", "failed", "max_output_tokens_per_s", "max_concurrent_requests"}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        names |= {f"{statistic}_{metric}_ms" for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")}
    assert names <= set(result)
    assert result["complete"] is True


def test_every_statistic_follows_from_the_arrays(crowd):
    result, _ = crowd
    ttft, latency, output = completed(result)
    several = output > 1
    assert 0 < np.sum(~several) < len(output)
    pooled = {
        "ttft": ttft,
        "tpot": (latency - ttft)[several] / (output[several] - 1),
        "itl": np.concatenate([gaps for gaps in result["itls"] if gaps]),
        "e2el": latency,
    }
    for name, values in pooled.items():
        wanted = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
        wanted |= {f"p{p}": np.percentile(values, p) for p in (50, 90, 95, 99)}
        for statistic, value in wanted.items():
            assert result[f"{statistic}_{name}_ms"] == pytest.approx(value * 1e3, rel=1e-7), (statistic, name)
    done = [queue for queue, error in zip(result["queue_times"], result["errors"], strict=True) if not error]
    assert result["mean_queue_ms"] == pytest.approx(np.mean(done) * 1e3, rel=1e-6)
    assert result["p99_queue_ms"] == pytest.approx(np.percentile(done, 99) * 1e3, rel=1e-6)


def test_throughputs_count_from_the_first_arrival_to_the_last_token(crowd):
    result, _ = crowd
    starts, latencies = np.array(result["start_times"]), np.array(result["latencies"])
    seconds = np.max(starts + latencies) - starts[0]
    _, _, output = completed(result)
    prompts = sum(n for n, error in zip(result["input_lens"], result["errors"], strict=True) if not error)
    assert result["duration"] == pytest.approx(seconds, rel=1e-12)
    assert result["makespan_s"] == pytest.approx(np.max(starts + latencies), rel=1e-12)
    assert result["completed"] == len(output) == 59
    assert result["total_output_tokens"] == output.sum()
    assert result["total_input_tokens"] == prompts
    assert result["request_throughput"] == pytest.approx(59 / seconds)
    assert result["output_throughput"] == pytest.approx(output.sum() / seconds)
    assert result["total_token_throughput"] == pytest.approx((output.sum() + prompts) / seconds)


def test_peaks_are_those_that_the_arrays_show(crowd):
    result, _ = crowd
    ttft, latency, _ = completed(result)
    done = np.array([not error for error in result["errors"]])
    starts = np.array(result["start_times"])[done]
    in_flight = [int(np.sum((starts <= start) & (start < starts + latency))) for start in starts]
    assert result["max_concurrent_requests"] == max(in_flight) > 1
    gaps = [gaps for gaps, is_done in zip(result["itls"], done, strict=True) if is_done]
    times = [start + first + np.cumsum([0.0, *own]) for start, first, own in zip(starts, ttft, gaps, strict=True)]
    seconds = np.floor(np.concatenate(times) - starts.min()).astype(int)
    assert result["max_output_tokens_per_s"] == np.bincount(seconds).max() > 1
    assert result["failed"] == result["ignored"] == np.sum(~done) == 1


def log_of(*e2els_s):
    log = metrics.RequestLog()
    for arrival_s, e2el_s in enumerate(e2els_s):
        seq = Sequence(Request(arrival_s, float(arrival_s), 1, 1))
        seq.num_generated, seq.first_scheduled_s, seq.first_token_s = arrival_s % 3 + 1, arrival_s, arrival_s
        seq.finish_s = arrival_s + e2el_s
        log.end(seq)
    return log


@pytest.mark.parametrize(("room_bytes", "num_packed"), [(sys.maxsize, 0), (3 * 32, 16), (3 * 32 + 5, 16)])
def test_a_log_that_spills_has_the_same_statistics(monkeypatch, room_bytes, num_packed):
    """31 requests, spilled by four; or by three times four arrivals, until the disk is full."""
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Disk(room_bytes))
    e2els_s = np.random.default_rng(5).uniform(0.0, 9.0, 31).tolist()
    whole = log_of(*e2els_s)
    monkeypatch.setattr(metrics, "FEW", 4)
    spilling = log_of(*e2els_s)
    assert (len(spilling._arrival_s._packed), len(spilling._arrival_s.recent)) == (8 * num_packed, 3)
    for name in ("arrival_s", "ttft_s", "tpot_s", "e2el_s", "queue_s"):
        assert getattr(spilling, name).tolist() == getattr(whole, name).tolist()
    assert spilling.latencies() == whole.latencies()
    assert spilling.max_concurrent_requests() == whole.max_concurrent_requests() > 1


def test_all_may_be_spilled_and_nothing_have_a_tpot(monkeypatch):
    """As many requests as are spilled at once, each of one token: columns with nothing in memory, or nothing at all."""
    whole = log_of(5.0).latencies()
    monkeypatch.setattr(metrics, "FEW", 1)
    spilled = log_of(5.0)
    assert (spilled.latencies(), spilled.max_concurrent_requests()) == (whole, 1)
    assert whole["mean_tpot_ms"] is None and whole["mean_e2el_ms"] == 5000.0


def test_many_values_are_sorted_as_few_are(monkeypatch):
    """Of many numpy sorts them; single precision, too."""
    e2els_s = np.random.default_rng(5).uniform(0.0, 9.0, 31).tolist()
    few, in_flight = log_of(*e2els_s).latencies(), log_of(*e2els_s).max_concurrent_requests()
    for user in ("column", "metrics"):
        monkeypatch.setattr(f"sim.results.{user}.FEW", 30)
    many = log_of(*e2els_s)
    assert (many.latencies(), many.max_concurrent_requests()) == (few, in_flight)


class Disk(io.BytesIO):
    """It has so much room."""

    def __init__(self, room_bytes):
        super().__init__()
        self.room_bytes = room_bytes

    def write(self, data):
        if self.tell() == self.room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[: self.room_bytes - self.tell()])


def test_most_in_flight_does_not_depend_on_what_was_asked_before():
    log = log_of(9.0, 0.5, 0.5)
    assert log.max_concurrent_requests() == 2
    log.latencies()
    assert log.max_concurrent_requests() == 2
    # Whose end is another's arrival is no longer in flight.
    assert log_of(2.0, 1.5, 1.0).max_concurrent_requests() == 2
    # As it is where the end is a sum that rounds up, in a jump or because the arrival is not 0.
    assert log_of(2.0 + 1e-12, 1.5, 1.0).max_concurrent_requests() == 2


def test_tokens_are_counted_only_where_each_has_a_time(tmp_path):
    rows = [(0.0, 10, 60), (0.5, 10, 60)]
    assert "max_output_tokens_per_s" not in simulate(tmp_path, rows)
    # 20 ms and 2 to 20 ms more for each iteration: some 20 iterations of both a second.
    assert 20 < simulate(tmp_path, rows, "--save-detailed")["max_output_tokens_per_s"] < 100


def test_goodput_counts_the_requests_that_meet_every_slo(crowd):
    result, _ = crowd
    ttft, latency, output = completed(result)
    tpot = np.where(output > 1, (latency - ttft) / np.maximum(output - 1, 1), 0.0)
    met = [ttft * 1e3 <= TTFT_MS, tpot * 1e3 <= TPOT_MS, latency * 1e3 <= E2EL_MS]
    good = np.sum(np.all(met, axis=0))
    assert 0 < good < len(ttft)
    assert result["request_goodput"] == pytest.approx(good / result["duration"])
    # The ignored request met nothing.
    assert result["goodput_attainment"] == pytest.approx(good / 60)


def test_inter_token_latencies_lead_from_the_first_token_to_the_last(crowd):
    result, _ = crowd
    columns = (result[name] for name in ("itls", "output_lens", "ttfts", "latencies"))
    for gaps, output, ttft, latency in zip(*columns, strict=True):
        assert len(gaps) == max(0, output - 1)
        assert all(gap > 0 for gap in gaps)
        assert ttft + sum(gaps) == pytest.approx(latency, abs=1e-9)


def test_arrays_stand_in_order_of_the_trace(crowd):
    result, _ = crowd
    rows = crowded()
    assert result["request_ids"] == list(range(60))
    assert result["start_times"] == [arrival for arrival, _, _ in rows]
    assert result["input_lens"] == [prompt for _, prompt, _ in rows]
    assert result["output_lens"] == [0 if i == TOO_LONG else output for i, (_, _, output) in enumerate(rows)]
    for queue, ttft, latency in zip(result["queue_times"], result["ttfts"], result["latencies"], strict=True):
        assert 0 <= queue <= ttft <= latency


def test_a_request_that_never_fits_is_ignored_counted_and_named(crowd):
    result, folder = crowd
    assert [bool(error) for error in result["errors"]] == [i == TOO_LONG for i in range(60)]
    assert "ignored" in result["errors"][TOO_LONG]
    assert result["ignored"] == sum(result["counters"]["ignored"].values()) == 1
    assert result["num_prompts"] == 60
    assert any(warning.startswith("1 request ignored: ") for warning in result["warnings"])
    assert [row["request_id"] for row in read_table(folder) if row["status"] == "ignored"] == [TOO_LONG]


def test_the_crowd_is_preempted_and_swaps_are_priced(crowd):
    result, _ = crowd
    assert result["num_preemptions"] > 0
    counters, out_blocks, in_blocks = result["counters"], 0.0, 0.0
    if result["policy"] == "vllm-swap":
        out_blocks, in_blocks = counters["swap_out_blocks"], counters["swap_in_blocks"]
        assert out_blocks == in_blocks > 0
    elif result["policy"] == "layerkv":
        # Blocks of one of the 32 layers.
        out_blocks = (
            counters["offloaded_at_prefill_layer_blocks"] + counters["offloaded_by_forecast_layer_blocks"]
        ) / 32
        in_blocks = counters["promoted_layer_blocks"] / 32
        assert out_blocks > in_blocks > 0
    for lane, blocks in (("PCIe device to host", out_blocks), ("PCIe host to device", in_blocks)):
        assert result["lanes"][lane]["busy_s"] == pytest.approx(blocks * LINEAR["swap_s_per_block"]), lane


# -- files beside it -------------------------------------------------------------------------------------------------


def test_the_table_agrees_with_the_arrays(crowd):
    result, folder = crowd
    rows = read_table(folder)
    assert list(rows[0]) == list(metrics.TABLE_COLUMNS)
    assert [row["request_id"] for row in rows] == result["request_ids"]
    # In order of the trace, which is not that of the ends.
    ends = [row["arrival_s"] + row["e2el_s"] for row in rows if row["status"] == "completed"]
    assert ends != sorted(ends)
    pairs = {"arrival_s": "start_times", "prompt_tokens": "input_lens", "output_tokens": "output_lens"}
    pairs |= {"queue_s": "queue_times", "ttft_s": "ttfts", "e2el_s": "latencies"}
    for row in rows:
        i = int(row["request_id"])
        for column, name in pairs.items():
            assert row[column] == result[name][i], column
        gaps = row["output_tokens"] - 1
        assert row["tpot_s"] == ((row["e2el_s"] - row["ttft_s"]) / gaps if gaps > 0 else 0.0)
    assert sum(row["preemptions"] for row in rows) == result["num_preemptions"]


def events_of(folder):
    with gzip.open(folder / "timeline.json.gz") as file:
        content = json.loads(file.read(), parse_constant=refuse)
    return content["traceEvents"]


def test_the_timeline_shows_the_lanes_as_threads_that_do_one_thing_at_a_time(crowd):
    result, folder = crowd
    events = events_of(folder)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names.pop(0) == "Iterations"
    assert list(names.values()) == list(result["lanes"])
    for thread, name in names.items():
        spans = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == thread]
        assert sum(duration for _, duration in spans) == pytest.approx(result["lanes"][name]["busy_s"] * 1e6)
        for (start, duration), (after, _) in pairwise(spans):
            assert start + duration <= after + 1e-3
    assert {e["tid"] for e in events if e["ph"] == "X"} <= {0, *names}
    assert sum(e["args"]["iterations"] for e in events if e["ph"] == "X" and not e["tid"]) == result["num_iterations"]


def test_the_timeline_shows_requests_as_async_spans_and_pools_as_counters(crowd):
    result, folder = crowd
    events = events_of(folder)
    spans = {}
    for event in events:
        if event["ph"] in "be" and event["name"] in ("queue", "prefill", "decode"):
            assert event["cat"] == "request"
            spans.setdefault((event["id"], event["name"]), []).append((event["ph"], event["ts"]))
    assert len(spans) == 3 * 59
    for (i, name), ((begin, start), (end, stop)) in spans.items():
        assert (begin, end) == ("b", "e")
        arrival, ttft = result["start_times"][i], result["ttfts"][i]
        marks = {"queue": (0.0, result["queue_times"][i]), "prefill": (result["queue_times"][i], ttft)}
        first, last = marks.get(name, (ttft, result["latencies"][i]))
        assert (start, stop) == pytest.approx(((arrival + first) * 1e6, (arrival + last) * 1e6))
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"gpu_free_blocks", "num_decoding", "num_waiting", "num_swapped"}
    free = [e["args"]["gpu_free_blocks"] for e in counters if e["name"] == "gpu_free_blocks"]
    assert 0 <= min(free) < max(free) <= 60


def test_the_series_has_its_columns_and_time_goes_forward(crowd):
    result, folder = crowd
    lines = (folder / "series.csv").read_text().splitlines()
    assert lines[0].split(",") == list(COLUMNS)
    rows = [dict(zip(COLUMNS, map(float, line.split(",")), strict=True)) for line in lines[1:]]
    assert all(before["time_s"] <= after["time_s"] for before, after in pairwise(rows))
    assert max(row["num_waiting"] for row in rows) > 0
    assert rows[-1]["compute_busy_s"] == pytest.approx(result["lanes"]["GPU compute"]["busy_s"], rel=1e-8)


def test_a_series_that_is_thinned_spans_the_run_without_holes(tmp_path, monkeypatch):
    def rows_of(limit):
        monkeypatch.setattr("sim.run.runs.LEAST_SAMPLES", 1)
        monkeypatch.setattr("sim.run.runs.SAMPLE_LIMIT", limit)
        simulate(tmp_path, crowded(), *CROWDED, "--step")
        return (tmp_path / "out" / "series.csv").read_text().splitlines()[1:]

    whole = rows_of(10**6)
    assert len(whole) > 200
    thinned = rows_of(40)
    assert 20 <= len(thinned) < 40
    places = [whole.index(row) for row in thinned]
    # Rows of falling idle, the last one among them, stand between.
    assert places[0] == 0 and places[-1] == len(whole) - 1
    assert np.diff(places).min() > 0 and np.diff(places).max() <= 16


def test_gap_percentiles_do_not_need_the_gaps_themselves(tmp_path):
    detailed = simulate(tmp_path, crowded(), *CROWDED)
    plain = simulate(tmp_path, crowded(), *(word for word in CROWDED if word != "--save-detailed"))
    assert detailed.pop("itls") and detailed.pop("max_output_tokens_per_s")
    assert plain == detailed


def test_a_servers_row_is_in_the_file_when_its_request_has_ended(tmp_path):
    """SIGKILL may come next."""
    table = RowsAtOnce(tmp_path, ["id", "word"])
    table.open()
    for number, text in ((2, '2,"x"\n'), (10, '2,"x"\n10,"x"\n'), (0, '2,"x"\n10,"x"\n0,"x"\n')):
        table.write((number, "x"))
        assert table.path.read_text() == "id,word\n" + text
    table.close()
    assert table.path.read_text() == 'id,word\n0,"x"\n2,"x"\n10,"x"\n'


def test_rows_are_written_in_order_as_soon_as_they_can_be(tmp_path):
    table = InOrder(CsvTable(path := tmp_path / "t.csv", ["id"]))
    table._table.write = (written := []).append
    for number, expected in ((1, []), (0, [0, 1]), (4, [0, 1]), (3, [0, 1]), (2, [*range(5)]), (9, None), (7, None)):
        table.write((number,))
        assert expected in (None, [row[0] for row in written])
    table.close()
    # What never ended is left out.
    assert [row[0] for row in written] == [0, 1, 2, 3, 4, 7, 9]
    assert path.read_text() == "id\n"


def test_parquet_columns_keep_their_types_over_row_groups(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(ParquetTable, "ROWS_PER_GROUP", 2)
    table = ParquetTable(tmp_path / "t.parquet", ["n", "x_s", "word"])
    rows = [(1 << 60, 0.5, "done"), (-2, 1e300, ""), (3, 0.1, "größe"), (4, 0.0, "a"), (5, 1.0, "b")]
    for row in rows:
        table.write(row)
    table.close()
    found = parquet.read_table(tmp_path / "t.parquet")
    assert [str(field.type) for field in found.schema] == ["int64", "double", "string"]
    assert [tuple(row.values()) for row in found.to_pylist()] == rows
    assert parquet.ParquetFile(tmp_path / "t.parquet").num_row_groups == 3


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_one_request_by_hand(tmp_path):
    # Prefill 0.01 + 10 * 1e-4 + 100 * 1e-6 = 0.0111; then 11 and 12 tokens of context: 0.0221, 0.0222.
    result = simulate(tmp_path, [(0.5, 10, 3)], "--save-detailed")
    assert result["ttfts"] == pytest.approx([0.0111])
    assert result["itls"] == [pytest.approx([0.0221, 0.0222])]
    assert result["latencies"] == pytest.approx([0.0554])
    assert result["queue_times"] == [0.0]
    assert result["mean_tpot_ms"] == pytest.approx(22.15)
    assert (result["p50_itl_ms"], result["p90_itl_ms"]) == pytest.approx((22.15, 22.19))
    assert result["std_itl_ms"] == pytest.approx(0.05)
    assert result["std_ttft_ms"] == 0.0
    assert result["num_iterations"] == 3
    assert (result["duration"], result["makespan_s"]) == pytest.approx((0.0554, 0.5554))
    assert result["request_throughput"] == pytest.approx(1 / 0.0554)
    assert result["output_throughput"] == pytest.approx(3 / 0.0554)
    assert result["total_token_throughput"] == pytest.approx(13 / 0.0554)
    assert result["request_goodput"] is None
    assert result["lanes"]["GPU compute"]["busy_s"] == pytest.approx(0.0554)


@pytest.mark.parametrize(("slos", "good"), [("13.6 24", 0), ("13.6 24.3", 1), ("13.6 25.3", 2), ("13.4 30", 0)])
def test_two_requests_by_hand(tmp_path, slos, good):
    # Prefill of 10 and 20 tokens 0.01 + 30e-4 + 500e-6 = 0.0135; both decode with 11 + 21 tokens of context
    # 0.02 + 2e-3 + 32e-4 = 0.0252; the second alone with 22: 0.02 + 1e-3 + 22e-4 = 0.0232. TPOT 25.2 and 24.2 ms.
    ttft, tpot = slos.split()
    result = simulate(tmp_path, [(0.0, 10, 2), (0.0, 20, 3)], "--goodput", f"ttft:{ttft}", f"tpot:{tpot}")
    assert result["ttfts"] == pytest.approx([0.0135, 0.0135])
    assert result["latencies"] == pytest.approx([0.0387, 0.0619])
    assert result["mean_tpot_ms"] == pytest.approx((25.2 + 24.2) / 2)
    assert result["mean_itl_ms"] == pytest.approx((2 * 25.2 + 23.2) / 3)
    assert result["median_itl_ms"] == pytest.approx(25.2)
    assert result["request_goodput"] == pytest.approx(good / 0.0619)
    assert result["goodput_attainment"] == good / 2


def test_a_request_of_one_token_has_a_ttft_and_no_tpot(tmp_path):
    result = simulate(tmp_path, [(0.0, 10, 1)], "--save-detailed", "--goodput", "tpot:0.001")
    assert result["ttfts"] == result["latencies"] == pytest.approx([0.0111])
    assert result["itls"] == [[]]
    assert result["mean_tpot_ms"] is result["p99_itl_ms"] is None
    assert result["goodput_attainment"] == 1.0


def test_a_request_that_arrives_in_an_iteration_waits_for_its_end(tmp_path):
    # The first runs 0.0111 (prefill) + 0.0221; the second comes at 0.02, within the decode, and waits to 0.0332.
    result = simulate(tmp_path, [(0.0, 10, 2), (0.02, 10, 1)])
    assert result["queue_times"] == pytest.approx([0.0, 0.0132])
    assert result["ttfts"] == pytest.approx([0.0111, 0.0243])


def test_no_request_completed(tmp_path, capsys):
    inputs = write_inputs(tmp_path, [(0.0, 5000, 3), (1.0, 6000, 3)])
    assert kvtwin.main(["run", *inputs, "--policy", "vllm-recompute", "--out", str(tmp_path / "out")]) == 0
    result = read_result(tmp_path / "out")
    assert (result["completed"], result["ignored"], result["duration"], result["request_throughput"]) == (0, 2, 0, 0)
    assert result["mean_ttft_ms"] is result["p99_itl_ms"] is result["mean_tpot_ms"] is None
    assert len(read_table(tmp_path / "out")) == 2
    assert (result["failed"], result["max_concurrent_requests"]) == (2, 0)
    errors = capsys.readouterr().err
    assert "2 requests ignored" in errors
    assert "kvtwin: vllm-recompute: no request completed: 2 were given up\n" in errors


# -- long runs, and the same again -----------------------------------------------------------------------------------


def test_past_the_limit_the_arrays_go_and_the_result_says_so(tmp_path, monkeypatch):
    rows = [(i * 0.1, 10 + i, 3) for i in range(5)]
    whole = simulate(tmp_path, rows)
    monkeypatch.setattr(metrics, "ARRAY_LIMIT", 5)
    assert simulate(tmp_path, rows) == whole
    monkeypatch.setattr(metrics, "ARRAY_LIMIT", 4)
    short = simulate(tmp_path, rows, "--save-detailed", "--timeline")
    arrays = {name for name, value in whole.items() if isinstance(value, list) and name != "warnings"}
    names = {"request_ids", "start_times", "input_lens", "output_lens", "queue_times", "ttfts", "latencies", "errors"}
    assert arrays == names
    assert "100000 requests" in short.pop("per_request")
    assert sum(short.pop("latency_parts").values()) == pytest.approx(short["mean_e2el_ms"] / 1e3)
    assert short == {name: value for name, value in whole.items() if name not in arrays}
    assert len(read_table(tmp_path / "out")) == 5


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_scenario_gives_the_same_bytes_in_another_process(tmp_path):
    words = "--workload sharegpt --num-prompts 60 --request-rate 20 --num-gpu-blocks-override 200 --save-detailed"
    words = [*words.split(), "--timeline", "--quiet", "--policy", "layerkv", "--layerkv-predictor", "bucket"]
    assert kvtwin.main(["run", *words, "--out", str(tmp_path / "a")]) == 0
    # Other hashes and other addresses: an order that hangs on either would show.
    command = [sys.executable, "-m", "kvtwin", "run", *words, "--out", str(tmp_path / "b")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    one, other = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert len(one) == 5
    assert one == other
    assert kvtwin.main(["run", *words, "--out", str(tmp_path / "c"), "--seed", "1"]) == 0
    another = files_of(tmp_path / "c")
    assert [name for name in one if one[name] == another[name]] == []

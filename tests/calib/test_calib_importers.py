"""Importers: hand-made tables in each format, summed by hand, and NVIDIA's own where they are installed."""

from importlib.util import find_spec

import msgspec
import pytest
from parquet_small import put

import kvtwin
from calib.experts import ExpertSample
from calib.importers import aiconfigurator, steps, vidur
from calib.importers.tables import Table
from calib.kernel_fit import read_kernel_samples
from calib.profile_files import DATA
from calib.samples import MADS, Sample, fault_of, read_comments, read_samples
from sim.cost.profile import EXPERT_UNITS, read_profile
from sim.errors import UserError

# -- CSV tables ------------------------------------------------------------------------------------------------------


def written(folder, text, name="t.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_table_gives_cells_by_column(tmp_path):
    table = Table(written(tmp_path, "a, b,c\n\n1, two ,\n2.0,x,7\n"), ("b", "a"))
    assert len(table) == 2
    assert [table.text(0, c) for c in ("a", "b", "c", "none")] == ["1", "two", "", ""]
    assert [table.integer(i, "a") for i in (0, 1)] == [1, 2]
    assert [table.number(i, "c", 0.5) for i in (0, 1)] == [0.5, 7.0]
    assert table.integer(0, "none", 3) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give a CSV file with a header"),
        ("b,c\n1,2\n", "column 'a' is missing: is this the right table? it has b, c"),
        ("b,c,d,e,f,g,h\n", "column 'a' is missing: is this the right table? it has b, c, d, e, f, g, ..."),
        ("a\n1\n\n1,2\n", "line 4: 2 values for 1 columns: repair the file"),
        ("a\n" + "9" * 200_000 + "\n", "line 2: not CSV (field larger than field limit (131072)): repair the file"),
        (b"a\n\xff\n", "not UTF-8 text (byte 2): give a CSV file"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        Table(path, ("a",))
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("x", "a = 'x' is not a number: correct it"),
        ("nan", "a = 'nan' is not a finite number of 0 or more: correct it"),
        ("-3", "a = '-3' is not a finite number of 0 or more: correct it"),
        ("2.5", "a = 2.5 is not a whole number: correct it"),
    ],
)
def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path, cell, message):
    # The blank line counts: the line is where an editor shows the row.
    path = written(tmp_path, f"a,b\n\n1,1\n{cell},1\n")
    with pytest.raises(UserError) as caught:
        Table(path, ("a",)).integer(1, "a")
    assert str(caught.value) == f"{path}: line 4: {message}"


# -- Vidur -----------------------------------------------------------------------------------------------------------

OPERATOR_TIMES = dict(zip(vidur.OPERATORS, (0.01, 0.2, 0.02, 0.1, 0.01, 0.4, 0.03, 0.2, 0.03), strict=True))
"""Milliseconds at 128 tokens: 1 ms together."""
LLAMA = "32,32,4096,11008"
MLP_COLUMNS = [f"time_stats.{name}.median" for name in vidur.OPERATORS]
MLP_HEADER = ",".join([*MLP_COLUMNS, "num_tokens,num_tensor_parallel_workers,n_head,n_kv_head,n_embd,n_expanded_embd"])
ATTENTION_HEADER = (
    "is_prefill,batch_size,prefill_chunk_size,kv_cache_size,num_tensor_parallel_workers,n_q_head,n_kv_head,n_embd,"
    "time_stats.attn_prefill.median,time_stats.attn_decode.median,time_stats.attn_input_reshape.median,"
    "time_stats.attn_output_reshape.median,time_stats.attn_kv_cache_save.median"
)


def mlp_row(tokens, factor, tp=1, shape=LLAMA):
    times = [repr(factor * ms) for ms in OPERATOR_TIMES.values()]
    return ",".join([*times, str(tokens), str(tp), shape])


def mlp_table(folder, *rows, header=MLP_HEADER):
    # 1 ms at 128 tokens, 3 ms at 256; 0.5 ms at 1.
    rows = rows or (mlp_row(1, 0.5), mlp_row(128, 1.0), mlp_row(256, 3.0), mlp_row(128, 0.6, tp=2))
    return written(folder, "\n".join([header, *rows, ""]), "mlp.csv")


def attention_table(folder, *rows, header=ATTENTION_HEADER):
    return written(folder, "\n".join([header, *rows, ""]), "attention.csv")


def imported(folder, *rows, **tables):
    mlp = tables.get("mlp") or mlp_table(folder)
    return vidur.import_samples("llama-2-7b", mlp, attention_table(folder, *rows), tables.get("all_reduce"))


def test_a_vidur_layer_is_its_operators_and_its_attention(tmp_path):
    samples, provenance = imported(tmp_path, "True,1,128,0,1,32,32,4096,0.25,,0.01,0.02,0.02")
    (sample,) = samples
    assert sample == Sample(op="layers", latency_s=sample.latency_s, model="llama-2-7b", new_tokens=128)
    assert sample.latency_s == pytest.approx(1.3e-3)
    assert provenance["files"] == "mlp.csv, attention.csv"
    assert "Vidur" in provenance["tables"]


def test_without_attention_vidurs_products_and_what_lies_between_stand_alone(tmp_path):
    """Of 1 ms at 128 tokens products take 0.9. What lies between is timed too coarsely at 1 token; 100 is no sample."""
    mlp = mlp_table(
        tmp_path, *(mlp_row(tokens, factor) for tokens, factor in ((1, 0.5), (64, 0.7), (100, 0.9), (128, 1.0)))
    )
    samples, provenance = vidur.import_samples("llama-2-7b", mlp)
    assert [(s.op, s.new_tokens, round(s.latency_s * 1e3, 9)) for s in samples] == [
        ("linear", 1, 0.45), ("linear", 64, 0.63), ("linear", 128, 0.9), ("elementwise", 64, 0.07),
        ("elementwise", 128, 0.1),
    ]  # fmt: skip
    assert (provenance["files"], provenance["missing"]) == (
        "mlp.csv", "attention, LM head, PCIe copies, engine overhead",
    )  # fmt: skip


def test_vidur_operators_are_interpolated_between_tokens(tmp_path):
    """A quarter of the way from 128 to 256 tokens: 1.5 ms, and 0.5 of attention."""
    samples, _ = imported(
        tmp_path, "True,2,80,0,1,32,32,4096,0.5,,,,", "False,64,0,999,1,32,32,4096,,0.1,,,",
        "True,1,300,0,1,32,32,4096,0.5,,,,",
    )  # fmt: skip
    # 64 decodes stand 63/127 of the way from 1 token to 128; 300 tokens lie outside the grid.
    decodes_s = 0.5e-3 + (0.5 + 0.5 * 63 / 127 - 0.5) * 1e-3 + 0.1e-3
    found = {(s.batch_size, s.new_tokens, s.context_tokens): s.latency_s for s in samples}
    assert found == {(64, 1, 999): pytest.approx(decodes_s), (2, 80, 0): pytest.approx(2.0e-3)}


def test_vidur_repeats_count_with_their_median_and_groups_of_gpus_stand_apart(tmp_path):
    """Chunks have a context; of four GPUs there are no operators."""
    rows = [f"true,1,128,512,1,32,32,4096,{ms},,,," for ms in (0.2, 0.9, 0.3)]
    rows += [f"True,1,128,0,{tp},32,32,4096,0.15,,,," for tp in (2, 4)]
    samples, _ = imported(tmp_path, *rows)
    assert [(s.tp, s.repeats, s.new_tokens, s.context_tokens) for s in samples] == [(1, 3, 128, 512), (2, 1, 128, 0)]
    assert [s.latency_s for s in samples] == pytest.approx([1.3e-3, 0.75e-3])


def test_vidur_all_reduces_are_medians_by_group_and_size(tmp_path):
    path = written(
        tmp_path,
        "time_stats.all_reduce.median,num_workers,size\n0.1,2,8192\n0.3,2,8192\n0.2,4,8192\n0.05,1,8192\n",
        "reduce.csv",
    )
    samples, provenance = imported(tmp_path, "True,1,128,0,1,32,32,4096,0.25,,,,", all_reduce=path)
    assert samples[1:] == [
        Sample(op="all_reduce", latency_s=pytest.approx(2e-4), repeats=2, tp=2, num_bytes=8192.0),
        Sample(op="all_reduce", latency_s=pytest.approx(2e-4), repeats=1, tp=4, num_bytes=8192.0),
    ]
    assert provenance["files"] == "mlp.csv, attention.csv, reduce.csv"


def test_a_vidur_table_of_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"mlp.csv: has no rows of llama-2-13b \(n_head 40, n_kv_head 40, n_embd 5120"):
        vidur.import_samples("llama-2-13b", mlp_table(tmp_path), attention_table(tmp_path))
    with pytest.raises(UserError, match=r"attention.csv: has no attention of llama-2-7b's shape"):
        imported(tmp_path, "True,1,128,0,1,32,8,4096,0.25,,,,")


def test_the_vidur_command_fits_or_without_attention_writes_samples_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sim.results.figures.style.save_figure", lambda path, figure: path)
    monkeypatch.setattr("calib.figure.draw_fit", lambda report: None)
    mlp = mlp_table(tmp_path, *(mlp_row(n, (1 + n / 100) / 4) for n in (1, 16, 128, 1024)))
    rows = [f"True,1,{n},0,1,32,32,4096,{n * n / 1e6},,,," for n in (128, 256, 512, 1024)]
    rows += [f"False,{b},0,{c},1,32,32,4096,,{b * c / 2e5},,," for b in (1, 4, 16) for c in (128, 1024, 4096)]
    attention = attention_table(tmp_path, *rows)
    words = ["profile", "import", "vidur", "--model", "llama-2-7b", "--mlp", str(mlp), "--gpu", "a100-80g", "--out"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert kvtwin.main([*words, str(alone)]) == 0
    count = len(read_samples(alone / "a100-80g-imported.csv.gz"))
    assert capsys.readouterr().out == f"wrote {alone / 'a100-80g-imported.csv.gz'} ({count} samples)\n"
    assert [path.name for path in alone.iterdir()] == ["a100-80g-imported.csv.gz"]
    assert kvtwin.main([*words, str(out), "--attention", str(attention)]) == 0
    assert "(13 samples)" in capsys.readouterr().out
    assert read_profile(out / "a100-80g-imported.json").provenance["files"] == "mlp.csv, attention.csv"


# -- whole steps -----------------------------------------------------------------------------------------------------

STEPS_HEADER = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"
STEPS = (
    f"{STEPS_HEADER}\n"
    "llama2,a100,2,512,4,128,100,20\n"
    "llama2,a100,2,512,4,128,130,26\n"
    "llama2,a100,2,512,4,128,104,21\n"
    "llama2,a100,2,128,1,33,30,15\n"
    "llama2,h100,2,128,1,33,10,5\n"
    "other,a100,2,128,1,33,1,1\n"
)


def test_steps_are_medians_of_repeats_at_half_the_tokens_past_the_prompt(tmp_path):
    """Three repeats: prompts of 100, 130 and 104 ms, tokens of 20, 26 and 21 ms after 512 + 128 / 2."""
    samples, provenance = steps.import_samples(written(tmp_path, STEPS), "a100", {"llama2": "llama-2-7b"})
    assert {(s.op, s.model, s.tp, s.num_layers) for s in samples} == {("step", "llama-2-7b", 2, 32)}
    assert [(s.batch_size, s.new_tokens, s.context_tokens, s.repeats) for s in samples] == [
        (1, 1, 128 + 16, 1),
        (1, 128, 0, 1),
        (4, 1, 512 + 64, 3),
        (4, 512, 0, 3),
    ]
    assert [s.latency_s for s in samples] == pytest.approx([0.015, 0.03, 0.021, 0.104])
    assert [s.spread_s for s in samples] == pytest.approx([0.0, 0.0, 0.001 * MADS, 0.004 * MADS])
    assert provenance["models"] == "llama2 as llama-2-7b"
    assert provenance["tables"] == "t.csv: whole steps, rows of hardware 'a100'"


def test_steps_of_unknown_hardware_are_refused_with_what_is_there(tmp_path):
    path = written(tmp_path, STEPS)
    with pytest.raises(UserError) as caught:
        steps.import_samples(path, "v100", {"llama2": "llama-2-7b"})
    assert str(caught.value) == (
        f"{path}: nothing of model llama2 on 'v100': it has llama2 on a100; llama2 on h100; other on a100"
    )
    with pytest.raises(UserError, match="it has m on no hardware named"):
        steps.import_samples(written(tmp_path, STEPS.split("\n")[0] + "\nm,,1,1,1,1,1,1\n"), "x", {"m": "llama-2-7b"})


# -- aiconfigurator --------------------------------------------------------------------------------------------------

# Llama-3.1 8B: QKV 6144 x 4096, output 4096 x 4096, gate and up 28672 x 4096, down 4096 x 14336. The grid has 28672
# halfway between 24576 and 32768, and 14336 halfway between 12288 and 16384.
GEMMS = {(6144, 4096): 0.10, (4096, 4096): 0.06, (24576, 4096): 0.30, (32768, 4096): 0.50}
GEMMS |= {(4096, 12288): 0.20, (4096, 16384): 0.30}
"""Milliseconds at 128 rows, of the fastest collector."""


def gemm_row(m, n, k, ms):
    return {"device": "A CARD", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": ms}


def gemm_rows(extra):
    return [gemm_row(128, n, k, ms + extra) for (n, k), ms in GEMMS.items()]


def attention_row(batch, new, cached, ms, **other):
    row = {
        "batch_size": batch, "isl": new, "step": cached, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "latency": ms,
    }  # fmt: skip
    return {**row, **other}


def nccl_row(gpus, num_bytes, ms, **other):
    # The tables count elements of two bytes.
    size = num_bytes // 2
    row = {"nccl_dtype": "half", "op_name": "all_reduce", "num_gpus": gpus, "message_size": size, "latency": ms}
    return {**row, **other}


def put_gemms(root, rows):
    """The same rows of all three collectors."""
    for collector in ("sglang/0.5.0", "vllm/0.10.0", "trtllm/1.0.0"):
        put(root, f"gemm/{collector}/gemm_perf.parquet", rows)


def put_attention(root, prompts, decodes, engine="vllm"):
    put(root, f"attention/{engine}/1.2.0/context_attention_perf.parquet", prompts)
    put(root, f"attention/{engine}/1.2.0/generation_attention_perf.parquet", decodes)


@pytest.fixture
def tables(tmp_path):
    """The package's folder with one tiny system: three collectors' GEMMs, two engines' attention, NCCL."""
    root = tmp_path / "data" / "a100_sxm"
    old = [{**row, "latency": 99.0} for row in gemm_rows(0.0)]
    float8 = [{**row, "gemm_dtype": "fp8", "latency": 77.0} for row in gemm_rows(0.0)]
    float8 += [{**row, "m": m} for row in float8 for m in (64, 96)]
    put(root, "gemm/sglang/0.5.0/gemm_perf.parquet", gemm_rows(0.05))
    # Of several versions the newest counts, and 0.10 is newer than 0.9.
    put(root, "gemm/vllm/0.9.0/gemm_perf.parquet", old)
    put(root, "gemm/vllm/0.10.0/gemm_perf.parquet", [*gemm_rows(0.01), *float8])
    # A collector that timed a shape twice counts once, with the median.
    put(root, "gemm/trtllm/1.0.0/gemm_perf.parquet", [*gemm_rows(-0.02), *gemm_rows(0.02)])
    put(root, "gemm/trtllm/1.0.0/other_perf.parquet", old)
    for engine, ms in (("vllm", 0.05), ("sglang", 5.0)):
        prompts = [
            attention_row(1, 128, 0, ms),
            attention_row(1, 128, 0, 3 * ms),
            attention_row(2, 64, 1000, 4 * ms),
            attention_row(1, 100, 0, ms),
            attention_row(1, 128, 0, 99.0, kv_cache_dtype="fp8"),
            attention_row(1, 128, 0, 99.0, head_dim=64),
            attention_row(1, 128, 0, 99.0, num_heads=64),
        ]
        decodes = [
            attention_row(128, 1, 1000, 7 * ms, window_size=0),
            attention_row(128, 1, 126, 99.0, window_size=0),
            attention_row(128, 1, 127, 2 * ms, window_size=0),
            attention_row(128, 1, 5000, 99.0, window_size=1024),
            attention_row(64, 1, 1000, 99.0, window_size=0),
            attention_row(64, 1, 1023, 1000 * ms, window_size=0),
            attention_row(64, 1, 1023, 2000 * ms, window_size=0, kv_cache_dtype="fp8"),
        ]
        put_attention(root, prompts, decodes, engine)
    reduces = [
        nccl_row(2, 8192, 0.01),
        nccl_row(4, 1 << 28, 2.0),
        nccl_row(2, 8190, 99.0),
        nccl_row(2, (1 << 28) + 2, 99.0),
        nccl_row(16, 8192, 99.0),
        nccl_row(2, 8192, 99.0, nccl_dtype="float"),
        nccl_row(2, 8192, 99.0, op_name="all_gather"),
    ]
    put(root, "comm/nccl/2.20.5/nccl_perf.parquet", reduces)
    return root.parent


def moe_rows():
    """Layers of three shapes of experts whose sixteen are all met: FLOP/s, bytes/s and a launch by hand."""
    found = []
    for hidden, width in ((4096, 1024), (2048, 4096), (8192, 2048)):
        for tokens in (16, 64, 256, 512, 1024, 2048, 4096, 16384):
            weights, rows = 3 * hidden * width, 2 * tokens
            moved = rows * (3 * hidden + 6 * width) * 2
            seconds = 2 * rows * weights / 1.5e14 + 16 * weights * 2 / 1.2e12 + moved / 1e12 + 4e-5
            found.append({
                "moe_dtype": "bfloat16", "kernel_source": "vllm_fused_moe", "num_tokens": tokens, "hidden_size": hidden,
                "inter_size": width, "topk": 2, "num_experts": 16, "moe_tp_size": 1, "moe_ep_size": 1,
                "distribution": "balanced", "latency": 1e3 * seconds,
            })  # fmt: skip
    return found


def composed(tables, **options):
    given = {"system": "a100_sxm", "models": ["llama-3.1-8b"], "folder": tables, **options}
    return aiconfigurator.import_samples(**given)


def test_a_layer_is_four_gemms_and_attention_with_medians_over_collectors(tables):
    """GEMMs of the middle collector, 0.01 ms above the fastest: 0.11 + 0.07 + 0.41 + 0.26 = 0.85 ms.

    Collectors are 0, 0.01 and 0.05 ms above: a median deviation of 0.01 in each of the four. Attention's two rows of
    0.05 and 0.15 ms count with 0.1.
    """
    samples, provenance = composed(tables)
    layers = {
        (s.batch_size, s.new_tokens, s.context_tokens): s for s in samples if s.op == "products" and not s.is_quantised
    }
    assert sorted(layers) == [(1, 128, 0), (2, 64, 1000), (128, 1, 127), (128, 1, 1000)]
    attention_ms = {(1, 128, 0): 0.1, (2, 64, 1000): 0.2, (128, 1, 127): 0.1, (128, 1, 1000): 0.35}
    for key, sample in layers.items():
        assert sample.latency_s == pytest.approx((0.85 + attention_ms[key]) * 1e-3), key
        assert sample.spread_s == pytest.approx(2 * MADS * 0.01e-3)
        assert (sample.repeats, sample.model, sample.num_layers, sample.tp) == (3, "llama-3.1-8b", 1, 1)
        assert fault_of(sample) == ""
    assert provenance["device"] == "A CARD"
    assert provenance["gemm"] == "median over the collectors sglang 0.5.0, trtllm 1.0.0, vllm 0.10.0"
    assert provenance["attention"] == "vllm 1.2.0"
    assert provenance["all_reduce"] == "NCCL 2.20.5, half precision"


def test_fp8_layers_are_the_engines_own(tables):
    """vLLM's four GEMMs of 77 ms at every size, and attention of 50 and 100 ms over KV of both types.

    Attention only at powers of four: 128 prompt tokens and contexts of 1,001 are none. The other collectors have no
    FP8: no sample, and it is said.
    """
    samples, provenance = composed(tables)
    found = [s for s in samples if s.is_quantised]
    given = {"model": "llama-3.1-8b", "quantization": "fp8"}
    decode = {"op": "products", "batch_size": 64, "new_tokens": 1, "context_tokens": 1023, "repeats": 1, **given}
    expected = [
        *(Sample(op="linear", latency_s=0.308, new_tokens=tokens, **given) for tokens in (64, 96, 128)),
        Sample(latency_s=0.358, **decode),
        Sample(latency_s=0.408, kv_cache_dtype="fp8", **decode),
    ]
    assert [msgspec.structs.replace(s, latency_s=round(s.latency_s, 9)) for s in found] == expected
    assert not any(map(fault_of, found))
    assert provenance["fp8"] == "GEMMs of vllm 0.10.0"
    samples, provenance = composed(tables, engine="sglang")
    assert not any(s.is_quantised for s in samples)
    assert provenance["fp8"] == "none in the tables"


def test_an_engines_own_all_reduces_are_taken_before_nccls(tables):
    common = {"num_gpus": 2, "message_size": 8192, "latency": 0.004}
    rows = [{**common, "backend": "vllm_graph"}, {**common, "backend": "vllm_eager", "latency": 0.02}]
    put(tables / "a100_sxm", "comm/vllm/0.24.0/custom_allreduce_perf.parquet", rows)
    samples, provenance = composed(tables)
    assert [s.latency_s for s in samples if s.op == "all_reduce"] == pytest.approx([4e-6])
    assert provenance["all_reduce"] == "vllm 0.24.0, in CUDA graphs"


def test_what_vllm_fuses_with_norms_is_reduced_by_tensorrts_kernel(tables):
    (tables / "a100_sxm").rename(tables / "h100_sxm")
    own = [
        {"num_gpus": gpus, "message_size": mib << 19, "latency": ms, "backend": "vllm_graph"}
        for gpus, mib, ms in ((4, 2, 0.02), (4, 4, 0.03))
    ]
    fused = [
        {"num_gpus": gpus, "message_size": mib << 19, "latency": ms, "implementation": "trtllm"}
        for gpus, mib, ms in ((4, 2, 0.01), (4, 4, 0.02), (2, 64, 0.2), (2, 128, 0.4))
    ]
    put(tables / "h100_sxm", "comm/vllm/0.24.0/custom_allreduce_perf.parquet", own)
    put(tables / "h100_sxm", "comm/trtllm/1.3.0/custom_allreduce_perf.parquet", fused)
    samples, provenance = composed(tables, system="h100_sxm")
    reduced = [(s.tp, s.num_bytes / 2**20, s.latency_s) for s in samples if s.op == "all_reduce"]
    # Of four GPUs up to 2 MiB, of two up to 64.
    assert reduced == [(4, 2, 2e-5), (4, 4, 3e-5), (4, 2, 1e-5), (2, 64, 2e-4)]
    assert provenance["all_reduce"] == "vllm 0.24.0, in CUDA graphs; what it fuses with norms: trtllm 1.3.0"


@pytest.mark.parametrize(("system", "engine"), [("h100_sxm", "sglang"), ("a100_sxm", "vllm")])
def test_nothing_else_is_fused_with_norms(tables, system, engine):
    """Other engines do not, nor have they vLLM's kernels, and vLLM not on this GPU: NCCL's are all there are."""
    if system != "a100_sxm":
        (tables / "a100_sxm").rename(tables / system)
    fused = [{"num_gpus": 2, "message_size": 1 << 20, "latency": 0.01, "implementation": "trtllm"}]
    put(tables / system, "comm/trtllm/1.3.0/custom_allreduce_perf.parquet", fused)
    if engine == "sglang":
        own = [{"num_gpus": 2, "message_size": 8192, "latency": 0.004, "backend": "vllm_graph"}]
        put(tables / system, "comm/vllm/0.24.0/custom_allreduce_perf.parquet", own)
    samples, provenance = composed(tables, system=system, engine=engine)
    assert [s.latency_s for s in samples if s.op == "all_reduce"] == pytest.approx([1e-5, 2e-3])
    assert provenance["all_reduce"] == "NCCL 2.20.5, half precision"


def test_prompts_too_short_and_batches_too_large_are_no_samples(tables):
    """Of 64 and 1,024 rows too: prompts from 128 tokens on, 512 decodes at most, after 127 tokens at least."""
    root = tables / "a100_sxm"
    put_gemms(root, [{**row, "m": m} for row in gemm_rows(0.0) for m in (64, 127, 128, 512, 513)])
    prompts = [attention_row(1, n, 0, 0.05) for n in (64, 127, 128)]
    decodes = [attention_row(b, 1, c, 0.05) for b in (512, 513) for c in (126, 127)]
    put_attention(root, prompts, decodes)
    samples, _ = composed(tables)
    found = [(s.batch_size, s.new_tokens, s.context_tokens) for s in samples if s.op == "products"]
    assert found == [(1, 128, 0), (512, 1, 127)]


def test_nvfp4_is_not_timed_over_fp8_kv(tables):
    """Over KV of 16 bits alone, at a power of four: 64 decodes after 1,023 tokens."""
    rows = [{**gemm_row(m, n, k, 1.0), "gemm_dtype": "nvfp4"} for (n, k) in GEMMS for m in (64, 128)]
    put(tables / "a100_sxm", "gemm/vllm/0.11.0/gemm_perf.parquet", [*gemm_rows(0.01), *rows])
    samples, provenance = composed(tables)
    found = [(s.op, s.tokens, s.kv_cache_dtype) for s in samples if s.quantization]
    assert found == [("linear", 64, ""), ("linear", 128, ""), ("products", 64, "")]
    assert (provenance["fp8"], provenance["nvfp4"]) == ("none in the tables", "GEMMs of vllm 0.11.0")


def test_an_l40s_reduces_over_two_gpus_only(tables):
    (tables / "a100_sxm").rename(tables / "l40s")
    samples, _ = composed(tables, system="l40s")
    assert [s.tp for s in samples if s.op == "all_reduce"] == [2]


def test_attention_is_that_of_the_engine_asked_for(tables):
    samples, provenance = composed(tables, engine="sglang")
    (prompt,) = (s for s in samples if (s.batch_size, s.new_tokens) == (1, 128))
    assert prompt.latency_s == pytest.approx((0.85 + 10.0) * 1e-3)
    assert provenance["attention"] == "sglang 1.2.0"


def test_a_model_without_a_gate_has_one_matrix_into_its_mlp(tables, tmp_path):
    """GPT-like: 4096 -> 24576 and no gate is a product of 24576 columns, not of twice as many."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 4096, "num_attention_heads": 32, '
        '"ffn_dim": 12288, "vocab_size": 1000, "max_position_embeddings": 128, "word_embed_proj_dim": 4096, '
        '"do_layer_norm_before": true, "tie_word_embeddings": true, "torch_dtype": "float16"}'
    )
    root = tables / "a100_sxm"
    put_gemms(root, [*gemm_rows(0.0), gemm_row(128, 12288, 4096, 0.4)])
    heads = {"num_key_value_heads": 32}
    put_attention(root, [attention_row(1, 128, 0, 0.05, **heads)], [attention_row(8, 1, 500, 0.05, **heads)])
    samples, _ = composed(tables, models=[str(config)])
    # QKV of 12288 columns 0.4, output 0.06, into the MLP 0.4, out of it 0.2 and attention 0.05.
    assert [s.latency_s for s in samples if s.op == "products"] == [pytest.approx(1.11e-3)]


def test_the_command_composes_fits_and_writes(tables, tmp_path, monkeypatch, capsys):
    """Tables of a card with 200 TFLOP/s, 100 in attention, and 1 TB/s, one after the other: the fit finds them."""
    drawn = []
    monkeypatch.setattr("sim.results.figures.style.save_figure", lambda path, figure: drawn.append(path.name) or path)
    monkeypatch.setattr("calib.figure.draw_fit", lambda report: None)
    root, sizes = tables / "a100_sxm", (1, 4, 16, 64, 128, 512, 2048, 8192)
    rows = [
        gemm_row(m, n, k, 1e3 * (2 * m * n * k / 2e14 + 2 * (n * k + m * n + m * k) / 1e12))
        for m in sizes
        for n, k in GEMMS
    ]
    put_gemms(root, rows)
    prompts = [attention_row(1, n, 0, 1e3 * n * (n + 1) / 2 * 4 * 4096 / 1e14) for n in sizes[4:]]
    decodes = [
        attention_row(b, 1, c, 1e3 * b * (c + 1) * 4096 / 1e12) for b in sizes[:5] for c in (127, 1023, 8191, 32767)
    ]
    put_attention(root, prompts, decodes)
    reduces = [
        nccl_row(g, n, 1e3 * 2 * (g - 1) * (5e-6 + n / g / 1e11))
        for g in (2, 4, 8)
        for n in (8192, 1 << 17, 1 << 20, 1 << 23, 1 << 26)
    ]
    put(root, "comm/nccl/2.20.5/nccl_perf.parquet", reduces)
    put(root, "moe/vllm/0.20.0/moe_perf.parquet", moe_rows())
    words = ["--system", "a100_sxm", "--model", "llama-3.1-8b", "--tables", str(tables), "--out", str(tmp_path / "out")]
    assert kvtwin.main(["profile", "import", "aiconfigurator", *words]) == 0
    assert "(39 samples)" in capsys.readouterr().out
    assert drawn == ["a100-80g-imported.png"]
    profile = read_profile(tmp_path / "out" / "a100-80g-imported.json")
    expected = {
        "flops_per_s": 2e14, "attention_flops_per_s": 1e14, "hbm_bytes_per_s": 1e12, "roofline_exponent": 1.0,
        "allreduce_bytes_per_s": 1e11, "allreduce_latency_s": 5e-6,
    }  # fmt: skip
    assert {n: profile.value(n) for n in expected} == pytest.approx(expected, rel=0.05)
    assert profile.provenance["device"] == "A CARD"
    assert len(read_samples(tmp_path / "out" / "a100-80g-imported.csv.gz")) == 39
    # Experts have samples of their own, which `profile fit` takes as well.
    assert profile.provenance["experts"] == "FusedMoE of vLLM 0.20.0"
    own = {name: profile.value(name) for name in EXPERT_UNITS}
    expected = dict(zip(EXPERT_UNITS, (1.5e14, 1.2e12, 1.0, 1e12, 4e-5), strict=True))
    assert own == pytest.approx(expected, rel=0.05)
    path = tmp_path / "out" / "a100-80g-imported-experts.csv.gz"
    assert len(read_kernel_samples(path, ExpertSample)) == 24
    words = ["profile", "fit", str(tmp_path / "out" / "a100-80g-imported.csv.gz"), "--gpu", "a100-80g"]
    assert kvtwin.main([*words, "--name", "mine", "--experts", str(path), "--out", str(tmp_path / "fit")]) == 0
    refit = read_profile(tmp_path / "fit" / "mine.json")
    assert {name: refit.value(name) for name in EXPERT_UNITS} == pytest.approx(own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "b200"}, "system 'b200' is not known: use one of a100_sxm, l40s, h100_sxm, h200_sxm, b200_sxm"),
        ({"system": "l40s"}, "gemm: holds no gemm_perf.parquet: give the package's systems/data folder"),
        ({"engine": "mine"}, "holds no tables of engine 'mine': use vllm, sglang or trtllm"),
        ({"models": ["qwen2.5-7b"]}, "no attention of 28 query and 4 KV heads, or no matrices of its widths (model q"),
        ({"models": ["lama-3.1-8b"]}, "did you mean 'llama-3.1-8b'"),
        ({"models": ["deepseek-v2-lite"]}, "deepseek-v2-lite is not four matrices and attention over heads of 128"),
    ],
)
def test_what_the_tables_do_not_have_is_refused(tables, options, message):
    with pytest.raises(UserError) as caught:
        composed(tables, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("place", "column"), [("gemm/vllm/0.10.0/gemm_perf", "latency"), ("comm/nccl/2.20.5/nccl_perf", "num_gpus")]
)
def test_a_column_missing_from_the_tables_is_named(tables, place, column):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tables / "a100_sxm" / f"{place}.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns([column]), path)
    with pytest.raises(UserError) as caught:
        composed(tables)
    assert str(caught.value) == f"{path}: column {column!r} is missing: give the package's own tables"


def test_a_file_that_is_no_parquet_is_named(tables):
    path = tables / "a100_sxm" / "gemm/vllm/0.10.0/gemm_perf.parquet"
    path.write_bytes(b"m,n,k\n1,2,3\n")
    with pytest.raises(UserError, match=r"gemm_perf.parquet: cannot be read as parquet \(.+\): give the package's"):
        composed(tables)


def test_a_package_that_is_not_installed_is_asked_for(monkeypatch):
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="aiconfigurator-core is not installed: pip install"):
        aiconfigurator.import_samples("a100_sxm")


def test_parquet_without_pyarrow_asks_for_it(tables, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(aiconfigurator, "import_module", missing)
    with pytest.raises(UserError, match="needs pyarrow: pip install pyarrow"):
        composed(tables)


def shipped(gpu):
    return read_samples(DATA / f"{gpu}-imported.csv.gz")


def test_shipped_samples_of_vidur_are_those_taken_of_a_table_that_has_more(tmp_path):
    tokens = {sample.new_tokens for sample in shipped("a100-80g") if sample.op == "elementwise"}
    rows = [mlp_row(n, n / 100) for n in sorted({1, *tokens, *(n + 1 for n in tokens)})]
    samples, _ = vidur.import_samples("llama-2-7b", mlp_table(tmp_path, *rows))
    assert {sample.new_tokens for sample in samples if sample.op == "elementwise"} == tokens


@pytest.mark.parametrize("name", [name for name in aiconfigurator.SYSTEMS if not name.startswith("rtx")])
def test_shipped_all_reduces_of_a_system_are_all_that_are_taken_of_it(name):
    """Those of its groups, from one token's bytes to a long prompt's; no GB200 has eight GPUs."""
    system = aiconfigurator.SYSTEMS[name]
    reduces = [sample for sample in shipped(system.gpu) if sample.op == "all_reduce"]
    sizes = {sample.num_bytes for sample in reduces}
    assert {sample.tp for sample in reduces} == {*system.reducing_gpus} - ({8} if name == "gb200" else set())
    assert (min(sizes), max(sizes)) == (aiconfigurator.LEAST_REDUCED_BYTES, aiconfigurator.MOST_REDUCED_BYTES)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed")
def test_the_installed_tables_give_the_shipped_samples():
    pytest.importorskip("pyarrow")
    path = DATA / "a100-80g-imported.csv.gz"
    samples, provenance = aiconfigurator.import_samples("a100_sxm")
    assert samples == read_samples(path)
    assert provenance == read_comments(path)

"""LLMServingSim's folders: kernels by hand, composed into samples and taken as tables."""

import pytest

import kvtwin
from calib.cli import DATA
from calib.importers import llmservingsim
from calib.samples import fault_of, read_samples
from sim.cost.profile import read_profile
from sim.errors import UserError

KERNELS = {
    "embedding": 3.0, "layernorm": 2.0, "qkv_proj": 70.0, "rotary_emb": 4.0, "o_proj": 60.0, "gate_up_proj": 250.0,
    "act_fn": 6.0, "down_proj": 120.0, "final_layernorm": 2.0,
}  # fmt: skip
"""Microseconds at one token; each grows by a hundredth a token."""
CHUNKS, CACHED, DECODES, CONTEXTS = (16, 64, 256, 1024), (0, 1024), (1, 8, 64), (128, 1024, 4096)


def attention_us(chunk, cached, decodes, context):
    return 8.0 + chunk * (cached + chunk / 2) / 5000 + decodes * context / 200 * (1.5 if chunk else 1.0)


def shapes():
    yield from ((0, 0, n, c) for n in DECODES for c in CONTEXTS)
    yield from ((chunk, cached, 0, 0) for chunk in CHUNKS for cached in CACHED)
    yield from ((chunk, cached, n, c) for chunk in CHUNKS for cached in CACHED for n in DECODES for c in CONTEXTS)


def write_kernels(path, tokens=(1, 8, 64, 256, 512, 1024, 2048)):
    """The three files of a folder."""
    dense = [f"{layer},{n},{us * (1 + n / 100)}" for layer, us in KERNELS.items() for n in tokens]
    (path / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    rows = [",".join(map(str, (*shape, attention_us(*shape)))) for shape in shapes()]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (path / "attention.csv").write_text("\n".join([header, *rows]))
    heads = [f"{layer},{n},{us + n}" for layer, us in (("lm_head", 1000.0), ("sampler", 20.0)) for n in (1, 8, 64)]
    (path / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tp1")
    write_kernels(path)
    return path


def test_samples_are_sums_of_kernels(folder):
    """At 64 tokens: 500 us of products and 4 + 4 + 6 between, times 1.64; both norms of a layer count."""
    samples, provenance = llmservingsim.import_samples(folder, "llama-3.1-8b")
    assert [fault_of(sample) for sample in samples] == [""] * len(samples)
    between = {s.new_tokens: s.latency_s for s in samples if s.op == "elementwise"}
    assert between[64] == pytest.approx(14e-6 * 1.64)
    passes = {
        (s.tokens, s.context_tokens, s.decodes, s.decode_context_tokens): s.latency_s
        for s in samples if s.op == "products"
    }  # fmt: skip
    assert passes[64, 1024, 0, 0] == pytest.approx(500e-6 * 1.64 + attention_us(64, 1024, 0, 0) * 1e-6)
    mixed = [s for s in samples if s.is_mixed and s.decodes == 64]
    assert mixed and all(s.latency_s > 500e-6 * 1.64 for s in mixed)
    assert {s.batch_size: s.latency_s for s in samples if s.op == "lm_head"}[8] == pytest.approx(1036e-6)
    assert "MIT" in provenance["tables"]


def test_shipped_samples_are_those_taken_of_a_table_that_has_more(tmp_path):
    """No more rows and no fewer: neighbours of what ships are left out."""
    samples = read_samples(DATA / "rtx-4090-imported.csv.gz")
    tokens = {sample.new_tokens for sample in samples if sample.op == "elementwise"}
    write_kernels(tmp_path, sorted({*tokens, *(n + 1 for n in tokens)}))
    taken, _ = llmservingsim.import_samples(tmp_path, "llama-3.1-8b")
    assert {sample.new_tokens for sample in taken if sample.op == "elementwise"} == tokens
    mixed = [
        (s.new_tokens, s.context_tokens, s.decodes, s.decode_context_tokens)
        for s in samples if s.is_mixed and not s.longest_context_tokens
    ]  # fmt: skip
    grids = [{shape[place] for shape in mixed} for place in range(4)]
    assert all(llmservingsim.is_sampled(shape) for shape in mixed)
    for place, grid in enumerate(grids):
        for value in grid:
            beside = [*mixed[0][:place], value + 1, *mixed[0][place + 1 :]]
            assert value + 1 in grid or not llmservingsim.is_sampled(tuple(beside))


def test_tables_are_the_kernels_as_they_are(folder):
    tables = llmservingsim.import_tables(folder, "llama-3.1-8b")
    assert dict(tables.layer)[256] == pytest.approx((500 + 14) * 1e-6 * 3.56)
    assert dict(tables.iteration)[256] == pytest.approx(5e-6 * 3.56)
    assert dict(tables.head)[64] == pytest.approx(1148e-6)
    assert (256, 1024, 8, 128, pytest.approx(attention_us(256, 1024, 8, 128) * 1e-6)) in tables.attention
    assert tables.fault() == ""


def test_the_command_writes_a_table_that_comes_back(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tp1"
    folder.mkdir()
    for name, few in (("CACHED", (0,)), ("CHUNKS", (16, 64, 256))):
        monkeypatch.setitem(globals(), name, few)
    write_kernels(folder)
    monkeypatch.setattr("sim.results.figures.style.save_figure", lambda path, figure: path)
    monkeypatch.setattr("calib.figure.draw_fit", lambda report: None)
    words = ["--model", "llama-3.1-8b", "--gpu", "h100", "--form", "table", "--out", str(tmp_path)]
    assert kvtwin.main(["profile", "import", "llmservingsim", str(folder), *words]) == 0
    profile = read_profile(tmp_path / "h100-imported.json")
    assert profile.form == "table"
    assert profile.kernels == llmservingsim.import_tables(folder, "llama-3.1-8b")
    assert "samples)" in capsys.readouterr().out


def test_a_folder_that_lacks_a_kernel_is_refused(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("o_proj", "other"))
    with pytest.raises(UserError, match=r"dense.csv: holds no rows of layer 'o_proj': give a tpN folder"):
        llmservingsim.import_samples(tmp_path, "llama-3.1-8b")
    with pytest.raises(UserError, match=r"dense.csv: cannot be read"):
        llmservingsim.import_samples(tmp_path / "none", "llama-3.1-8b")


def test_the_folder_above_and_a_mixture_of_experts_are_refused_by_name(folder, tmp_path):
    for tp in (1, 2):
        (tmp_path / f"tp{tp}").mkdir()
        (tmp_path / f"tp{tp}" / "dense.csv").write_text("layer,tokens,time_us")
    with pytest.raises(UserError, match=r"holds no dense\.csv but tp1, tp2: give one of those"):
        llmservingsim.import_samples(tmp_path, "llama-3.1-8b")
    (tmp_path / "tp1" / "moe.csv").write_text("")
    with pytest.raises(UserError, match=r"tp1: has moe\.csv: a mixture of experts cannot be imported"):
        llmservingsim.import_samples(tmp_path / "tp1", "llama-3.1-8b")


SKEW = "n,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_skew_us"


def with_skew(path, rows, runs=3):
    """A folder whose skew.csv has `runs` runs of each row (decodes, chunk, cached, shorter, longest, mean), each 1 us
    longer for a token of the longest beyond the mean."""
    write_kernels(path)
    lines = [SKEW]
    for n, chunk, cached, shorter, longest, mean in rows:
        alike = attention_us(chunk, cached, n, mean)
        times = runs * alike, runs * (alike + longest - mean)
        lines.append(",".join(map(str, (n, chunk, cached, shorter, longest, mean, *times))))
    (path / "skew.csv").write_text("\n".join(lines))


def test_decodes_of_two_lengths_become_samples(tmp_path):
    """Their times are sums over three runs. A chunk with a context, or of no size that is sampled, is left out."""
    rows = [(8, 0, 0, 128, 4096, 1024), (64, 64, 0, 512, 4096, 1024), (8, 64, 1024, 512, 4096, 1024),
            (8, 16, 0, 512, 4096, 1024)]  # fmt: skip
    with_skew(tmp_path, rows)
    samples, _ = llmservingsim.import_samples(tmp_path, "llama-3.1-8b")
    alone, beside = (s for s in samples if s.longest_context_tokens)
    assert fault_of(alone) == fault_of(beside) == ""
    assert alone.is_decode and (alone.batch_size, alone.context_tokens, alone.longest_context_tokens) == (8, 1024, 4096)
    assert alone.latency_s == pytest.approx((500 * 1.08 + attention_us(0, 0, 8, 1024) + 3072) * 1e-6)
    assert (beside.new_tokens, beside.decodes, beside.decode_context_tokens) == (64, 64, 1024)
    assert beside.latency_s == pytest.approx((500 * 2.28 + attention_us(64, 0, 64, 1024) + 3072) * 1e-6)


def test_times_of_two_lengths_that_fit_no_other_table_are_refused(tmp_path):
    with_skew(tmp_path, [(8, 0, 0, 128, 4096, 1024)], runs=1.4)
    with pytest.raises(UserError, match=r"skew.csv: its decodes of one length take 1.40 times those of attention.csv"):
        llmservingsim.import_samples(tmp_path, "llama-3.1-8b")

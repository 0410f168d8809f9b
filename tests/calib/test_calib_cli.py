"""`kvtwin profile`: what it prints and writes, and bad input, which ends in one line and exit status 2."""

import json
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path

import pytest
from calib_small import A100, copies, noisy, planted, shapes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

import calib.cli
import kvtwin
from calib.fit import fit_profile
from calib.samples import read_samples, samples_sha256, write_samples
from sim.cost.profile import LINEAR_UNITS, load_profile, read_profile, shipped_profiles
from sim.specs.hardware import BUILT_IN as SPECS
from sim.specs.hardware import load_hardware

ROOT = Path(kvtwin.__file__).parents[1]
MODELS = ("llama-2-7b", "llama-3.1-8b")
LINEAR = {"form": "linear", "prefill": [0.01, 1e-4, 0.0], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A file of samples: two models, copies both ways, with noise and outliers."""
    path = tmp_path_factory.mktemp("measured") / "samples.csv"
    derived = load_profile("a100-80g-derived")
    between = {name: derived.value(name) for name in ("elementwise_bytes_per_s", "elementwise_launch_s")}
    samples = [*planted(shapes(MODELS), {**A100, **between}), *copies("h2d", launch_s=2e-6, bytes_per_s=2.4e10)]
    write_samples(path, noisy([*samples, *copies("d2h", launch_s=2e-6, bytes_per_s=2.2e10)]), ["device: a card"])
    return path


def attempt(capsys, *words):
    """Exit status, standard output and standard error of one command."""
    try:
        status = kvtwin.main([str(word) for word in words])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def refused(capsys, *words, parts):
    status, out, error = attempt(capsys, *words)
    assert (status, out) == (2, "")
    assert error.startswith("kvtwin")
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    assert [part for part in parts if part not in error] == [], error


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def is_drawn(path):
    """What is on a picture, `test_calib_report` and pins say."""
    height, width, _ = imread(path).shape
    return height > 500 and width > 1000


# -- list, show, diff ------------------------------------------------------------------------------------------------


def test_list_shows_every_profile_its_errors_and_which_is_the_default(capsys):
    status, out, error = attempt(capsys, "profile", "list")
    assert (status, error) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_profiles()
    found = {line.split()[0]: line for line in lines}
    assert "prefill 2.5 % on unseen models, decode 3.4 % on unseen models  (default)" in found["a100-80g-imported"]
    assert "prefill 5.9 %, decode 4.1 %" in found["a100-80g-derived"]
    assert not found["a100-80g-derived"].endswith("(default)")
    assert found["l20-derived"].endswith("no measured errors  (default)")


def test_show_prints_what_was_measured_of_a_profile(capsys):
    """Pins show one of which nothing was."""
    status, out, error = attempt(capsys, "profile", "show", "h200-imported")
    assert (status, error) == (0, "")
    profile = load_profile("h200-imported")
    assert out.startswith(f"h200-imported: h200, imported, form roofline, {profile.content_hash[:12]}\n")
    assert "| flops_per_s | 726 TFLOP/s | 1." in out
    assert "range seen:\n  tokens: 128 to 32768\n  batch: 1 to 512\n  context_tokens: 128 to " in out
    assert "  unseen_model_decode_mape: 0.0" in out
    for kind, (*_, (tokens, factor)) in (("", profile.linear_factors), ("FP8 ", profile.fp8_linear_factors)):
        assert f"\n{kind}matrix products over their roofline, by tokens:\n  1: " in out
        assert f", {tokens:,}: {factor:.3f}\n" in out
    count = len(profile.all_reduce["2"])
    assert f"\nall-reduces on 2 GPUs: {count} points measured, 8,192 to {profile.all_reduce['2'][-1][0]:,.0f}" in out


def test_show_draws_a_profile_from_its_samples_shipped_or_named(capsys, measured, tmp_path):
    report = fit_profile(
        read_samples(measured), measured.parent, load_hardware("a100-80g"), load_profile("a100-80g-derived"),
        name="mine", status="measured", provenance={},
    )  # fmt: skip
    path, figure = tmp_path / "mine.json", tmp_path / "fit.png"
    path.write_bytes(report.profile.to_json())
    for words in (["a100-80g-imported"], [path, "--samples", measured]):
        status, out, _ = attempt(capsys, "profile", "show", *words, "--figure", figure)
        assert status == 0 and out.endswith(f"\nwrote {figure}\n")
        assert is_drawn(figure)
        figure.unlink()


# -- fit and import --------------------------------------------------------------------------------------------------


def test_fit_writes_profile_report_and_figure_each_whole(capsys, measured, tmp_path, monkeypatch):
    moves, replace = [], Path.replace

    def recorded(self, target):
        moves.append((self.name, Path(target).name))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", recorded)
    out_folder = tmp_path / "new" / "folder"
    words = ["profile", "fit", measured, "--gpu", "a100-80g", "--name", "mine", "--out", out_folder]
    status, out, error = attempt(capsys, *words)
    assert status == 0
    files = [f"mine.{kind}" for kind in ("json", "md", "png")]
    assert names(out_folder) == files
    # Half a file is never seen: each is written under another name and moved.
    assert moves == [(f"{name}.part", name) for name in files]
    assert [line for line in out.splitlines() if line.startswith("wrote")] == [
        f"wrote {out_folder / name}" for name in files
    ]
    assert is_drawn(out_folder / "mine.png")
    profile = read_profile(out_folder / "mine.json")
    assert (profile.name, profile.gpu, profile.status) == ("mine", "a100-80g", "measured")
    rates = ("flops_per_s", "hbm_bytes_per_s", "kv_bytes_per_s")
    assert {n: profile.value(n) for n in rates} == pytest.approx({n: A100[n] for n in rates}, rel=0.15)
    assert profile.provenance.pop("date")
    assert profile.provenance == {
        "device": "a card", "samples": "samples.csv", "samples_sha256": samples_sha256(measured),
        "base": "a100-80g-derived, for what the samples do not tell",
    }  # fmt: skip
    assert f"\n| `flops_per_s` | {profile.value('flops_per_s') / 1e12:.4g} TFLOP/s | " in out
    assert (out_folder / "mine.md").read_text().startswith("# mine\n")
    assert error == (
        "not measured, carried over: elementwise_bytes_per_s, elementwise_launch_s, "
        "host_memcpy_bytes_per_s, allreduce_bytes_per_s, allreduce_latency_s\n"
    )


def test_a_figure_that_cannot_be_written_leaves_the_old_one(capsys, measured, tmp_path, monkeypatch):
    (tmp_path / "mine.png").write_bytes(b"old")

    def full(self, file, **options):
        file.write(b"\x89PN")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FigureCanvasAgg, "print_png", full)
    words = ["profile", "fit", measured, "--gpu", "a100-80g", "--name", "mine", "--out", tmp_path]
    status, _, error = attempt(capsys, *words)
    assert status == 2
    assert f"cannot write into {tmp_path}" in error
    assert (tmp_path / "mine.png").read_bytes() == b"old"
    assert read_profile(tmp_path / "mine.json").name == "mine"


@pytest.fixture
def undrawn(monkeypatch):
    """Fits without their figures, which take longer than all the rest; returns where they would have gone."""
    drawn = []
    for module in ("calib.figure", "sim.results.figures.style"):
        monkeypatch.setattr(f"{module}.save_figure", lambda path, figure: drawn.append(path) or path, raising=False)
    monkeypatch.setattr("calib.figure.draw_fit", lambda report: None)
    return drawn


def test_the_default_name_says_gpu_and_status_and_the_file_serves_a_run(capsys, measured, tmp_path, undrawn):
    for words in (["fit", measured, "--gpu", "A100-80G"], ["import", "samples", measured, "--gpu", "a100-80g"]):
        assert attempt(capsys, "profile", *words, "--out", tmp_path)[0] == 0
    assert names(tmp_path) == [f"a100-80g-{s}.{kind}" for s in ("imported", "measured") for kind in ("json", "md")]
    assert [path.name for path in undrawn] == ["a100-80g-measured.png", "a100-80g-imported.png"]
    assert read_profile(tmp_path / "a100-80g-imported.json").status == "imported"
    profile = tmp_path / "a100-80g-measured.json"
    run = "run --workload fixed --num-prompts 3 --input-len 20 --output-len 3 --quiet --gpu a100-80g"
    assert kvtwin.main([*run.split(), "--profile", str(profile), "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["profile"]["name"] == "a100-80g-measured"


def test_a_base_completes_a_gpu_that_nothing_is_shipped_for(capsys, measured, tmp_path, undrawn):
    gpu = tmp_path / "gpu.json"
    data = json.loads((ROOT / "sim" / "specs" / "gpus" / "a100-80g.json").read_text())
    gpu.write_text(json.dumps({**data, "name": "mine"}))
    words = ["profile", "fit", measured, "--gpu", gpu, "--out", tmp_path / "out"]
    refused(capsys, *words, parts=["--base: no profile is shipped for gpu 'mine'", "name one"])
    assert attempt(capsys, *words, "--base", "l20-derived")[0] == 0
    profile = read_profile(tmp_path / "out" / "mine-measured.json")
    assert profile.constants["allreduce_latency_s"].source.startswith("carried over from l20-derived: ")


def test_fit_of_form_linear_writes_coefficients_that_show_reads_and_draws(capsys, tmp_path):
    path = tmp_path / "steps.csv"
    steps = planted(shapes(("llama-2-7b",), "step"), {**A100, "step_overhead_s": 3e-3})
    write_samples(path, noisy([*steps, *copies("h2d", launch_s=2e-6, bytes_per_s=2.4e10)]))
    words = ["profile", "fit", path, "--gpu", "a100-80g", "--form", "linear", "--out", tmp_path / "out"]
    status, out, error = attempt(capsys, *words)
    assert (status, error) == (0, "")
    assert "papers" not in out
    assert names(tmp_path / "out") == [f"a100-80g-measured.{kind}" for kind in ("json", "md", "png")]
    assert is_drawn(tmp_path / "out" / "a100-80g-measured.png")
    profile = tmp_path / "out" / "a100-80g-measured.json"
    assert list(read_profile(profile).constants) == list(LINEAR_UNITS)
    status, out, _ = attempt(capsys, "profile", "show", profile)
    assert status == 0 and "| prefill_s_per_token | " in out
    refused(capsys, *words[:3], "--gpu", "l20", "--form", "cubic", parts=["invalid choice: 'cubic'"])


def steps_table(folder, factors=(1.0,)):
    """Steps of 20 ms and more of one model, growing with everything; times factors, row by row in turn."""
    path = folder / "steps.csv"
    rows = ["model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"]
    for (p, b), f in zip(product((128, 512, 2048), (1, 2, 4, 8)), cycle(factors), strict=False):
        rows.append(f"llama2,a100,1,{p},{b},128,{f * (20 + p * b / 16)},{f * (20 + p * b / 2000 + b / 8)}")
    path.write_text("\n".join(rows))
    return path


def test_import_steps_writes_samples_beside_the_profile(capsys, tmp_path, undrawn):
    words = ["profile", "import", "steps", steps_table(tmp_path), "--hardware", "a100", "--model", "llama2=llama-2-7b"]
    status, out, error = attempt(capsys, *words, "--gpu", "a100-80g", "--out", tmp_path / "out", "--name", "his")
    assert status == 0
    assert names(tmp_path / "out") == ["his.csv.gz", "his.json", "his.md"]
    assert f"wrote {tmp_path / 'out' / 'his.csv.gz'} (24 samples)" in out
    profile = read_profile(tmp_path / "out" / "his.json")
    samples = read_samples(tmp_path / "out" / "his.csv.gz")
    assert len(samples) == 24
    assert profile.provenance["samples"] == "his.csv.gz"
    assert profile.provenance["samples_sha256"] == samples_sha256(tmp_path / "out" / "his.csv.gz")
    assert profile.provenance["tables"] == "steps.csv: whole steps, rows of hardware 'a100'"
    assert profile.value("step_overhead_s") == 0.0
    assert "step_overhead_s" not in error


@pytest.mark.parametrize(("factors", "part"), [((0.1,), "is above the peak of"), ((1.0, 9.0), "samples: ")])
def test_steps_faster_than_the_gpu_and_steps_without_any_order_are_refused(capsys, tmp_path, factors, part):
    """A table of another GPU's steps, or of whatever else, makes no profile."""
    words = ["profile", "import", "steps", steps_table(tmp_path, factors), "--model", "llama2=llama-2-7b"]
    words += ["--hardware", "a100"]
    status, _, error = attempt(capsys, *words, "--gpu", "a100-80g", "--out", tmp_path / "out")
    assert status == 2 and part in error
    assert not (tmp_path / "out" / "a100-80g-imported.json").exists()


@pytest.fixture
def calibrated(monkeypatch, measured):
    """Calibrations that write the samples given; returns what they were asked for."""
    from calib.measure import run  # noqa: PLC0415

    asked = []

    def calibrate(device, models, out, **options):
        asked.append((device, models, options))
        write_samples(out / "samples.csv", read_samples(measured), ["device: a card"])

    monkeypatch.setattr(run, "calibrate", calibrate)
    monkeypatch.setattr(run, "device_name", lambda device: {"cuda": "NVIDIA A100-SXM4-80GB"}[device])
    return asked


def test_calibrate_measures_and_fits(capsys, calibrated, tmp_path, undrawn):
    """The GPU by the name that CUDA gives it; a CPU needs none."""
    words = ["calibrate", "--device", "cuda", "--model", "llama-2-7b", "--model", "llama-3.1-8b", "--out", tmp_path]
    assert attempt(capsys, *words, "--quick", "--seed", "5")[0] == 0
    options = {"quick": True, "dtype": None, "seed": 5, "lock_mhz": None}
    assert calibrated == [("cuda", ["llama-2-7b", "llama-3.1-8b"], options)]
    profile = read_profile(tmp_path / "a100-80g-measured.json")
    assert (profile.gpu, profile.status, profile.form) == ("a100-80g", "measured", "roofline")
    more = ("--gpu", "a100-40g", "--dtype", "float16", "--name", "mine", "--lock-clocks")
    assert attempt(capsys, *words, *more)[0] == attempt(capsys, *words, *more, "1400")[0] == 0
    options = {"quick": False, "dtype": "float16", "seed": 0}
    assert [asked[2] for asked in calibrated[1:]] == [{**options, "lock_mhz": mhz} for mhz in (0, 1400)]
    assert read_profile(tmp_path / "mine.json").gpu == "a100-40g"


@pytest.mark.parametrize(
    ("device", "models", "asked", "form"),
    [
        ("cpu", ("llama-2-7b",), (), "linear"),
        ("cpu", ("llama-2-7b", "llama-3.1-8b"), (), "roofline"),
        ("cuda", ("llama-2-7b",), (), "roofline"),
        ("cpu", ("llama-2-7b",), ("--form", "roofline"), "roofline"),
        ("cuda", ("llama-2-7b",), ("--form", "linear"), "linear"),
    ],
)
def test_one_model_on_a_cpu_is_fitted_linear(capsys, calibrated, tmp_path, monkeypatch, device, models, asked, form):
    found = []
    monkeypatch.setattr(calib.cli, "fit_samples", lambda *given: found.append(given))
    monkeypatch.setattr(calib.cli, "write_report", lambda report, out: 0)
    words = [word for model in models for word in ("--model", model)]
    assert attempt(capsys, "calibrate", "--device", device, *words, *asked, "--out", tmp_path)[0] == 0
    gpu = "cpu" if device == "cpu" else "a100-80g"
    ((paths, hardware, base, name, status, fitted),) = found
    assert (paths, hardware.name, base, name) == ([tmp_path / "samples.csv"], gpu, None, f"{gpu}-measured")
    assert (status, fitted) == ("measured", form)


# -- derive ----------------------------------------------------------------------------------------------------------


def test_derive_writes_what_the_siblings_reach(capsys, tmp_path):
    words = ["profile", "derive", "--gpu", "l20", "--sibling", "rtx-4090-imported", "--compute-share", "0.7"]
    words += ["--memory-sibling", "l40s-imported"]
    path = tmp_path / "deep" / "l20-derived.json"
    assert attempt(capsys, *words, "--reason", "a guess", "--out", path.parent)[:2] == (0, f"wrote {path}\n")
    profile = read_profile(path)
    assert profile.value("flops_per_s") == pytest.approx(0.7 * 119.5e12)
    assert profile.constants["flops_per_s"].source.endswith("a guess")
    assert profile.value("roofline_exponent") == load_profile("rtx-4090-imported").value("roofline_exponent")
    share = load_profile("l40s-imported").value("hbm_bytes_per_s") / load_hardware("l40s").hbm_bytes_per_s
    assert profile.value("hbm_bytes_per_s") == pytest.approx(share * load_hardware("l20").hbm_bytes_per_s)


def test_derive_copies_at_the_rate_of_the_gpus_own_link(capsys, tmp_path):
    """A Grace Blackwell's link to its host is no PCIe."""
    spec = json.loads((SPECS / "gb200.json").read_text()) | {"name": "my-gpu"}
    (tmp_path / "my-gpu.json").write_text(json.dumps(spec))
    words = ["profile", "derive", "--gpu", tmp_path / "my-gpu.json", "--sibling", "b200-imported", "--out", tmp_path]
    assert attempt(capsys, *words)[0] == 0
    profile = read_profile(tmp_path / "my-gpu-derived.json")
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        assert profile.value(name) == 180e9
        assert profile.constants[name].source == "assumed: pcie_bytes_per_s of the specification"


# -- bad input -------------------------------------------------------------------------------------------------------


BAD = [
    ("profile show l40s-importd", ["did you mean 'l40s-imported'?"]),
    ("profile diff l20-derived nope", ["profile: 'nope' is neither a built-in name nor an existing path"]),
    ("profile diff l20-derived {linear}", ["form roofline", "form linear", "compare like forms"]),
    ("profile fit {good} --gpu a100-80g --constants flops_per_s", ["--constants: goes with --bench; samples tell all"]),
    ("profile fit {good} --gpu a100-80g --form linear --gdn {good}", ["--gdn: form linear has no constants of such"]),
    ("profile fit {tmp}/none.csv --gpu a100-80g", ["none.csv: cannot be read (No such file or directory)"]),
    ("profile fit {good} --gpu a100-80g --base {linear}", ["--base: linear is of form linear", "roofline"]),
    ("profile fit {good} --gpu a100-80g --out {good}", ["--out: cannot create folder", "name another"]),
    ("profile fit {good} --gpu a100-80g --out {tmp} --name a/b", ["--name: 'a/b' cannot name a file"]),
    ("profile import vidur --model llama-2-7b --mlp {good} --attention {good} --gpu l20", ["column 'time_stats."]),
    ("profile import steps {good} --model a=llama-2-7b --gpu l20", ["column 'model' is missing: is this the right"]),
    ("profile import steps {good} --model llama-2-7b --gpu l20", ["--model: 'llama-2-7b' is not THEIRS=OURS"]),
    ("profile import aiconfigurator --system l40s --tables {tmp}", ["holds no gemm_perf.parquet"]),
    ("profile derive --gpu l20 --sibling l40s-imported --compute-share 2 --reason x", ["2.0 is not a share"]),
    ("profile derive --gpu l20 --sibling l40s-imported --compute-share 0.5", ["say in --reason why"]),
]


@pytest.mark.parametrize(("line", "parts"), BAD)
def test_bad_input_ends_in_one_line_and_exit_status_2(capsys, tmp_path, measured, line, parts):
    (linear := tmp_path / "linear.json").write_text(json.dumps(LINEAR))
    words = [word.format(tmp=tmp_path, good=measured, linear=linear) for word in line.split()]
    refused(capsys, *words, parts=parts)
    assert names(tmp_path) == ["linear.json"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("l20-derived --figure {tmp}/f.png", "--figure: the samples of l20-derived are not shipped: name them with"),
        ("l40s-imported --figure {tmp}/f.png --samples {tmp}/none.csv", "none.csv: cannot be read (No such file"),
        ("l40s-imported --figure {tmp}/f.png --samples {tmp}", "cannot be read (Is a directory)"),
    ],
)
def test_a_profile_that_cannot_be_drawn_is_still_shown(capsys, tmp_path, line, part):
    status, out, error = attempt(capsys, "profile", "show", *line.format(tmp=tmp_path).split())
    assert status == 2
    assert "provenance:" in out
    assert error.startswith("kvtwin: ") and error.count("\n") == 1
    assert part in error
    assert names(tmp_path) == []


WORDS = ["nan", "inf", "-1", "0", "1e-5", "9" * 30, '"', "#", "layers", "step", "h2d", "all_reduce", "llama-2-70b", "2"]
cells = st.text(max_size=8) | st.sampled_from(WORDS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15), cells), min_size=1, max_size=4), cut=st.booleans()
)
def test_whatever_stands_in_the_samples_a_fit_ends_well_or_in_one_line(
    capsys, tmp_path_factory, measured, edits, cut, monkeypatch
):
    monkeypatch.setattr(calib.cli, "write_report", lambda report, out: 0)
    lines = [line.split(",") for line in measured.read_text().splitlines()[: 20 if cut else 60]]
    for row, column, cell in edits:
        line = lines[row % len(lines)]
        line[column % len(line)] = cell
    folder = tmp_path_factory.mktemp("any")
    path = folder / "any.csv"
    path.write_bytes("\n".join(",".join(line) for line in lines).encode())
    status, _, error = attempt(capsys, "profile", "fit", path, "--gpu", "a100-80g", "--out", folder)
    assert (status, error) == (0, "") or (status == 2 and error.startswith("kvtwin: ") and error.count("\n") == 1)


def test_listing_needs_no_fit_and_fitting_no_torch(measured, tmp_path):
    words = ["profile", "fit", str(measured), "--gpu", "a100-80g", "--out", str(tmp_path)]
    code = (
        "import sys, kvtwin\n"
        "kvtwin.main(['profile', 'list'])\n"
        "assert not {'scipy', 'matplotlib', 'torch'} & set(sys.modules)\n"
        f"assert kvtwin.main({words!r}) == 0\n"
        "assert 'scipy' in sys.modules and 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert names(tmp_path) == [f"a100-80g-measured.{kind}" for kind in ("json", "md", "png")]

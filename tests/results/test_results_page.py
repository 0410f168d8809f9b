"""The HTML report: what it says, that it is safe and whole, and how it looks and behaves in a browser."""

import asyncio
import json
import re
import shutil
from dataclasses import replace

import browser
import numpy as np
import pytest
from msgspec import UNSET, structs

import kvtwin
from sim.errors import UserError
from sim.results.comparison import write_comparison
from sim.results.figures.style import percent_text, seconds_text
from sim.results.page import saved
from sim.results.page.charts import charts
from sim.results.page.page import render
from sim.results.page.saved import Section, read_run, read_sections
from sim.results.page.studies import MOST_ROWS, kind_of, read_study
from sim.results.sections import SLOClass

WORDS = ["--workload", "sharegpt", "--num-prompts", "60", "--request-rate", "12", "--gpu", "l20", "--quiet"]
WORDS += ["--num-gpu-blocks-override", "400", "--goodput", "ttft:3000", "tpot:200"]
CHARTS = ["parts", "limits", "ttft", "tpot", "arrivals", "memory0", "memory1", "memory2", "memory3", "memory4", "lanes"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison's folder, made once and only read."""
    folder = tmp_path_factory.mktemp("report") / "compared"
    words = ["--policy", "vllm-recompute", "--policy", "layerkv:slo-aware=false", "--no-figures"]
    assert kvtwin.main(["compare", *WORDS, *words, "--layerkv-threshold", "0.02", "--out", str(folder)]) == 0
    assert kvtwin.main(["report", str(folder)]) == 0
    return folder


def figures_of(page):
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)[1])


def test_what_was_saved_comes_back_as_the_figures_need_it(compared):
    (section,) = read_sections([compared])
    run = section.runs[1]
    assert run.label == "layerkv:slo-aware=false"
    assert run.result.mean_ttft_ms == pytest.approx(float(run.ttft_s.mean()) * 1e3)
    assert run.result.mean_tpot_ms == pytest.approx(float(run.tpot_s.mean()) * 1e3)
    assert run.result.mean_queue_ms == pytest.approx(float(run.queue_s.mean()) * 1e3)
    assert run.series["bound_memory_s"][-1] > 0.0
    assert set(json.loads((compared / "comparison.json").read_text())["sentences"]) <= set(section.sentences)


def test_the_page_has_tables_figures_provenance_and_the_way_back(compared):
    page = (compared / "report.html").read_text()
    assert [name.partition("-")[2] for name in figures_of(page)] == CHARTS
    for words in ("With layerkv:slo-aware=false instead of vllm-recompute", "l20-derived (derived, not measured)",
                  "kvtwin compare --scenario scenario.toml", "layerkv-threshold = 0.02"):  # fmt: skip
        assert words in page
    assert not re.search(r'(src|href)="(?!#|data:)', page.replace("'", '"').partition("<script>")[0])


def test_the_same_runs_give_the_same_page(compared):
    assert render(read_sections([compared])) == (compared / "report.html").read_text()


def test_the_scenario_that_was_asked_for_runs_again(compared, tmp_path):
    shutil.copy(compared / "scenario.toml", tmp_path)
    words = ["--scenario", str(tmp_path / "scenario.toml"), "--out", str(tmp_path / "again"), "--quiet"]
    assert kvtwin.main(["compare", *words]) == 0
    assert (tmp_path / "again" / "comparison.json").read_bytes() == (compared / "comparison.json").read_bytes()


def test_parts_in_the_figure_are_those_of_the_result(compared):
    parts = figures_of((compared / "report.html").read_text())["0-parts"]["data"]
    for i, run in enumerate(read_sections([compared])[0].runs):
        assert sum(bar["x"][i] for bar in parts) == pytest.approx(run.result.mean_e2el_ms / 1e3, abs=1e-5)


def test_shares_of_limits_and_idleness_fill_the_time(compared):
    limits = figures_of((compared / "report.html").read_text())["0-limits"]["data"]
    for axis in ("y", "y2"):
        total = np.sum([bar["y"] for bar in limits if bar["yaxis"] == axis], axis=0)
        assert total == pytest.approx(np.full(total.size, 100.0), abs=0.2)


def test_names_that_look_like_markup_are_text(compared):
    (section,) = read_sections([compared])
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    run = section.runs[0]
    object.__setattr__(run, "label", evil)
    page = render([Section([run], [evil], evil, evil)])
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("</script>") == 3


def test_slos_of_requests_are_told_by_class(compared):
    """In the line that says what was asked, and in the first table."""
    (section,) = read_sections([compared])
    given, own = section.runs
    classes = [SLOClass(slos="ttft:500 tpot:50", num_prompts=40, good=10)]
    object.__setattr__(given, "result", structs.replace(given.result, slo_classes=classes))
    page = render([Section([given], [], None, None)])
    assert "SLOs: TTFT 3000 ms, TPOT 200 ms, those of each request." in page
    assert page.count('<th scope="row">SLOs met: ttft:500 tpot:50 (%)</th><td>25.0</td>') == 2
    # So many unlike ones that no class is told.
    object.__setattr__(own, "result", structs.replace(own.result, scenario=replace(own.result.scenario, goodput=())))
    assert "SLOs: those of each request." in render([Section([own], [], None, None)])


def test_single_runs_share_a_section_and_are_told_apart(compared, tmp_path):
    shutil.copytree(compared / "vllm-recompute", tmp_path / "a")
    shutil.copytree(compared / "vllm-recompute", tmp_path / "b")
    (section,) = read_sections([tmp_path / "a", tmp_path / "b"])
    assert [run.label for run in section.runs] == ["vllm-recompute (a)", "vllm-recompute (b)"]
    # Folders of one name are told apart by their paths.
    other = shutil.copytree(tmp_path / "a", tmp_path / "c" / "a")
    (section,) = read_sections([tmp_path / "a", other])
    assert [run.label for run in section.runs] == [f"vllm-recompute ({place})" for place in (tmp_path / "a", other)]
    # One whose label no other has keeps it.
    (section,) = read_sections([tmp_path / "a", compared / "layerkv_slo-aware=false"])
    assert [run.label for run in section.runs] == ["vllm-recompute", "layerkv:slo-aware=false"]
    # A run without a time series has the figures that need none.
    (tmp_path / "a" / "series.csv").unlink()
    assert [chart.name for chart in charts([read_run(tmp_path / "a")])] == ["parts", "ttft", "tpot", "arrivals"]
    assert "What was asked" in render(read_sections([tmp_path / "a"]))


def test_a_folder_of_many_runs_shows_its_answer_its_pictures_and_its_table(tmp_path, capsys):
    """Of the commands that make many runs, each known by its file; nothing of a file becomes markup."""
    place = tmp_path / "best"
    place.mkdir()
    (place / "tune.json").write_text("{}")
    (place / "tune.txt").write_text("vllm-v1: 4 GPUs <b>\n  layerkv: 5 GPUs\n")
    rows = "".join(f"p{i},{i / 3},\n" for i in range(MOST_ROWS + 7))
    (place / "candidates.csv").write_text("policy,value,error\n" + rows)
    (place / "tune.png").write_bytes(b"\x89PNG")
    assert kvtwin.main(["report", str(place)]) == 0
    page = (place / "report.html").read_text()
    assert "vllm-v1: 4 GPUs &lt;b&gt;" in page and "layerkv: 5 GPUs</li>" in page.replace("</p>\n", "").replace(
        "<p>", ""
    )
    assert "data:image/png;base64,iVBORw==" in page
    assert "<td>0.33333</td>" in page and "7 rows more are there" in page and ">error<" not in page
    (place / "candidates.csv").unlink()
    assert kvtwin.main(["report", str(place)]) == 2
    assert "candidates.csv: not a table" in capsys.readouterr().err


def test_runs_of_two_scenarios_say_in_what_they_differ(compared, tmp_path):
    place = tmp_path / "other"
    assert (
        kvtwin.main(["run", *WORDS, "--request-rate", "6", "--policy", "vllm-swap", "--out", str(place), "--quiet"])
        == 0
    )
    (section,) = read_sections([compared / "vllm-recompute", place])
    assert section.sentences[0].startswith("These runs are not of one scenario: ")
    assert "request-rate is 12.0 in vllm-recompute, 6.0 in vllm-swap" in section.sentences[0]
    assert "one scenario" not in read_sections([compared])[0].sentences[0]


def test_a_run_put_where_a_comparison_had_one_is_refused(compared, tmp_path, capsys):
    shutil.copytree(compared, tmp_path / "compared")
    place = tmp_path / "compared" / "vllm-recompute"
    assert kvtwin.main(["run", *WORDS, "--num-prompts", "3", "--out", str(place), "--quiet"]) == 0
    assert kvtwin.main(["report", str(tmp_path / "compared")]) == 2
    assert f"{place}/result.json: completed is 3, in comparison.json above it 60: " in capsys.readouterr().err


def test_seconds_and_shares_read_at_their_limits():
    texts = {
        -7e-13: "0 ms", 4.9e-7: "0 ms", 5e-7: "0.0005 ms", 6e-6: "0.006 ms", 0.9994: "999 ms", 0.9995: "1 s",
        -0.25: "-250 ms", 1.239: "1.24 s", 999.4: "999 s", 999.5: "1,000 s", 12345.6: "12,346 s",
    }  # fmt: skip
    assert {value: seconds_text(value).replace("\xa0", " ") for value in texts} == texts
    shares = {9e-15: "0 %", 4.9e-6: "0 %", 5e-6: "0.0005 %", 2e-5: "0.002 %", 0.12345: "12.3 %", 1.0: "100 %"}
    assert {value: percent_text(value).replace("\xa0", " ") for value in shares} == shares


def test_several_engines_have_a_figure_of_theirs(tmp_path):
    words = ["--policy", "distserve", "--prefill-replicas", "1", "--decode-replicas", "2", "--link-gbps", "100"]
    assert kvtwin.main(["run", *WORDS, *words, "--out", str(tmp_path)]) == 0
    (engines,) = [chart for chart in charts([read_run(tmp_path)]) if chart.name == "engines"]
    assert engines.data[0]["x"] == ["0 prefill", "1 decode", "2 decode"]
    result = read_run(tmp_path).result
    assert [row[2] for row in engines.rows] == [f"{one.num_prompts}" for one in result.engines]
    busy = [one.lanes.compute.busy_s / result.makespan_s for one in result.engines]
    assert engines.data[0]["y"] == pytest.approx([100 * share for share in busy], abs=1e-3)


def test_a_run_past_the_limit_of_arrays_is_read_from_its_table(tmp_path, monkeypatch, capsys):
    """Those that got no token are left out, as they are where arrays say why."""
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,90,5\n0,5000,5\n0.5,70,1\n")
    words = ["--trace", str(tmp_path / "t.csv"), "--gpu", "l20", "--max-model-len", "1024", "--quiet"]
    for name, limit in (("arrays", 3), ("parquet", 2), ("csv", 2)):
        monkeypatch.setattr("sim.results.metrics.ARRAY_LIMIT", limit)
        if name == "csv":
            monkeypatch.setattr("sim.run.files.find_spec", lambda name: None)
        assert kvtwin.main(["run", *words, "--out", str(tmp_path / name)]) == 0
    whole, *tables = (read_run(tmp_path / name) for name in ("arrays", "parquet", "csv"))
    for short in tables:
        assert whole.result.ttfts != UNSET and short.result.ttfts == short.result.errors == UNSET
        for name in ("ttft_s", "tpot_s", "queue_s", "arrival_s"):
            assert getattr(short, name).tolist() == pytest.approx(getattr(whole, name).tolist(), abs=1e-5)
        assert [len(short.ttft_s), len(short.tpot_s)] == [2, 1]
    for folder, name in zip(("parquet", "csv"), ("requests.parquet", "requests.csv"), strict=True):
        path, text = tmp_path / folder / name, (tmp_path / folder / name).read_bytes()
        path.write_text("arrival_s\n0\n")
        with pytest.raises(UserError, match=rf"{name}: not a per-request table \(.*\); run it again"):
            read_run(tmp_path / folder)
        path.write_bytes(text)
    monkeypatch.setattr("sim.results.saved_tables.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"requests\.parquet: is read with pyarrow, which is not installed: pip"):
        read_run(tmp_path / "parquet")
    capsys.readouterr()
    folder = tmp_path / "csv"
    assert kvtwin.main(["explain", str(folder), "--request", "0"]) == 2
    assert capsys.readouterr().err == (
        f"kvtwin: {folder / 'result.json'}: more than 100000 requests: the arrays are in the per-request table; "
        "explain reads runs of up to 100,000 requests\n"
    )


def test_a_page_without_its_libraries_says_what_to_install(monkeypatch):
    monkeypatch.setattr("sim.results.page.page.find_spec", lambda name: None if name == "plotly" else name)
    with pytest.raises(UserError, match=r"^report: needs plotly; pip install 'kvtwin\[report\]'$"):
        render([])


@pytest.mark.parametrize("what", ["missing", "broken"])
def test_folders_without_runs_are_refused_in_a_line(tmp_path, capsys, what):
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what == "broken":
        (folder / "result.json").write_text("{}")
    with pytest.raises(UserError, match=str(folder)):
        read_sections([folder])
    assert kvtwin.main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("result.json", ('"ttfts":[', '"ttfts":[NaN,'), "not JSON (NaN is not a finite number)"),
        ("series.csv", ("time_s,", "time_s,more,"), "not a time series"),
        ("scenario.toml", ("=", "\udcff="), "not UTF-8 text"),
    ],
)
def test_damaged_files_are_named(compared, tmp_path, capsys, name, text, told):
    shutil.copytree(compared / "vllm-recompute", tmp_path / "run")
    path = tmp_path / "run" / name
    shutil.copy(compared / "scenario.toml", tmp_path / "run")
    path.write_bytes(path.read_text().replace(*text, 1).encode(errors="surrogateescape"))
    assert kvtwin.main(["report", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvtwin: {path}: ") and told in error and error.count("\n") == 1


def test_a_comparison_of_nothing_is_refused(tmp_path):
    write_comparison(tmp_path, [])
    path = tmp_path / saved.COMPARISON_FILE
    with pytest.raises(UserError) as caught:
        read_sections([tmp_path])
    assert str(caught.value) == f"{path}: no policy was run; compare some"


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(browser.PATH is None, reason="no Chromium on this machine")
def test_in_a_browser_it_draws_offline_and_quietly_at_any_width_by_keyboard_and_on_paper(compared):
    pytest.importorskip("aiohttp")
    path = compared / "report.html"

    async def look(page):
        await page.open(path)
        drawn = "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.main-svg path').length)"
        assert min(await page.evaluate(drawn)) > 0
        # Dark: other colours, no reload.
        ink = "getComputedStyle(document.querySelector('.chart .xtitle')).fill"
        light = await page.evaluate(ink)
        await page.scheme("dark")
        while await page.evaluate(ink) == light:
            await asyncio.sleep(0.05)
        # By keyboard to the first policy's box, which hides its lines in all figures.
        visible = "document.querySelector('[data-figure=\"0-ttft\"]').querySelectorAll('.scatterlayer .trace').length"
        assert await page.evaluate(visible) == 2
        for _ in range(20):
            await page.press("Tab")
            if await page.evaluate("document.activeElement.type === 'checkbox'"):
                break
        await page.press(" ")
        assert await page.evaluate("document.activeElement.checked") is False
        assert await page.evaluate(visible) == 1
        reached = "[...document.querySelectorAll('.chart, summary, input, .scroll')].every(e => e.tabIndex >= 0)"
        assert await page.evaluate(reached)
        assert (await page.pdf()).startswith(b"%PDF")
        await page.open(path, width=360, height=740)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        assert max(await page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")) <= 360
        return page.errors, page.requests

    errors, requests = browser.visit(look)
    assert errors == []
    assert set(requests) == {path.resolve().as_uri()}


def test_markdown_answers_are_rendered_and_nothing_in_them_is_markup(tmp_path):
    """A plan's page has its table and its commands; what looks like HTML is text."""
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "plan.md").write_text("# Plan\n\n4 <b>h100</b>\n\n| GPUs |\n|--:|\n| 4 |\n\n```\nvllm serve x\n```\n")
    kind = kind_of(tmp_path)
    assert kind is not None
    html = read_study(tmp_path, kind).html
    assert "<p>4 &lt;b&gt;h100&lt;/b&gt;</p>" in html and "Plan" not in html
    assert '<td style="text-align:right">4</td>' in html and "<pre><code>vllm serve x\n</code></pre>" in html

"""The page itself: sections of saved runs put into a template, with its styles, scripts and figures inlined."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import UNSET

from sim.errors import UserError
from sim.files import make_folder, write_atomically
from sim.results.comparison import table
from sim.results.figures.data import FigureRun
from sim.results.page.charts import charts
from sim.results.page.saved import Section
from sim.results.page.studies import Study
from sim.results.report import METRICS, OWN, accuracy_sentences, constants, deployment, engine_overhead, span
from sim.results.schema import Result
from sim.results.sections import Accuracy
from sim.results.tails import cause_rows, head_sentences, neighbour_sentences
from sim.version import VERSION

HERE = Path(__file__).parent
KEY_METRICS = ("completed", "ignored", "request_offered", "request_throughput", "request_goodput")
KEY_METRICS += ("goodput_attainment_percent", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
KEY_METRICS += ("p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "mean_queue_ms", "num_preemptions", "host_memory_gib")
"""Rows of the first table; all metrics are in a second one."""


def write_page(path: Path, sections: Sequence[Section], studies: Sequence[Study] = ()) -> None:
    """Write all as one self-contained HTML page; UserError where what it needs is not installed."""
    page = render(sections, studies)
    make_folder(path.parent, "--out")
    write_atomically(path, page.encode())


def render(sections: Sequence[Section], studies: Sequence[Study] = ()) -> str:
    """The page."""
    missing = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if missing:
        raise UserError(f"report: needs {' and '.join(missing)}; pip install 'kvtwin[report]'")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - an extra

    views = [_view(section) for section in sections]
    figures = {
        f"{i}-{chart.name}": {"data": chart.data, "layout": chart.layout}
        for i, view in enumerate(views)
        for chart in view["charts"]
    }
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        views=views,
        studies=studies,
        titles=[*(view["title"] for view in views), *(study.title for study in studies)],
        version=VERSION,
        style=_inlined(HERE / "page.css"),
        script=_inlined(HERE / "page.js"),
        plotly=_inlined(_plotly()),
        figures=_in_script(figures),
    )


def _view(section: Section) -> dict[str, Any]:
    """A section as the template shows it."""
    runs = section.runs
    results = [run.result for run in runs]
    # Labels of the runs, which tell alike ones apart.
    scenario, rows = results[0].scenario, table(results)
    return {
        "title": deployment(results[0]),
        "traffic": f"{results[0].num_prompts:,} requests, seed {scenario.seed}",
        "slos": _slos(results[0]),
        "labels": [run.label for run in runs],
        "given": [_given(run) for run in runs],
        "sentences": section.sentences,
        "key_rows": [row for row in rows if row.key in KEY_METRICS],
        "rows": rows,
        "charts": charts(runs),
        "tails": [
            {
                "label": label,
                "head": head_sentences(found),
                "rows": cause_rows(found),
                "beside": neighbour_sentences(found),
            }
            for label, found in section.tails
        ],
        "command": section.command,
        "asked": section.asked,
    }


def _slos(result: Result) -> str:
    found = [word.replace(":", " ").upper() + " ms" for word in result.scenario.goodput]
    own = bool(result.slo_classes) or (not found and result.request_goodput is not None)
    return ", ".join([*found, *([OWN] if own else [])]) or "none"


def _given(run: FigureRun) -> dict[str, Any]:
    """What one policy was given, and where its times come from."""
    result = run.result
    scenario, used = result.scenario, result.engine_profile
    settings = {
        "GPU KV blocks": f"{scenario.num_gpu_blocks:,} ({_gib(scenario.num_gpu_blocks, scenario.block_bytes)})",
        "Host KV memory": _gib(scenario.num_cpu_blocks, scenario.block_bytes),
        "Block size": f"{scenario.block_size} tokens",
        "max-num-seqs": f"{scenario.max_num_seqs:,}",
        "max-num-batched-tokens": f"{scenario.max_num_batched_tokens:,}",
        "max-model-len": f"{scenario.max_model_len:,}",
        "Chunked prefill": "on" if scenario.enable_chunked_prefill else "off",
        "Prefix caching": "on" if scenario.enable_prefix_caching else "off",
        **{part.capitalize(): name for part, name in scenario.policy_parts.items()},
    }
    return {
        "label": run.label,
        "settings": settings,
        "constants": constants(result),
        "sha256": result.profile.sha256[:12],
        "engine": engine_overhead(used) if used else "none",
        "assumed": ", ".join(used.assumed) if used else "",
        "accuracy": [] if result.accuracy is UNSET else _intervals(result.accuracy),
        "warnings": [] if result.warnings is UNSET else list(result.warnings),
    }


def _intervals(found: Accuracy) -> list[str]:
    """Where measured values are to be expected, in sentences."""
    names = {metric.key: metric.name for metric in METRICS}
    spans = [f"{names[key]} {span(one)}" for key, one in found.intervals.items()]
    head = f"Where {100 * found.share:.0f} % of measured servers like it would lie: {'; '.join(spans)}."
    return [*([head] if spans else []), *accuracy_sentences(found)]


def _gib(blocks: int, block_bytes: float) -> str:
    return f"{blocks * block_bytes / 2**30:,.1f} GiB"


def _plotly() -> Path:
    """Plotly's own script, without importing its Python half."""
    spec = find_spec("plotly")
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec is not None else ""
    return Path(folder) / "package_data" / "plotly.min.js"


def _inlined(path: Path) -> Any:  # noqa: ANN401 - markupsafe's
    """A file of ours or a library's, verbatim."""
    from markupsafe import Markup  # noqa: PLC0415 - an extra

    text = path.read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise UserError(f"{path}: would end its own element; reinstall it")
    return Markup(text)


def _in_script(data: object) -> Any:  # noqa: ANN401
    """JSON that no HTML parser mistakes for markup."""
    from markupsafe import Markup  # noqa: PLC0415

    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise UserError(f"report: a run's numbers are beyond what a figure can show ({error}); run it again") from error
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)

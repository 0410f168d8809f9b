"""An early vLLM on A100: the GPU's price by a public fit of that engine, and what its served runs say of the server."""

from pathlib import Path

import pytest
from distserve_measured import read
from vllm_a100_measured import compare, price_errors, scenario

from sim.cost.engine_profile import load_engine_profile

ROOT = Path(__file__).parents[2]
RUNS = ROOT.parent / "shared/measured/distserve-opt13b-a100/runs.csv"
SERVED_S_PER_SEQUENCE = "0.0006"


def percent(errors: list[float]) -> list[int]:
    return [round(100 * error) for error in errors]


def test_the_price_is_that_of_the_engine_without_a_server():
    prompts, decodes = price_errors()
    assert percent(prompts) == [-20, -12, -8, -5, -3]
    assert percent(decodes) == [0, 0, -2, -1, -5, -2, -4, -2]


def tpot_errors(engine: str | None) -> dict[str, int]:
    runs = [run for run in read(RUNS) if run.name.startswith("vllm")]
    means = {run.name: compare(run, scenario(None, engine))[1].tpot_ms for run in runs}
    return dict(zip(means, percent([here / there - 1 for there, here in means.values()]), strict=True))


@pytest.mark.skipif(not RUNS.exists(), reason="measured runs are not beside this checkout")
def test_served_runs_take_longer_by_what_grows_with_the_sequences(tmp_path):
    shipped = tpot_errors(None)
    assert (min(shipped.values()), max(shipped.values())) == (-44, -9)
    engine = load_engine_profile("vllm-0.5")
    text = (ROOT / "sim/cost/engines/vllm-0.5.json").read_text(encoding="utf-8")
    slower = tmp_path / "slower.json"
    slower.write_text(text.replace(repr(engine.value("host_s_per_sequence")), SERVED_S_PER_SEQUENCE))
    found = tpot_errors(str(slower))
    assert {name for name, error in found.items() if abs(error) > 10} == {"vllm-100-2", "vllm-200-2"}
    assert max(abs(error) for name, error in found.items() if not name.endswith("-2")) == 5

"""`compare --bound --lift-limits`: what stands beside the policies."""

from dataclasses import replace

import msgspec
import pytest
from small_results import flags, small_result

from kvtwin import main
from sim.bounds.compared import best_bound, bounds_of
from sim.bounds.lifted import LIFTED, with_infinite_memory
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.schema import Comparison
from sim.run.prepare import Setup, prepare

CROWD = {
    "workload": "sharegpt", "num_prompts": 60, "request_rate": 20.0, "num_gpu_blocks_override": 200,
    "max_model_len": 1024, "seed": 1,
}  # fmt: skip
CROWDED = Scenario(**CROWD, goodput=("ttft:3000", "tpot:100"))
FLAGS = flags(**CROWD, quiet=True)
LIMITS = "ttft:1000 tpot:150"


def setup_of(name: str, scenario: Scenario = CROWDED) -> Setup:
    return prepare(scenario, *parse_policy(name, {}))


def test_compare_says_how_much_of_the_reachable_is_reached(tmp_path):
    policies = ["--policy", "vllm-recompute", "--policy", "layerkv:predictor=bucket"]
    slo = ["--goodput", "ttft:3000", "tpot:100"]
    assert main(["compare", *policies, *FLAGS, *slo, "--lift-limits", "--out", str(tmp_path)]) == 0
    found = msgspec.json.decode((tmp_path / "comparison.json").read_bytes(), type=Comparison)
    bound = best_bound([setup_of("vllm-recompute"), setup_of("layerkv")])
    assert bound is not None
    assert found.goodput_bound == pytest.approx(bound.goodput)
    for label in found.policies:
        goodput = found.metrics[label]["request_goodput"]
        assert goodput is not None
        assert found.bound_shares[label] == pytest.approx(goodput / bound.goodput)
        assert found.bound_shares[label] <= 1.0
    # vLLM predicts no lengths.
    assert [*found.lifted["vllm-recompute"]] == ["infinite PCIe", "infinite memory"]
    assert [*found.lifted["layerkv:predictor=bucket"]] == [*LIFTED]
    told = found.lifted["vllm-recompute"]["infinite memory"]
    assert told["num_preemptions"] == 0 < (found.metrics["vllm-recompute"]["num_preemptions"] or 0)
    page = (tmp_path / "comparison.md").read_text()
    assert "of what any could reach." in page and "layerkv:predictor=bucket with infinite PCIe instead:" in page


def test_without_slos_there_is_no_bound(tmp_path, capsys):
    assert main(["compare", "--policy", "orca", *FLAGS, "--out", str(tmp_path)]) == 0
    found = msgspec.json.decode((tmp_path / "comparison.json").read_bytes(), type=Comparison)
    assert found.goodput_bound is None and not found.bound_shares and not found.lifted
    before = (tmp_path / "orca" / "result.json").read_bytes()
    assert main(["compare", "--policy", "orca", *FLAGS, "--bound", "--out", str(tmp_path)]) == 2
    assert "--bound: no request has SLOs; give --goodput, or a trace whose" in capsys.readouterr().err
    # Refused before the first run: what is there stays.
    assert (tmp_path / "orca" / "result.json").read_bytes() == before


@pytest.mark.parametrize("asked", [[], ["--bound"]], ids=str)
def test_slos_of_requests_alone_have_a_bound(tmp_path, asked):
    """It is that of `--goodput` where all requests name the same in its place; those that name none are all good."""
    path, out = tmp_path / "t.csv", tmp_path / "out"
    bounds = []
    for own, more in ((LIMITS, asked), ("", ["--goodput", *LIMITS.split()]), (None, asked)):
        slos = [LIMITS if i % 2 else "" for i in range(60)] if own is None else [own] * 60
        rows = [f"{0.01 * i},400,40,{one}\n" for i, one in enumerate(slos)]
        path.write_text("arrival_s,prompt_tokens,output_tokens,slos\n" + "".join(rows))
        words = flags(trace=path, model="llama-2-7b", gpu="l20", quiet=True, no_figures=True)
        assert main(["compare", "--policy", "vllm-v1", *words, *more, "--out", str(out)]) == 0
        found = msgspec.json.decode((out / "comparison.json").read_bytes(), type=Comparison)
        assert found.goodput_bound is not None and 0.0 < found.bound_shares["vllm-v1"] <= 1.0
        bounds.append(found.goodput_bound)
    own, said, half = bounds
    assert own == said < half


@pytest.mark.parametrize(
    "changes", [{"max_concurrency": 4}, {"cost_form": "paper"}, {"pipeline_parallel_size": 2}], ids=str
)
def test_where_there_is_none_it_is_refused(changes):
    setup = setup_of("vllm-recompute", replace(CROWDED, **changes))
    with pytest.raises(UserError, match="--bound: "):
        best_bound([setup])
    assert best_bound([setup], asked=False) is None


def test_one_engine_without_a_bound_leaves_none_for_all():
    """The greatest of those known would be none of the other's."""
    setups = [setup_of("vllm-recompute"), setup_of("vllm-recompute", replace(CROWDED, cost_form="paper"))]
    for both in (setups, setups[::-1]):
        assert best_bound(both, asked=False) is None
        with pytest.raises(UserError, match="--bound: prices of these forms have no linear ones below them; leave"):
            best_bound(both)


def test_a_bound_that_was_not_asked_for_is_of_few_requests(monkeypatch):
    """60 requests: below the limit of 61 there is one, at 60 none; asked for it is there at any, refused at none."""
    setup = setup_of("vllm-recompute")
    monkeypatch.setattr("sim.bounds.compared.BY_DEFAULT", 61)
    known = best_bound([setup], asked=False)
    assert known is not None
    result = small_result(policy="a", num_prompts=9, completed=9, request_goodput=None)
    found = bounds_of([setup], [result], known, lifted=False)
    assert found is not None and found.goodput_bound == known.goodput and found.lifted == {}
    assert found.bound_shares == {"a": 0.0}
    monkeypatch.setattr("sim.bounds.compared.BY_DEFAULT", 60)
    assert best_bound([setup], asked=False) is None
    assert best_bound([setup]) == known
    assert bounds_of([setup], [], None, lifted=False) is None


def test_lifting_leaves_the_setup_as_it_was():
    setup = setup_of("layerkv")
    before = setup.limits, setup.profile, setup.policy
    for lift in LIFTED.values():
        lift(setup)
    assert (setup.limits, setup.profile, setup.policy) == before
    assert with_infinite_memory(setup).limits.num_gpu_blocks > 1 << 30

"""Form `linear`: the coefficients of one model's whole iterations, as the simulator prices them."""

import msgspec
import numpy as np
import pytest
from calib_small import HARDWARE, copies, noise, shapes, spec, timed
from hypothesis import given
from hypothesis import strategies as st

from calib.linear import fit_linear_profile, predict_s
from calib.report import fit_markdown
from calib.samples import Sample
from sim.cost.forms import LinearCost
from sim.cost.profile import LINEAR_UNITS
from sim.engine.plan import IterationPlan
from sim.errors import UserError

TRUE = {
    "prefill_base_s": 0.01, "prefill_s_per_token": 1e-4, "prefill_s_per_square_token": 2e-8, "decode_base_s": 0.02,
    "decode_s_per_sequence": 1e-3, "decode_s_per_context_token": 1e-6,
}  # fmt: skip
LINK = [
    *copies("h2d", launch_s=2e-6, bytes_per_s=2.5e10, overlap=False),
    *copies("d2h", launch_s=2e-6, bytes_per_s=2e10, overlap=False),
]


def steps(**options):
    untimed = shapes(("llama-2-7b",), "step", **options)
    return timed(untimed, predict_s(TRUE, untimed))


def fitted(samples, folder):
    return fit_linear_profile(samples, folder, HARDWARE, name="mine", status="measured", provenance={"a": "b"})


def test_exact_iterations_give_the_coefficients_back(tmp_path):
    """A block of 16 tokens is 16 * 524,288 bytes: 2 us and 0.419 ms at the slower direction's 20 GB/s."""
    profile = fitted([*steps(), *LINK], tmp_path).profile
    assert list(profile.constants) == list(LINEAR_UNITS)
    swap_s = 2e-6 + 16 * 524_288 / 2e10
    expected = {**TRUE, "swap_s_per_block": swap_s, "copy_launch_s": 2e-6}
    assert {n: profile.value(n) for n in LINEAR_UNITS} == pytest.approx(expected, rel=1e-4)
    assert {n: c.unit for n, c in profile.constants.items()} == LINEAR_UNITS
    assert all(c.stderr is not None for n, c in profile.constants.items() if n in TRUE)
    assert max((profile.residuals or {"": 1.0}).values()) < 1e-4
    assert profile.range is not None
    assert (profile.range.tokens, profile.range.batch) == ((16, 8192), (1, 256))
    assert profile.provenance["model"] == spec("llama-2-7b").name
    assert (profile.name, profile.gpu, profile.status) == ("mine", "a100-80g", "measured")


def plan_of(sample):
    plan, b, n, c = IterationPlan(), sample.batch_size, sample.new_tokens, sample.context_tokens
    if sample.is_decode:
        plan.num_decodes, plan.decode_context_tokens = b, b * (c + 1)
        return plan
    # Only that there are chunks is asked of the linear form, beside their sums.
    plan.chunks = (None,)  # type: ignore[assignment]
    plan.prefill_tokens, plan.prefill_squares = b * n, b * n * n
    return plan


@given(batch=st.integers(1, 500), new=st.just(1) | st.integers(1, 9000), context=st.just(0) | st.integers(0, 9000))
def test_an_iteration_costs_what_the_simulator_charges(batch, new, context):
    sample = Sample(
        op="step", latency_s=1.0, model="llama-2-7b", batch_size=batch, new_tokens=new, context_tokens=context
    )
    prefill = [TRUE[n] for n in list(TRUE)[:3]]
    decode = [TRUE[n] for n in list(TRUE)[3:]]
    cost = LinearCost(prefill, decode, 1e-3, 1.0)
    assert predict_s(TRUE, [sample])[0] == pytest.approx(cost.iteration_s(plan_of(sample)), rel=1e-12)


def test_errors_on_unseen_samples_do_not_depend_on_how_phases_are_mixed(tmp_path):
    """Every third row a prompt: leaving out every third row must not leave out all prompts."""
    prompts = [s for s in steps() if not s.is_decode]
    decodes = [s for s in steps() if s.is_decode]
    mixed = [s for i, prompt in enumerate(prompts) for s in (prompt, decodes[2 * i], decodes[2 * i + 1])]
    residuals = fitted([*mixed, *LINK], tmp_path).profile.residuals or {}
    assert residuals["unseen_sample_prefill_mape"] < 1e-4
    assert residuals["unseen_sample_decode_mape"] < 1e-4


def test_an_error_on_unseen_samples_is_larger_than_on_seen_ones(tmp_path):
    exact = steps()
    factors = noise(np.random.default_rng(3), len(exact), outliers=0.0)
    samples = timed(exact, [s.latency_s * f for s, f in zip(exact, factors, strict=True)])
    residuals = fitted([*samples, *LINK], tmp_path).profile.residuals or {}
    for phase in ("prefill", "decode"):
        assert 0.01 < residuals[f"{phase}_mape"] < residuals[f"unseen_sample_{phase}_mape"] < 0.1


def test_blocks_have_the_size_of_the_type_that_was_timed(tmp_path):
    samples = [msgspec.structs.replace(s, dtype_bytes=4.0) for s in steps()]
    profile = fitted([*samples, *LINK], tmp_path).profile
    assert profile.value("swap_s_per_block") == pytest.approx(2e-6 + 2 * 16 * 524_288 / 2e10, rel=1e-4)


def test_only_whole_iterations_of_one_gpu_alone_count(tmp_path):
    exact = steps()
    others = [
        msgspec.structs.replace(s, latency_s=7 * s.latency_s, **change)
        for s in exact
        for change in ({"beside": "h2d"}, {"tp": 2}, {"op": "layers"})
    ]
    report = fitted([*others, *exact, *LINK], tmp_path)
    assert report.samples == exact
    assert report.profile.value("prefill_base_s") == pytest.approx(0.01, rel=1e-4)


def test_decodes_from_graphs_take_the_place_of_eager_ones(tmp_path):
    exact = [msgspec.structs.replace(s, graph=int(s.is_decode)) for s in steps()]
    eager = [msgspec.structs.replace(s, graph=0, latency_s=2 * s.latency_s) for s in exact if s.graph]
    report = fitted([*eager, *exact, *LINK], tmp_path)
    assert report.samples == exact


def test_the_report_of_coefficients_names_no_constant_as_carried_over(tmp_path):
    report = fitted([*steps(), *LINK], tmp_path)
    assert report.carried == []
    text = fit_markdown(report)
    assert [name for name in LINEAR_UNITS if f"| `{name}` | " not in text] == []
    assert "a contiguous copy of a block of 16 tokens, 8388608 bytes, at the fitted rate" in text
    assert "| every third sample left out | " in text and "The papers' constants" not in text


def bad(change):
    return [msgspec.structs.replace(s, **change) for s in steps()]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (LINK, "form linear is of one model, steps are of none: choose one"),
        (
            [*steps(), *timed(shapes(("llama-3.1-8b",), "step"), [1.0] * 29), *LINK],
            "steps are of llama-2-7b, llama-3.1-8b: choose one",
        ),
        ([*bad({"num_layers": 4}), *LINK], "steps of 4 of 32 layers: form linear needs whole iterations"),
        (steps(), "form linear needs copies (h2d or d2h) for swap_s_per_block: measure some"),
        ([*steps(prompts=(512,)), *LINK], "prompts by tokens: 1 size (512 to 512)"),
        ([*steps(batches=()), *LINK], "decodes by sequences: none"),
    ],
)
def test_what_cannot_be_fitted_is_refused(tmp_path, samples, message):
    with pytest.raises(UserError) as caught:
        fitted(samples, tmp_path)
    assert message in str(caught.value)

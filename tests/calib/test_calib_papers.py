"""The papers' equations: each by hand, and each planted form finds its constant and faults the other."""

import pytest
from calib_small import HARDWARE, timed

from calib.papers import eq3_alpha, paper_constants
from calib.samples import Sample
from sim.cost.model import ridge
from sim.specs.models import ModelSpec

TINY = ModelSpec(
    name="tiny", num_layers=2, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=8,
    gated_mlp=True, vocab_size=16, tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
"""A layer: 4*4 + 4*4 of queries and output, 2 * 4*2 of keys and values, 3 * 4*8 of the MLP, 144 weights in all."""
MODELS = {"tiny": TINY}
ROOFLINE = {"flops_per_s": 1e12, "hbm_bytes_per_s": 1e12, "roofline_exponent": 3.0}
LENGTHS = (128, 300, 1000, 4000)
PEAK = 312e12
LINK = 25e9


def step(**fields):
    return Sample(**{"op": "step", "latency_s": 1.0, "model": "tiny", "num_layers": 2, **fields})


def constants_of(samples):
    found = paper_constants(samples, MODELS, HARDWARE, ROOFLINE)
    return {(c.equation, c.form, c.constant): c for c in found}


# -- by hand: how an equation's amount grows with s; at s = 128, worked out -------------------------------------------

PROMPT, DECODE = "eLLM Eq. 2 and 4", "eLLM Eq. 3 and 4"
EQUATIONS = {
    # s (2 P + 2 s h) of 416 parameters over the peak; corrected: 2 L s h
    ("LayerKV Eq. 3", "printed"): (lambda s: s * (832 + 2 * s * 4) / PEAK, 237_568 / PEAK),
    ("LayerKV Eq. 3", "corrected"): (lambda s: s * (832 + 4 * s * 4) / PEAK, 368_640 / PEAK),
    # 24 h^2 L s + 4 h L s^2 + 2 h V s = 98,304 + 524,288 + 16,384
    (PROMPT, "printed"): (lambda s: 24 * 16 * 2 * s + 4 * 4 * 2 * s * s + 2 * 4 * 16 * s, 638_976),
    # 576 s + 32 s (s + 1) / 2 = 73,728 + 264,192
    (PROMPT, "corrected"): (lambda s: 576 * s + 16 * s * (s + 1), 337_920),
    # 24 h^2 L + 4 h L (s + 1) + 2 h V s = 768 + 4,128 + 16,384
    (DECODE, "printed"): (lambda s: 24 * 16 * 2 + 4 * 4 * 2 * (s + 1) + 2 * 4 * 16 * s, 21_280),
    # 576 + 129 * 32 + 128
    (DECODE, "corrected"): (lambda s: 576 + 32 * (s + 1) + 128, 4_832),
    # one layer of two: (24 h^2 s + 4 h s^2) / 2 + 2 s h V = 155,648 + 16,384
    ("eLLM Eq. 7", "printed"): (lambda s: (24 * 16 * s + 4 * 4 * s * s) / 2 + 2 * s * 4 * 16, 172_032),
    # half of 576 s + 32 s (s + 1) / 2
    ("eLLM Eq. 7", "corrected"): (lambda s: (576 * s + 16 * s * (s + 1)) / 2, 168_960),
}


def sample_of(equation, s):
    """One that the equation is of; three decodes take three times as long as one."""
    if equation == DECODE:
        return step(new_tokens=1, batch_size=3, context_tokens=s)
    return Sample(op="recompute", latency_s=1.0, model="tiny", new_tokens=s) if "7" in equation else step(new_tokens=s)


@pytest.mark.parametrize(("equation", "form"), EQUATIONS)
def test_a_planted_form_finds_its_constant_and_the_other_errs(equation, form):
    name, value, power = ("alpha", 1.37, 1) if "LayerKV" in equation else ("FLOPS", 2e12, -1)
    amount, by_hand = EQUATIONS[equation, form]
    assert amount(128) == by_hand
    # Short contexts too: a decode's weights must show beside its context.
    lengths, count = ((1, 10, *LENGTHS), 3) if equation == DECODE else (LENGTHS, 1)
    samples = [sample_of(equation, s) for s in lengths]
    found = constants_of(timed(samples, [count * amount(s) * value**power for s in lengths]))
    other = {"printed": "corrected", "corrected": "printed"}[form]
    right, wrong = found[equation, form, name], found[equation, other, name]
    assert right.estimate is not None
    assert right.estimate.value == pytest.approx(value, rel=1e-6)
    assert right.unit == ("FLOP/s" if name == "FLOPS" else "1")
    assert right.mape < 1e-6 and wrong.mape > 0.005
    assert (right.count, wrong.count) == (len(lengths), len(lengths))


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(("form", "flops"), [("corrected", 337_920), ("printed", 638_976)])
def test_a_group_of_gpus_shares_the_work(gpus, form, flops):
    sample = Sample(op="step", latency_s=flops / 1e12, model="tiny", num_layers=2, new_tokens=128, tp=gpus)
    found = constants_of([sample] * 3)[PROMPT, form, "FLOPS"]
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(1e12 / gpus, rel=1e-6)


def test_timed_layers_count_as_the_whole_model_with_its_head():
    """One layer of two, at alpha 1.5 of the corrected Eq. 3; the LM head is the roofline's, for one token."""
    samples = []
    for s in LENGTHS:
        whole_s = 1.5 * s * (832 + 4 * s * 4) / PEAK
        head_s = ridge(128 / 1e12, 128 / 1e12, 3.0)
        samples.append(Sample(op="layers", latency_s=(whole_s - head_s) / 2, model="tiny", new_tokens=s))
    found = paper_constants(samples, MODELS, HARDWARE, ROOFLINE)
    alpha = eq3_alpha(found)
    assert alpha is not None
    assert alpha.value == pytest.approx(1.5, rel=1e-6)


# -- copies ----------------------------------------------------------------------------------------------------------


def copy(op, num_bytes, pieces, seconds):
    return Sample(op=op, latency_s=seconds, num_bytes=num_bytes, num_copies=pieces)


SIZES = [(1e5 * 8**i, pieces) for i in range(5) for pieces in (1, 4, 32)]


def test_layerkv_eq_4_printed_is_a_share_of_the_link():
    samples = [copy("d2h", n, pieces, 1.6 * n / LINK) for n, pieces in SIZES]
    found = constants_of(samples)["LayerKV Eq. 4", "printed", "beta"]
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(1.6, rel=1e-6)
    assert found.mape < 1e-6


def test_layerkv_eq_4_corrected_asks_for_every_piece():
    """A rate of 20 of the link's 25 GB/s is beta 1.25; 3 us a piece besides, which the printed form cannot see."""
    samples = [copy("d2h", n, pieces, 3e-6 * pieces + n / 2e10) for n, pieces in SIZES]
    found = constants_of(samples)
    right, wrong = (found["LayerKV Eq. 4", form, "beta"] for form in ("corrected", "printed"))
    assert right.estimate is not None and wrong.estimate is not None
    assert right.estimate.value == pytest.approx(1.25, rel=1e-4)
    assert right.estimate.low <= right.estimate.value <= right.estimate.high
    assert right.mape < 1e-4
    assert wrong.mape > 0.2


@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_ellm_eq_6_asks_once_or_for_every_piece(form):
    """alpha = 1 / 20 GB/s and beta = 5 us, once a copy as printed, or once a piece."""
    samples = [copy("h2d", n, pieces, 5e-6 * (pieces if form == "corrected" else 1) + n / 2e10) for n, pieces in SIZES]
    found = constants_of(samples)
    other = {"printed": "corrected", "corrected": "printed"}[form]
    for name, value in (("alpha", 5e-11), ("beta", 5e-6)):
        estimate = found["eLLM Eq. 6", form, name].estimate
        assert estimate is not None
        assert estimate.value == pytest.approx(value, rel=1e-4)
        assert estimate.low <= estimate.value <= estimate.high
    assert found["eLLM Eq. 6", form, "alpha"].mape < 1e-4
    assert found["eLLM Eq. 6", other, "alpha"].mape > 0.05
    assert found["eLLM Eq. 6", form, "alpha"].unit == "s/B"
    assert found["eLLM Eq. 6", form, "beta"].unit == "s"


# -- what is taken, and what is left out -----------------------------------------------------------------------------


def test_only_single_whole_prompts_alone_and_long_enough_count():
    good = step(new_tokens=128, latency_s=1e-6)
    others = [
        step(new_tokens=127),
        step(new_tokens=64, batch_size=4),
        step(new_tokens=256, context_tokens=5),
        Sample(op="step", latency_s=1.0, model="tiny", num_layers=2, new_tokens=256, beside="d2h"),
        Sample(op="lm_head", latency_s=1.0, model="tiny", new_tokens=256),
    ]
    found = constants_of([*others, good, good, good])
    assert {c.count for c in found.values()} == {3}
    assert {equation for equation, _, _ in found} == {"LayerKV Eq. 3", PROMPT, "eLLM Eq. 7"}
    estimate = found[PROMPT, "printed", "FLOPS"].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(638_976 / 1e-6, rel=1e-6)


def test_recomputations_are_preferred_to_prompts_for_eq_7():
    prompts = [step(new_tokens=128)] * 4
    again = [Sample(op="recompute", latency_s=168_960 / 3e12, model="tiny", new_tokens=128)] * 3
    estimate = constants_of([*prompts, *again])["eLLM Eq. 7", "corrected", "FLOPS"].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(3e12, rel=1e-6)


def test_nothing_measured_gives_no_constants():
    found = paper_constants([Sample(op="launch", latency_s=1e-5)], MODELS, HARDWARE, ROOFLINE)
    assert found == []
    assert eq3_alpha(found) is None

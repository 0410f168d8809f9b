"""The papers' equations: each by hand, and each planted form finds its constant and faults the other."""

import pytest
from calib_small import HARDWARE

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


def timed(sample, seconds):
    return Sample(**{**{f: getattr(sample, f) for f in Sample.__struct_fields__}, "latency_s": seconds})


# -- by hand: a sample whose time is the equation's at constant 1 (alpha, beta) or 1e12 (FLOPS) ----------------------

ONE_PROMPT = step(new_tokens=128)
ONE_DECODE = step(new_tokens=1, batch_size=3, context_tokens=100)
HALF_AGAIN = Sample(op="recompute", latency_s=1.0, model="tiny", num_layers=1, new_tokens=128)
BY_HAND = [
    # s (2 P + 2 s h) of 416 parameters over the peak; corrected: 2 L s h
    ("LayerKV Eq. 3", "printed", "alpha", ONE_PROMPT, 128 * (832 + 2 * 128 * 4) / PEAK, 1.0),
    ("LayerKV Eq. 3", "corrected", "alpha", ONE_PROMPT, 128 * (832 + 4 * 128 * 4) / PEAK, 1.0),
    # 24 h^2 L s + 4 h L s^2 + 2 h V s = 98,304 + 524,288 + 16,384
    ("eLLM Eq. 2 and 4", "printed", "FLOPS", ONE_PROMPT, 638_976 / 1e12, 1e12),
    # 576 s + 32 s (s + 1) / 2 = 73,728 + 264,192
    ("eLLM Eq. 2 and 4", "corrected", "FLOPS", ONE_PROMPT, 337_920 / 1e12, 1e12),
    # three times 24 h^2 L + 4 h L 101 + 2 h V 100 = 768 + 3,232 + 12,800
    ("eLLM Eq. 3 and 4", "printed", "FLOPS", ONE_DECODE, 3 * 16_800 / 1e12, 1e12),
    # three times 576 + 101 * 32 + 128
    ("eLLM Eq. 3 and 4", "corrected", "FLOPS", ONE_DECODE, 3 * 3_936 / 1e12, 1e12),
    # one layer of two: (24 h^2 s + 4 h s^2) / 2 + 2 s h V = 155,648 + 16,384
    ("eLLM Eq. 7", "printed", "FLOPS", HALF_AGAIN, 172_032 / 1e12, 1e12),
    # half of 576 s + 32 s (s + 1) / 2
    ("eLLM Eq. 7", "corrected", "FLOPS", HALF_AGAIN, 168_960 / 1e12, 1e12),
]


@pytest.mark.parametrize(("equation", "form", "name", "sample", "seconds", "value"), BY_HAND)
def test_an_equation_by_hand(equation, form, name, sample, seconds, value):
    found = constants_of([timed(sample, seconds)] * 3)[equation, form, name]
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(value, rel=1e-6)
    assert found.mape < 1e-6
    assert found.count == 3
    assert found.unit == ("FLOP/s" if name == "FLOPS" else "1")


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(("form", "flops"), [("corrected", 337_920), ("printed", 638_976)])
def test_a_group_of_gpus_shares_the_work(gpus, form, flops):
    sample = Sample(op="step", latency_s=flops / 1e12, model="tiny", num_layers=2, new_tokens=128, tp=gpus)
    found = constants_of([sample] * 3)["eLLM Eq. 2 and 4", form, "FLOPS"]
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


# -- planted over several sizes --------------------------------------------------------------------------------------

PRINTED = {
    "LayerKV Eq. 3": lambda s: s * (832 + 2 * s * 4) / PEAK,
    "eLLM Eq. 2 and 4": lambda s: 24 * 16 * 2 * s + 4 * 4 * 2 * s * s + 2 * 4 * 16 * s,
    "eLLM Eq. 3 and 4": lambda s: 24 * 16 * 2 + 4 * 4 * 2 * (s + 1) + 2 * 4 * 16 * s,
    "eLLM Eq. 7": lambda s: (24 * 16 * s + 4 * 4 * s * s) / 2 + 2 * s * 4 * 16,
}
CORRECTED = {
    "LayerKV Eq. 3": lambda s: s * (832 + 4 * s * 4) / PEAK,
    "eLLM Eq. 2 and 4": lambda s: 576 * s + 16 * s * (s + 1),
    "eLLM Eq. 3 and 4": lambda s: 576 + 32 * (s + 1) + 128,
    "eLLM Eq. 7": lambda s: (576 * s + 16 * s * (s + 1)) / 2,
}


def shape_of(equation, s):
    if equation == "eLLM Eq. 3 and 4":
        return step(new_tokens=1, context_tokens=s)
    return Sample(op="recompute", latency_s=1.0, model="tiny", new_tokens=s) if "7" in equation else step(new_tokens=s)


@pytest.mark.parametrize("equation", PRINTED)
@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_a_planted_form_finds_its_constant_and_the_other_errs(equation, form):
    name = "alpha" if "LayerKV" in equation else "FLOPS"
    value, power = (1.37, 1) if name == "alpha" else (2e12, -1)
    amount = (PRINTED if form == "printed" else CORRECTED)[equation]
    # Short contexts too: a decode's weights must show beside its context.
    lengths = (1, 10, *LENGTHS) if "3 and 4" in equation else LENGTHS
    found = constants_of([timed(shape_of(equation, s), amount(s) * value**power) for s in lengths])
    other = {"printed": "corrected", "corrected": "printed"}[form]
    right, wrong = found[equation, form, name], found[equation, other, name]
    assert right.estimate is not None and wrong.estimate is not None
    assert right.estimate.value == pytest.approx(value, rel=1e-6)
    assert right.mape < 1e-6
    assert wrong.mape > 0.005
    assert (right.count, wrong.count) == (len(lengths), len(lengths))


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
    good = timed(ONE_PROMPT, 1e-6)
    others = [
        step(new_tokens=127),
        step(new_tokens=64, batch_size=4),
        step(new_tokens=256, context_tokens=5),
        Sample(op="step", latency_s=1.0, model="tiny", num_layers=2, new_tokens=256, beside="d2h"),
        Sample(op="lm_head", latency_s=1.0, model="tiny", new_tokens=256),
    ]
    found = constants_of([*others, good, good, good])
    assert {c.count for c in found.values()} == {3}
    assert {equation for equation, _, _ in found} == {"LayerKV Eq. 3", "eLLM Eq. 2 and 4", "eLLM Eq. 7"}
    estimate = found["eLLM Eq. 2 and 4", "printed", "FLOPS"].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(638_976 / 1e-6, rel=1e-6)


def test_recomputations_are_preferred_to_prompts_for_eq_7():
    prompts = [timed(ONE_PROMPT, 1.0)] * 4
    again = [timed(HALF_AGAIN, 168_960 / 3e12)] * 3
    estimate = constants_of([*prompts, *again])["eLLM Eq. 7", "corrected", "FLOPS"].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(3e12, rel=1e-6)


def test_nothing_measured_gives_no_constants():
    found = paper_constants([Sample(op="launch", latency_s=1e-5)], MODELS, HARDWARE, ROOFLINE)
    assert found == []
    assert eq3_alpha(found) is None

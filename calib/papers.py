"""LayerKV's alpha and beta and eLLM's alpha, beta and FLOPS from the same samples, as printed and as corrected.

A paper's constant is only as good as the equation it stands in: each is fitted to both forms, and the error each leaves
says which to believe. Equations as in `sim.cost.forms` and the papers:

- LayerKV Eq. 3, T_pre = alpha s (2P + 2 s h) / FLOPS; corrected: 2 L s h, attention happens in every layer.
- LayerKV Eq. 4, T_off = beta bytes / PCIe; corrected: plus the cost of asking for each piece.
- eLLM Eq. 2 and 4, recomputation: (24 h^2 L s + 4 h L s^2 + 2 h V s) / FLOPS; corrected: the model's own matrices,
  half the square (causal), no logits.
- eLLM Eq. 3 and 4, decode: sum of (24 h^2 L + 4 h L (s+1) + 2 h V s) / FLOPS; corrected: the model's own matrices,
  logits of one token. Neither charges memory; the roofline does.
- eLLM Eq. 6, T_swap = alpha k + beta for k tokens; corrected: beta for each piece.
- eLLM Eq. 7, l2 layers recomputed: the printed one divides by L again and adds logits; corrected: times l2, none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calib.copies import fit_turns, plain_copies, turns_s
from calib.holdout import PROMPT_TOKENS
from calib.robust import Array, Estimate, Parameter, fit_relative, mape
from calib.roofline import ridge_s
from calib.samples import Sample
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec

Models = Mapping[str, ModelSpec]
Amount = Callable[[Sample, ModelSpec], float]
"""What an equation counts of a sample."""

LEAST_SAMPLES = 3
"""Fewer cannot tell a constant from chance."""
TIMED = ("layers", "products", "step")
"""Operations that say what a whole prompt or decode takes."""


@dataclass(frozen=True)
class PaperConstant:
    """A constant of a paper's equation, fitted to one form of it.

    Attributes:
        equation: paper and number. form: "printed" or "corrected".
        constant, unit: its name in the paper, and unit.
        estimate: value with 95 % interval; None where the form has no constant of its own.
        mape: mean absolute relative error the form leaves.
        count: samples it was fitted to.
    """

    equation: str
    form: str
    constant: str
    unit: str
    estimate: Estimate | None
    mape: float
    count: int


def paper_constants(
    samples: Sequence[Sample], models: Models, hardware: HardwareSpec, constants: Mapping[str, float]
) -> list[PaperConstant]:
    """All constants that the samples allow, printed and corrected side by side.

    Args:
        constants: the fitted roofline's, for the LM head where only layers were timed.
    """
    alone = [s for s in samples if not s.beside]
    return [
        *_layerkv_eq3(_prompts(alone), models, hardware, constants),
        *_layerkv_eq4(plain_copies(alone, "d2h"), hardware),
        *_ellm_prompts(_prompts(alone), models, constants),
        *_ellm_decodes([s for s in alone if s.is_decode and s.op in TIMED], models, constants),
        *_ellm_eq6(plain_copies(alone, "h2d")),
        *_ellm_eq7([s for s in alone if s.op == "recompute"] or _prompts(alone), models),
    ]


def eq3_alpha(constants: Sequence[PaperConstant]) -> Estimate | None:
    """The alpha that policies predict with: that of the corrected Eq. 3."""
    for found in constants:
        if found.equation == "LayerKV Eq. 3" and found.form == "corrected":
            return found.estimate
    return None


def _prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Single prompts computed whole."""
    return [
        s
        for s in samples
        if s.op in TIMED and s.is_prompt and s.batch_size == 1 and s.context_tokens == 0 and s.tokens >= PROMPT_TOKENS
    ]


def _whole_s(samples: Sequence[Sample], models: Models, constants: Mapping[str, float]) -> Array:
    """Seconds of the whole model: timed layers scaled to all, and the LM head where it was not timed."""
    seconds = []
    for s in samples:
        model = models[s.model]
        head_s = 0.0
        if s.op != "step":
            compute_s = np.array([s.batch_size * model.head_flops_per_token / (s.tp * constants["flops_per_s"])])
            memory_s = np.array([model.head_weight_bytes / (s.tp * constants["hbm_bytes_per_s"])])
            head_s = float(ridge_s(compute_s, memory_s, constants["roofline_exponent"])[0])
        seconds.append(s.latency_s * model.num_layers / s.num_layers + head_s)
    return np.array(seconds)


def _scaled(
    equation: str, name: str, unit: str, per_unit_s: Mapping[str, Array], measured_s: Array, *, divides: bool
) -> list[PaperConstant]:
    """Fits `measured = constant * per_unit` (or per_unit / constant) for each form; none from too few samples."""
    found: list[PaperConstant] = []
    if len(measured_s) < LEAST_SAMPLES:
        return found
    for form, amounts in per_unit_s.items():
        ratio = measured_s / amounts
        start = float(np.median(1 / ratio if divides else ratio))
        power = -1 if divides else 1

        def predicted(values: Mapping[str, float], amounts: Array = amounts, power: int = power) -> Array:
            return amounts * values["c"] ** power

        estimate = fit_relative(predicted, measured_s, {"c": Parameter(start)}).estimates["c"]
        error = mape(predicted({"c": estimate.value}), measured_s)
        found.append(PaperConstant(equation, form, name, unit, estimate, error, len(measured_s)))
    return found


def _flops(
    equation: str, samples: Sequence[Sample], models: Models, measured_s: Array, printed: Amount, corrected: Amount
) -> list[PaperConstant]:
    """eLLM's FLOPS of an equation that counts FLOPs."""
    forms = {"printed": printed, "corrected": corrected}
    amounts = {form: np.array([count(s, models[s.model]) for s in samples]) for form, count in forms.items()}
    return _scaled(equation, "FLOPS", "FLOP/s", amounts, measured_s, divides=True)


def _layerkv_eq3(
    prompts: Sequence[Sample], models: Models, hardware: HardwareSpec, constants: Mapping[str, float]
) -> list[PaperConstant]:
    def ideal_s(sample: Sample, model: ModelSpec, layers: int) -> float:
        s, h = sample.new_tokens, model.hidden_size
        return s * (2 * model.num_params + 2 * layers * h * s) / (sample.tp * hardware.fp16_flops_per_s)

    found = [(s, models[s.model]) for s in prompts]
    forms = {
        "printed": np.array([ideal_s(s, m, 1) for s, m in found]),
        "corrected": np.array([ideal_s(s, m, m.num_layers) for s, m in found]),
    }
    return _scaled("LayerKV Eq. 3", "alpha", "1", forms, _whole_s(prompts, models, constants), divides=False)


def _layerkv_eq4(copies: Sequence[Sample], hardware: HardwareSpec) -> list[PaperConstant]:
    if (fit := fit_turns(copies)) is None:
        return []
    measured, x = np.array([s.latency_s for s in copies]), hardware.pcie_bytes_per_s
    ideal = np.array([s.num_bytes / x for s in copies])
    printed = _scaled("LayerKV Eq. 4", "beta", "1", {"printed": ideal}, measured, divides=False)
    error = mape(turns_s(fit.values, copies), measured)
    beta = _over(x, fit.estimates["d2h_bytes_per_s"])
    return [*printed, PaperConstant("LayerKV Eq. 4", "corrected", "beta", "1", beta, error, len(copies))]


def _over(value: float, rate: Estimate) -> Estimate:
    """Some amount over a rate."""
    return Estimate(value / rate.value, None, value / rate.high, value / rate.low)


def _ellm_prompts(prompts: Sequence[Sample], models: Models, constants: Mapping[str, float]) -> list[PaperConstant]:
    def printed(sample: Sample, m: ModelSpec) -> float:
        s, h = sample.new_tokens, m.hidden_size
        return (24 * h * h * m.num_layers * s + 4 * h * m.num_layers * s * s + 2 * h * m.vocab_size * s) / sample.tp

    def corrected(sample: Sample, m: ModelSpec) -> float:
        s = sample.new_tokens
        return (s * m.linear_flops_per_token + s * (s + 1) / 2 * m.attention_flops_per_token_pair) / sample.tp

    return _flops("eLLM Eq. 2 and 4", prompts, models, _whole_s(prompts, models, constants), printed, corrected)


def _ellm_decodes(decodes: Sequence[Sample], models: Models, constants: Mapping[str, float]) -> list[PaperConstant]:
    def printed(sample: Sample, m: ModelSpec) -> float:
        s, h = sample.context_tokens, m.hidden_size
        each = 24 * h * h * m.num_layers + 4 * h * m.num_layers * (s + 1) + 2 * h * m.vocab_size * s
        return sample.batch_size * each / sample.tp

    def corrected(sample: Sample, m: ModelSpec) -> float:
        pairs = (sample.context_tokens + 1) * m.attention_flops_per_token_pair
        return sample.batch_size * (m.linear_flops_per_token + pairs + m.head_flops_per_token) / sample.tp

    return _flops("eLLM Eq. 3 and 4", decodes, models, _whole_s(decodes, models, constants), printed, corrected)


def _ellm_eq6(copies: Sequence[Sample]) -> list[PaperConstant]:
    measured, found = np.array([s.latency_s for s in copies]), []
    one_piece = [Sample(op=s.op, latency_s=s.latency_s, num_bytes=s.num_bytes) for s in copies]
    for form, asked in (("printed", one_piece), ("corrected", copies)):
        if (fit := fit_turns(asked)) is None:
            continue
        error = mape(turns_s(fit.values, asked), measured)
        alpha, beta = _over(1.0, fit.estimates["h2d_bytes_per_s"]), fit.estimates["copy_launch_s"]
        found.append(PaperConstant("eLLM Eq. 6", form, "alpha", "s/B", alpha, error, len(copies)))
        found.append(PaperConstant("eLLM Eq. 6", form, "beta", "s", beta, error, len(copies)))
    return found


def _ellm_eq7(samples: Sequence[Sample], models: Models) -> list[PaperConstant]:
    def printed(sample: Sample, m: ModelSpec) -> float:
        s, h = sample.new_tokens, m.hidden_size
        body = (24 * h * h * s + 4 * h * s * s) * sample.num_layers / m.num_layers
        return sample.batch_size * (body + 2 * s * h * m.vocab_size) / sample.tp

    def corrected(sample: Sample, m: ModelSpec) -> float:
        s = sample.new_tokens
        whole = s * m.linear_flops_per_token + s * (s + 1) / 2 * m.attention_flops_per_token_pair
        return sample.batch_size * whole * sample.num_layers / m.num_layers / sample.tp

    return _flops("eLLM Eq. 7", samples, models, np.array([s.latency_s for s in samples]), printed, corrected)

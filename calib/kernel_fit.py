"""What fits to samples of single kernels share: terms by sample, errors on what is left out, errors by phase."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from calib.robust import Array, Fit


@dataclass(frozen=True)
class KernelTerms:
    """Per sample; fields are arrays of shape (samples,)."""

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Self:
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))


class Phased(Protocol):
    """A sample of prompts or of decodes."""

    @property
    def phase(self) -> str:
        """`prefill` or `decode`."""
        ...


T = TypeVar("T", bound=KernelTerms)
P = TypeVar("P", bound=Phased)


@dataclass(frozen=True)
class PhasedFit(Generic[P]):
    """Constants by their names in a profile, and errors (predicted / measured - 1).

    Attributes:
        kind: what names of residuals begin with.
        samples: those that are fitted.
        own, unseen: on them, and on those of each number of heads by a fit to the others; shapes (samples,).
    """

    kind: str
    fit: Fit
    samples: list[P]
    own: Array
    unseen: Array

    @property
    def residuals(self) -> dict[str, float]:
        """Mean absolute relative errors, under their names in a profile."""
        found = {}
        for phase in ("prefill", "decode"):
            chosen = np.array([s.phase == phase for s in self.samples])
            found[f"{self.kind}_{phase}_mape"] = round(float(np.abs(self.own[chosen]).mean()), 5)
            found[f"unseen_heads_{self.kind}_{phase}_mape"] = round(float(np.abs(self.unseen[chosen]).mean()), 5)
        return found


def unseen_errors(
    kinds: NDArray[Any], terms: T, measured_s: Array, fit: Callable[[T, Array], Fit], predict_s: Callable[..., Array]
) -> Array:
    """Errors on each kind of samples by a `fit` to the others, shape (samples,); empty where there is one kind only.

    Args:
        kinds, terms, measured_s: of the samples.
        predict_s: seconds by a fit's values and terms.
    """
    unseen = np.zeros(len(measured_s))
    for kind in sorted(set(kinds)):
        out = kinds == kind
        if out.all():
            return np.zeros(0)
        unseen[out] = predict_s(fit(terms[~out], measured_s[~out]).values, terms[out]) / measured_s[out] - 1
    return unseen

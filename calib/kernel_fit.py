"""A fit to samples of single kernels: their files, terms by sample, and errors on them and on what is left out."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from calib.robust import Array, Fit
from calib.samples import read_text
from sim.errors import UserError

LONGEST_S = 60.0


class KernelSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operating point of a kernel; fields are the columns of its CSV, `latency_s` seconds of one layer among them.

    Attributes:
        what: the kernels, in messages.
        checked: columns that `is_possible` looks at, in messages.
    """

    what: ClassVar[str]
    checked: ClassVar[str]

    @property
    def is_possible(self) -> bool:
        """Whether its numbers can be."""
        return 0 < getattr(self, "latency_s") < LONGEST_S  # noqa: B009


@dataclass(frozen=True)
class KernelTerms:
    """Per sample; fields are arrays of shape (samples,)."""

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))


S = TypeVar("S", bound=KernelSample)
T = TypeVar("T", bound=KernelTerms)


@dataclass(frozen=True)
class KernelFit(Generic[S]):
    """Constants by their names in a profile, and errors (predicted / measured - 1).

    Attributes:
        samples: those that are fitted.
        own, unseen: on them, and on those of each group by a fit to the others; shapes (samples,). `unseen` is empty
            where there is one group only.
        groups: what the groups differ in, as names of residuals call it.
        parts: which samples each pair of residuals is of, by what their names have before `_mape`.
    """

    samples: list[S]
    fit: Fit
    own: Array
    unseen: Array
    groups: str
    parts: Mapping[str, NDArray[np.bool_]]

    @property
    def residuals(self) -> dict[str, float]:
        """Mean absolute relative errors, under their names in a profile."""
        found = {}
        for name, chosen in self.parts.items():
            found[f"{name}_mape"] = round(float(np.abs(self.own[chosen]).mean()), 5)
            if len(self.unseen):
                found[f"unseen_{self.groups}_{name}_mape"] = round(float(np.abs(self.unseen[chosen]).mean()), 5)
        return found


def read_kernel_samples(path: Path, kind: type[S]) -> list[S]:
    """The samples of a file. UserError for a file that holds none, or one that cannot be."""
    lines = [line for line in read_text(path).splitlines() if line[:1] != "#"]
    try:
        found = msgspec.convert(list(csv.DictReader(lines)), list[kind], strict=False)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path}: holds no samples of {kind.what} ({error}): give a gzipped CSV with their columns"
        ) from error
    for sample in found:
        if not sample.is_possible:
            raise UserError(f"{path}: {sample} cannot be: correct {kind.checked}")
    return found


def errors_of_fit(
    measured_s: Array, terms: T, group_of: NDArray[Any], fit: Callable[[T, Array], Fit], predict_s: Callable[..., Array]
) -> tuple[Fit, Array, Array]:
    """The fit to all samples, and `own` and `unseen` errors as `KernelFit` has them.

    Args:
        measured_s, terms, group_of: of the samples.
        predict_s: seconds by a fit's values and terms.
    """
    whole = fit(terms, measured_s)
    unseen = np.zeros(len(measured_s))
    for group in sorted(set(group_of)):
        out = group_of == group
        if out.all():
            unseen = np.zeros(0)
        else:
            unseen[out] = predict_s(fit(terms[~out], measured_s[~out]).values, terms[out]) / measured_s[out] - 1
    return whole, predict_s(whole.values, terms) / measured_s - 1, unseen


def phases(kind: str, what: str, phase_of: Sequence[str], heads: NDArray[Any]) -> dict[str, NDArray[np.bool_]]:
    """`KernelFit.parts` by phase, their names beginning with `kind`; UserError of one phase, or one number of heads."""
    parts = {f"{kind}_{phase}": np.array([own == phase for own in phase_of]) for phase in ("prefill", "decode")}
    if len(set(heads)) < 2 or not all(part.any() for part in parts.values()):
        raise UserError(f"samples of {what} need both phases and two numbers of heads: give more")
    return parts

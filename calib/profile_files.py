"""From samples to a profile's files: what `calibrate`, `profile fit` and `profile import` have in common."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from sim.cost.profile import Profile, load_profile, shipped_profiles
from sim.errors import UserError
from sim.files import out_folder, write_atomically
from sim.run.folders import owning
from sim.specs.hardware import HardwareSpec

if TYPE_CHECKING:
    from calib.fit import FitReport

Status = Literal["measured", "imported"]
KERNEL_FILES = ("experts", "latents", "gdn")
"""Kinds of kernels with files of samples of their own, which flags and provenance name."""
DATA = Path(__file__).parent / "data"
"""Samples of shipped profiles, those of kernels in folders of their kinds."""


def add_target(parser: argparse.ArgumentParser) -> None:
    """Flags that say whose profile is made, of what, and where it goes."""
    parser.add_argument("--gpu", required=True, metavar="NAME", help="spec of the GPU, by name or file")
    parser.add_argument("--base", metavar="PROFILE", help="profile to complete it (default: the GPU's derived)")
    parser.add_argument("--name", help="name of the profile (default: <gpu>-measured or <gpu>-imported)")
    add_out(parser)


def add_out(parser: argparse.ArgumentParser) -> None:
    """The flag that says where files go."""
    parser.add_argument(
        "--out", type=out_folder, default=Path(), metavar="DIR", help="folder to write to (%(default)s)"
    )


def profile_name(arguments: argparse.Namespace, hardware: HardwareSpec, status: Status) -> str:
    """The new profile's name, which its files get."""
    name = arguments.name or f"{hardware.name}-{status}"
    if Path(name).name != name or "\0" in name:
        raise UserError(f"--name: {name!r} cannot name a file: give a plain name, without slashes")
    return name


def derived_name(hardware: HardwareSpec) -> str:
    """Of the profile that is shipped for a GPU with no measurement of its own."""
    return f"{hardware.name.lower()}-derived"


def base_profile(name: str | None, hardware: HardwareSpec) -> Profile:
    """The profile that completes another: named, or the derived one shipped for the GPU."""
    derived = derived_name(hardware)
    if name is None and derived not in shipped_profiles():
        raise UserError(
            f"--base: no profile is shipped for gpu {hardware.name!r}: name one to complete it with; "
            "`kvtwin profile derive --gpu FILE --sibling PROFILE` makes one"
        )
    base = load_profile(name or derived)
    if base.form == "linear":
        raise UserError(f"--base: {base.name} is of form linear: give one of form roofline, such as l20-derived")
    return base


def fit_samples(
    paths: Sequence[Path],
    hardware: HardwareSpec,
    base: str | None,
    name: str,
    status: Status,
    form: str = "roofline",
    *,
    kernels: Mapping[str, Path] = MappingProxyType({}),
) -> "FitReport":
    """Fit a profile of that name and form to the samples of all files, and to those of single kernels.

    Args:
        kernels: files of kernels' samples, by `KERNEL_FILES`.

    Raises:
        UserError: a file that holds no samples, or samples that tell no profile; no base where one is needed.
    """
    from calib.fit import fit_profile, with_kernels  # noqa: PLC0415
    from calib.kernels import FITS  # noqa: PLC0415
    from calib.linear import fit_linear_profile  # noqa: PLC0415
    from calib.samples import read_comments, read_samples, samples_sha256  # noqa: PLC0415

    found = [sample for path in paths for sample in read_samples(path)]
    provenance: dict[str, str] = {}
    for path in paths:
        provenance |= read_comments(path)
    provenance["samples"] = ", ".join(path.name for path in paths)
    provenance["samples_sha256"] = ", ".join(samples_sha256(path) for path in paths)
    provenance.setdefault("date", datetime.now(UTC).date().isoformat())
    folder = paths[0].parent
    for kind, path in kernels.items():
        if form == "linear":
            raise UserError(f"--{kind}: form linear has no constants of such kernels; leave it out")
        provenance[kind] = read_comments(path).get("kernels", path.name)
        provenance[f"{kind}_sha256"] = samples_sha256(path)
    if form == "linear":
        return fit_linear_profile(found, folder, hardware, name=name, status=status, provenance=provenance)
    completed = base_profile(base, hardware)
    report = fit_profile(found, folder, hardware, completed, name=name, status=status, provenance=provenance)
    for kind, path in kernels.items():
        for fit in FITS[kind](path, report.profile, hardware):
            report = with_kernels(report, fit)
    return report


def write_report(report: "FitReport", out: Path) -> int:
    """Write the profile, the report and the figure, and say in short what was found."""
    from calib.figure import draw_fit  # noqa: PLC0415
    from calib.report import constants_table, errors_table, fit_markdown, papers_table  # noqa: PLC0415
    from sim.results.figures.style import save_figure  # noqa: PLC0415

    profile = report.profile
    with owning(out):
        print(f"\n{constants_table(report)}\n\n{errors_table(report)}\n")
        if report.papers:
            print(f"The papers' constants:\n{papers_table(report)}\n")
        if fault := profile.provenance.get("copies"):
            print(f"warning: copies were {fault}", file=sys.stderr)
        if report.carried:
            print(f"not measured, carried over: {', '.join(report.carried)}", file=sys.stderr)
        for kind, content in (("json", profile.to_json()), ("md", fit_markdown(report).encode())):
            write_atomically(out / f"{profile.name}.{kind}", content)
            print(f"wrote {out / profile.name}.{kind}")
        print(f"wrote {save_figure(out / f'{profile.name}.png', draw_fit(report))}")
    return 0

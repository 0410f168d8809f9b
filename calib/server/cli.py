"""`kvtwin profile fit --bench`: from a server's run to a profile and a report."""

import argparse
import sys

from calib.report import readable, table
from calib.server.fit import ServerFit, fit_server
from sim.cost.profile import load_profile
from sim.errors import UserError
from sim.files import write_atomically
from sim.options.flags import read_options
from sim.run.folders import owning
from sim.run.prepare import prepare
from sim.run.served import as_served, read_run
from sim.specs.hardware import load_hardware
from sim.systems import DEFAULT_POLICY


def fit_bench(arguments: argparse.Namespace) -> int:
    """Fit, write `NAME.json` and `NAME.md`, and say in short what was found."""
    own = {name: vars(arguments).pop(name) for name in ("bench", "base", "constants", "name", "form", "samples")}
    if arguments.trace is None:
        arguments.trace = str(own["bench"])
    arguments.profile = (
        load_profile(own["base"], load_hardware(arguments.gpu)).name if own["base"] is None else own["base"]
    )
    scenario, policies, out, _ = read_options(arguments, DEFAULT_POLICY)
    if len(policies) != 1:
        raise UserError(f"--policy: {len(policies)} given; the server ran one")
    if scenario.num_engines != 1:
        raise UserError(
            f"{scenario.flag_of_engines}: {scenario.num_engines} engines; constants are fitted to a server of one"
        )
    name = own["name"] or f"{load_hardware(scenario.gpu).name}-measured-from-server"
    served = read_run(own["bench"], scenario)
    setup = prepare(as_served(scenario), *policies[0])
    found = fit_server(setup, served, name=name, constants=own["constants"])
    text = report(found)
    with owning(out):
        for file_name, data in ((f"{name}.json", found.profile.to_json()), (f"{name}.md", text.encode())):
            write_atomically(out / file_name, data)
    print(text)
    for note in found.notes:
        print(f"kvtwin: {note}", file=sys.stderr)
    print(f"wrote {out / name}.json and {name}.md")
    return 0


def report(found: ServerFit) -> str:
    """The fit in Markdown."""
    profile = found.profile
    rows = []
    for name, estimate in found.estimates.items():
        unit = profile.constants[name].unit
        interval = f"{readable(estimate.low, unit)} to {readable(estimate.high, unit)}"
        if estimate.stderr is None:
            interval = "at the limit of what it may be"
        elif profile.constants[name].stderr is None:
            interval = "not told alone"
        rows.append((f"`{name}`", readable(estimate.value, unit), interval))
    errors = [
        (f"mean {name.upper()}", _signed(found.held_out.get(name)), _signed(error))
        for name, error in found.whole.items()
    ]
    about = [f"- {key}: {value}" for key, value in profile.provenance.items()]
    notes = [f"- {note}" for note in found.notes]
    parts = [
        f"# {profile.name}",
        f"{profile.gpu}, {profile.status}: fitted to {found.method}.",
        "\n".join(about),
        "## Constants",
        table(("constant", "value", "95 % interval"), rows),
        "## Simulated over measured",
        "Held out: the second half of the requests, from constants fitted to the first half's times alone.",
        table(("metric", "held out", "whole run"), errors),
        *(["## Notes", "\n".join(notes)] if notes else []),
    ]
    return "\n\n".join(parts) + "\n"


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"

"""Command line flags: fields of `Scenario`, `Outputs` and of the policies' options, read over a scenario file."""

import argparse
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from sim.errors import UserError
from sim.files import out_folder
from sim.options.policies import (
    PolicyOption,
    has_option,
    options_of,
    owned_option,
    parse_policy,
)
from sim.options.scenario import Outputs, Scenario, build_options, build_scenario
from sim.options.scenario_file import read_scenario
from sim.options.values import base_type, convert, flag, option_fields
from sim.systems import DEFAULT_POLICY, POLICIES, read_systems
from sim.systems.base import Policy

BUILT_IN = {"model": "models", "gpu": "gpus"}
"""Options that take names, and the folders that hold what ships."""


MOST_NEEDED = (
    "scenario", "policy", "out", "trace", "trace_format", "workload", "num_prompts", "request_rate", "max_concurrency",
    "input_len", "output_len", "seed", "model", "gpu", "tp", "pp", "replicas", "quantization", "kv_cache_dtype",
    "profile", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching",
    "kv_offloading_size", "goodput", "timeline", "figures", "quiet", "bounds",
)  # fmt: skip
"""Options that the short help has."""


def add_flags(parser: Any, without: Collection[str] = ()) -> None:  # noqa: ANN401 - the command line's own parser
    """Add a flag for every field of a scenario, and `--out`, but those `without`, and every option of the policies."""
    parser.needed = MOST_NEEDED
    parser.rare = {f.name for owner in (Outputs, Scenario) for f, _ in option_fields(owner)}
    if "scenario" not in without:
        text = "TOML file with these options; flags override it"
        parser.add_argument("--scenario", type=Path, metavar="FILE", help=text)
    # A study's file may follow a policy: several in a row would take it for one.
    in_a_row = {"action": "append"} if "scenario" in without else {"action": "extend", "nargs": "+"}
    parser.add_argument(
        "--policy",
        **in_a_row,
        metavar="P",
        help=f"one of {', '.join(POLICIES)} (run: default {DEFAULT_POLICY}); options and parts as "
        "NAME:option=value,... or options by their flags",
    )
    if "out" not in without:
        parser.add_argument("--out", type=out_folder, metavar="DIR", help="folder for the results (required)")
    for f, hint in (*option_fields(Outputs), *option_fields(Scenario)):
        if f.name not in without:
            text = f.metadata["help"]
            if base_type(hint) is not bool and f.default not in (None, ()):
                text += f" (default: {f.default})"
            action = _add_flag(parser, f.name, hint, text, f.metadata["metavar"], f.metadata["alias"])
            if f.name in BUILT_IN:
                parser.later(partial(_name_built_in, action=action), ("-h", "--help"))
    # A policy's flags are added, and the policy imported, when one of them is given or help asked for.
    _add_policy_flags(parser, DEFAULT_POLICY)
    for name in POLICIES:
        if name == DEFAULT_POLICY:
            continue
        parser.later(partial(_add_policy_flags, name=name), (f"--{name}-", f"--no-{name}-"))
    parser.later(_add_flags_of_plugins, ("-h", "--help"))


def add_bound_flags(parser: Any) -> None:  # noqa: ANN401 - the command line's own parser
    """Flags of `compare` alone: what stands beside the policies."""
    yes_or_no = argparse.BooleanOptionalAction
    text = "the most goodput that any scheduler could reach (default: where there is one, below 20,000 requests)"
    parser.add_argument("--bound", action=yes_or_no, default=None, help=text)
    text = "run each policy with infinite PCIe, infinite memory and known lengths, too"
    parser.add_argument("--lift-limits", action="store_true", default=None, help=text)
    text = (
        "draws of the traffic, which tell differences from chance: other seeds, or resamples of the trace (default: 1)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=text)


def _name_built_in(_: object, action: argparse.Action) -> None:
    """Names that ship, for the help alone: reading folders takes time."""
    found = sorted(path.stem for path in (Path(__file__).parents[1] / "specs" / BUILT_IN[action.dest]).glob("*.json"))
    action.help = f"{action.help}; built in: {', '.join(found)}"


def _add_flags_of_plugins(parser: argparse.ArgumentParser) -> None:
    """Those of policies that other distributions bring, for the help and for flags that are not known otherwise.

    Where one is broken the help says how, and has the others.
    """
    known, faults = set(POLICIES), list[UserError]()
    try:
        read_systems()
    except UserError as fault:
        faults.append(fault)
    for name in POLICIES:
        if name not in known:
            try:
                _add_policy_flags(parser, name)
            except UserError as fault:
                faults.append(fault)
    for fault in faults:
        parser.add_argument_group("not to be had", str(fault))


def _add_policy_flags(parser: argparse.ArgumentParser, name: str) -> None:
    kind = POLICIES[name]
    parts = ", ".join(f"{part} {value}" for part, value in kind.composition.items())
    group = parser.add_argument_group(f"options of {name}", f"{kind.summary} ({parts})")
    for option in options_of(kind):
        if option.is_plain and name != DEFAULT_POLICY:
            continue
        text, default = option.field.metadata["help"], option.field.default
        text += "" if default is None else f" (default {default})"
        _add_flag(group, option.full_name, option.hint, text, None)


class _OneSpelling(argparse.Action):
    """Stores a value; refuses two spellings of one option, of which the last would count silently."""

    spelled = ""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401
        option_string: str | None = None,
    ) -> None:
        if self.spelled not in ("", option_string):
            parser.error(f"{self.spelled} and {option_string} are one option; keep one")
        self.spelled = option_string or ""
        setattr(namespace, self.dest, values)


def _add_flag(
    target: Any,  # noqa: ANN401
    name: str,
    hint: Any,  # noqa: ANN401
    help_text: str,
    metavar: str | None,
    alias: str | None = None,
) -> argparse.Action:
    """One option; None when not given, so that a scenario file's value or the default holds."""
    flags = [flag(name)] if alias is None else [flag(name), flag(alias)]
    kind = base_type(hint)
    text = help_text.replace("%", "%%")
    if kind is bool:
        return target.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
    if get_origin(kind) is Literal:
        return target.add_argument(*flags, choices=get_args(kind), default=None, help=text)
    if get_origin(kind) is tuple:
        return target.add_argument(*flags, nargs="+", action="extend", default=None, help=text, metavar="WORD")
    action = "store" if alias is None else _OneSpelling
    return target.add_argument(
        *flags, action=action, dest=name, default=None, help=text, metavar=metavar or name.upper()
    )


def taken(values: dict[str, Any]) -> str:
    """What counts for the model and the GPU where neither flags nor a file name them; empty where they do."""
    plain = Scenario(workload="fixed")
    left = [f"{flag(name)} {getattr(plain, name)}" for name in BUILT_IN if values.get(name) is None]
    return f"taken, as not given: {', '.join(left)}" if left else ""


def asked_values(arguments: argparse.Namespace, default: str | None = None) -> dict[str, Any]:
    """Options by name, those of flags over those of the scenario file; the policy `default` where none is named."""
    values = read_scenario(arguments.scenario) if arguments.scenario else {}
    values |= {name: value for name, value in vars(arguments).items() if value is not None}
    if default is not None:
        values.setdefault("policy", (default,))
    return values


def _check_heard(
    name: str,
    value: object,
    option: PolicyOption,
    policies: list[tuple[str, Policy]],
) -> None:
    """UserError where each policy that has an option says something else of it in place: then the flag does nothing."""
    said = convert(flag(name), value, option.hint)
    having = [(label, policy) for label, policy in policies if has_option(policy.name, option)]
    if all(getattr(policy, option.name) != said for _, policy in having):
        label, policy = having[0]
        told = f"--policy {label} says {getattr(policy, option.name)}"
        raise UserError(f"{flag(name)}: {value} is what no policy has: {told}; give one of them")


def read_options(
    arguments: argparse.Namespace, default: str | None = None
) -> tuple[Scenario, list[tuple[str, Policy]], Path, Outputs]:
    """Scenario, labelled policies, output folder and outputs from flags over an optional scenario file.

    `default` is the policy where none is named; None: then it is missing.
    """
    values = asked_values(arguments, default)
    named = {name for name, value in vars(arguments).items() if value is not None}
    sources = {name: str(arguments.scenario) for name in values if name not in named}
    texts: tuple[str, ...] = tuple(values.get("policy") or ())
    if not texts:
        raise UserError(f"--policy is missing; known: {', '.join(POLICIES)}")
    policies = [parse_policy(text, values) for text in texts]
    plain = {f.name for owner in (Scenario, Outputs) for f, _ in option_fields(owner)}
    for name in values.keys() - plain:
        # Flags and keys have been read: what no policy known by now has is the command's own.
        option = owned_option(name, installed=False)
        if option is not None and not any(has_option(policy.name, option) for _, policy in policies):
            raise UserError(f"{flag(name)}: an option of {option.policy}, which --policy does not name")
        if option is not None:
            _check_heard(name, values[name], option, policies)
    if "out" not in values:
        raise UserError("--out DIR is missing: where are the results to go?")
    return build_scenario(values, sources), policies, Path(values["out"]), build_options(Outputs, values)

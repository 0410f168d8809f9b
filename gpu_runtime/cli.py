"""The commands `live` and `validate`."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.cost.engine_profile import OF_POLICY, OURS, OURS_AHEAD, shipped_engines
from sim.cost.profile import load_profile
from sim.errors import UserError
from sim.files import folder_name
from sim.options.flags import add_flags, read_options
from sim.options.scenario import Scenario
from sim.options.scenario_file import read_scenario
from sim.run.folders import renewing
from sim.specs.hardware import gpu_called, load_hardware
from sim.systems.base import Policy

if TYPE_CHECKING:
    from gpu_runtime.live import LiveOptions
    from gpu_runtime.model.decoder import Decoder
    from sim.run.files import Perform

OWN = ("device", "weights", "attention_backend", "runs", "max_drift")
"""Flags that are not a scenario's."""
ATTENTION_BACKENDS = ("auto", "fastest", "flashinfer", "triton", "torch")


def add_live(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `live`."""
    parser.description = (
        "Serve a trace or a generated workload with torch: the policies of `kvtwin run`, on a real clock. "
        "The same files come out. Needs the extra `gpu` (torch)."
    )
    parser.set_defaults(run=run_live)
    add_flags(parser)
    add_device_flags(parser)


def add_device_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The flags of every command that executes plans."""
    parser.add_argument("--device", choices=("cuda", "cpu"), required=required, help="what executes the plans")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="checkpoint folder (default: random weights)")
    parser.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="kernels beside the products of matrices: auto is triton on CUDA and torch on a CPU, fastest "
        "what a layer of the model takes the least time with; flashinfer has not been measured yet (%(default)s)",
    )


def add_validate(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `validate`."""
    parser.description = (
        "Simulate a scenario, execute it on this machine several times, and report the error of every metric against "
        "the live runs' own spread. With --against: simulate what a server was sent, and report every metric and the "
        "worst requests beside what its client measured."
    )
    parser.set_defaults(run=run_validate)
    add_flags(parser)
    add_device_flags(parser, required=False)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RESULT",
        help="a server's run to compare with instead of --device: JSON of `vllm bench serve`, or a table of requests",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="live runs of each policy (%(default)s)")
    parser.add_argument(
        "--max-drift",
        type=float,
        metavar="SHARE",
        help="run again, at most five times as often, while a probe before or after a live run takes more than this "
        "share more or less than the profile says (default: count every run and report the probe)",
    )


def run_live(arguments: argparse.Namespace) -> int:
    """`kvtwin live`."""
    from sim.run.files import carry_out, draw_result, print_result  # noqa: PLC0415 - numpy is slow to import

    options, _ = _own_options(arguments)
    scenario, policies, folder, outputs = read_options(arguments)
    if len(policies) != 1:
        raise UserError(f"live takes one --policy, {len(policies)} given")
    options = replace(options, seed=scenario.seed)
    scenario, decoder = decoder_for(scenario, options, policies)
    label, policy = policies[0]
    scenario, policy = _fitted(scenario, policy, options, decoder)
    with renewing(folder) as new:
        run, result = carry_out(scenario, label, policy, new.place, outputs, _on_device(decoder, options))
        draw_result(run, result, new.place, outputs)
        new.whole = result.complete
    return print_result(run, result, new.home, outputs)


def run_validate(arguments: argparse.Namespace) -> int:
    """`kvtwin validate`."""
    against = vars(arguments).pop("against")
    if (against is None) == (arguments.device is None):
        raise UserError(
            f"--device and --against RESULT: {'neither is' if against is None else 'both are'} given; give one"
        )
    if against is not None:
        from gpu_runtime.twin.against import validate_against  # noqa: PLC0415

        return validate_against(arguments, against)
    options, own = _own_options(arguments)
    from gpu_runtime.twin.probe import Probe  # noqa: PLC0415
    from gpu_runtime.twin.validate import BrokenOff, Validator  # noqa: PLC0415
    from sim.run.files import draw_result, print_result  # noqa: PLC0415

    runs, max_drift = own["runs"], own["max_drift"]
    if runs < 1:
        raise UserError(f"--runs: {runs} is less than 1: give how often to run live")
    if max_drift is not None and max_drift <= 0:
        raise UserError(f"--max-drift: {max_drift} is not more than 0: give a share such as 0.05")
    scenario, policies, folder, outputs = read_options(arguments)
    options = replace(options, seed=scenario.seed)
    scenario, decoder = decoder_for(scenario, options, policies)
    # All are checked before the first runs.
    planned = [(label, *_fitted(scenario, policy, options, decoder)) for label, policy in policies]
    places = [folder_name(label) for label, _ in policies]
    names = ["simulated", *(f"live-{number}" for number in range(1, runs + 1))]
    below, ended = [*(f"{place}/{name}" for place in places for name in names), *places], None
    with renewing(folder, below=below) as new:
        probe = Probe(scenario, decoder, options, max_drift)
        validator = Validator(new.place, outputs, runs, probe, _on_device(decoder, options))
        try:
            for label, fitting, policy in planned:
                validator.validate(fitting, label, policy)
        except BrokenOff as end:
            draw_result(end.run, end.result, end.folder, outputs)
            ended, new.whole = end, False
    if ended is not None:
        return print_result(ended.run, ended.result, new.home / ended.folder.relative_to(new.place), outputs)
    if not outputs.quiet:
        print(validator.text)
        print(f"wrote {new.home / 'validation.md'} and a figure for each policy")
    return 0 if validator.agrees else 1


def _fitted(scenario: Scenario, policy: Policy, options: "LiveOptions", decoder: "Decoder") -> tuple[Scenario, Policy]:
    """The scenario with pools that this machine has memory for, and when the policy's steps are scheduled.

    UserError for what a run would refuse.
    """
    from gpu_runtime.live import check_lengths  # noqa: PLC0415 - torch is slow to import
    from gpu_runtime.machine.live_memory import fit_to_machine  # noqa: PLC0415
    from gpu_runtime.machine.scheduling import scheduled  # noqa: PLC0415
    from sim.run.prepare import prepare  # noqa: PLC0415

    scenario, policy = scheduled(scenario, policy, options.device)
    fitting = fit_to_machine(scenario, policy, options.device, decoder)
    check_lengths(prepare(fitting, policy.name, policy), decoder.config)
    return fitting, policy


def _on_device(decoder: "Decoder", options: "LiveOptions") -> "Perform":
    """Carries a run out on this machine."""
    from gpu_runtime.live import perform  # noqa: PLC0415 - torch is slow to import

    return lambda setup, requests, table, keep: perform(setup, requests, table, keep, decoder, options)


def of_our_engine(scenario: Scenario) -> Scenario:
    """With the host time of the live runtime, whose engine this is; UserError where another was asked for."""
    from sim.run.prepare import FORMS_WITH_ENGINE  # noqa: PLC0415 - numpy is slow to import

    if scenario.engine_profile in {OF_POLICY, *shipped_engines()} - {OURS, OURS_AHEAD}:
        raise UserError(
            f"--engine-profile {scenario.engine_profile}: the live runtime's engine is {OURS}; leave it out, or give a "
            "file of its own times"
        )
    if scenario.max_cudagraph_capture_size is not None:
        raise UserError(
            f"--max-cudagraph-capture-size {scenario.max_cudagraph_capture_size}: the live runtime captures graphs of "
            "decodes, and of pieces of iterations with prompts, of sizes of its own; leave it out"
        )
    form = scenario.cost_form or load_profile(scenario.profile, load_hardware(scenario.gpu)).form
    return replace(scenario, engine_profile=scenario.engine_profile or OURS) if form in FORMS_WITH_ENGINE else scenario


def check_installed(packages: Iterable[str], extra: str) -> None:
    """UserError naming the extra that brings them, unless all packages are there."""
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install 'kvtwin[{extra}]'")


def _own_options(arguments: argparse.Namespace) -> "tuple[LiveOptions, dict[str, Any]]":
    """Take the flags that are not a scenario's out of the arguments."""
    check_installed(("torch", "psutil"), "gpu")
    from gpu_runtime.live import LiveOptions, check_device  # noqa: PLC0415 - torch is slow to import

    own = {name: vars(arguments).pop(name, None) for name in OWN}
    check_device(own["device"])
    name_gpu(arguments, own["device"])
    return LiveOptions(own["device"], own["weights"], attention_backend=own["attention_backend"]), own


def name_gpu(arguments: argparse.Namespace, device: str) -> None:
    """The machine is what executes, a CPU or the GPU that CUDA names, unless flags or the scenario file say otherwise.

    UserError for a GPU without a spec.
    """
    if arguments.gpu is None and "gpu" not in (read_scenario(arguments.scenario) if arguments.scenario else {}):
        import torch  # noqa: PLC0415 - slow to import

        arguments.gpu = "cpu" if device == "cpu" else gpu_called(torch.cuda.get_device_name())


def decoder_for(
    scenario: Scenario, options: "LiveOptions", policies: Sequence[tuple[str, Policy]] = ()
) -> "tuple[Scenario, Decoder]":
    """The weights, and the scenario with the dtype they are in and our own engine's costs.

    UserError for what several ranks cannot do of the policies, before any is started.
    """
    from gpu_runtime.kv.stored import stored_dtype  # noqa: PLC0415 - torch is slow to import
    from gpu_runtime.live import DTYPES, check_gpus, default_dtype, load_decoder  # noqa: PLC0415
    from gpu_runtime.machine.scheduling import moves  # noqa: PLC0415
    from gpu_runtime.other_rank import serve_others  # noqa: PLC0415
    from gpu_runtime.ranks import FirstGroup  # noqa: PLC0415

    stages, engines = scenario.pipeline_parallel_size, scenario.num_engines
    weights, attention = scenario.quantization, scenario.sparse_attention
    leave = "leave it out, or simulate"
    pooled = next((policy.name for _, policy in policies if policy.hands_over), None)
    for is_asked, asked, why in (
        (stages not in (None, 1), f"--pipeline-parallel-size: {stages} stages;", "has one: simulate"),
        (pooled is not None, f"--policy {pooled}: hands sequences over to other engines;", "serves from one: simulate"),
        (engines != 1, f"{scenario.flag_of_engines}: {engines} engines;", f"serves from one: {leave}"),
        (weights is not None, f"--quantization {weights}:", "computes with weights as they are; leave it out"),
        (attention is not None, f"--sparse-attention {attention}:", f"attends to the whole context; {leave}"),
    ):
        if is_asked:
            raise UserError(f"{asked} the live runtime {why}")
    if scenario.dtype == "auto":
        scenario = replace(scenario, dtype=default_dtype(options.device))
    stored_dtype(scenario.kv_cache_dtype, DTYPES[scenario.dtype], options.device)
    scenario = of_our_engine(scenario)
    if scenario.tp == 1:
        return scenario, load_decoder(scenario.model, scenario.dtype, options)
    check_gpus(scenario.tp, options.device)
    for _, policy in policies:
        if reason := moves(scenario, policy):
            raise UserError(
                f"--tp {scenario.tp}: {policy.name} has {reason}, and copies of KV end at other times on other ranks: "
                "leave --tp out, or simulate"
            )
    group = FirstGroup(scenario, options, serve_others)
    with group.together():
        decoder = load_decoder(scenario.model, scenario.dtype, options, group)
    return scenario, decoder

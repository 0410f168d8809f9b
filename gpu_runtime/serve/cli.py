"""The command `serve`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_runtime.cli import add_device_flags, check_installed, decoder_for, name_gpu
from sim.errors import UserError
from sim.options.flags import add_flags, read_options
from sim.options.scenario import READING, SHAPING
from sim.options.scenario_file import read_scenario
from sim.options.values import flag
from sim.run.folders import clear, owning

if TYPE_CHECKING:
    from sim.run.prepare import Setup
    from sim.run.runs import Run

API_KEY = "KVTWIN_API_KEY"
HTTP = "http"
"""What a served run names as its workload."""
TRAFFIC = ("trace", "trace_format", *READING, *SHAPING)
"""Options that say which requests come, and when: here that is the clients' business."""
FAILED = 1
HELP = (
    "Serve a model over HTTP as OpenAI's API does (/v1/completions, /v1/chat/completions, /v1/models, /v1/models/ID, "
    "/health, /metrics) under one of the policies. A request that names no temperature, top_p, top_k or min_p gets "
    "those of the checkpoint's generation_config.json, else a temperature of 1, as in vLLM. A chat becomes a prompt "
    "by the tokenizer's own template. Without --tokenizer a text is its UTF-8 bytes, a chat its messages, role: "
    "content a line, and each token of an answer one printable character. SIGTERM or SIGINT refuses new requests, "
    "finishes those accepted and writes the files of `kvtwin live`; a second signal ends at once. /health and /metrics "
    "ask no key. "
    "Needs the extras `gpu` (torch) and `serve` (aiohttp)."
)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `serve`."""
    parser.description = HELP
    parser.set_defaults(run=run_serve)
    add_flags(parser, without=(*TRAFFIC, "step"))
    add_device_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"what clients of /v1 must send (default: ${API_KEY}; without it, nothing)"
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=512,
        metavar="N",
        help="most accepted requests without a first token; more get status 429 (%(default)s)",
    )
    # A scenario's tokenizer counts the prompts of a trace; this one makes tokens of the clients' texts.
    parser.add_argument(
        "--tokenizer",
        dest="tokenizer_folder",
        type=Path,
        metavar="DIR",
        help="folder with tokenizer.json (default: bytes)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja that makes a prompt of a chat's messages (default: the tokenizer's own)",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="name that clients use (default: the model's)")


def run_serve(arguments: argparse.Namespace) -> int:
    """`kvtwin serve`."""
    check_installed(("torch", "psutil"), "gpu")
    check_installed(("aiohttp",), "serve")
    from gpu_runtime.live import LiveOptions, check_device  # noqa: PLC0415 - torch is slow to import
    from gpu_runtime.machine.live_memory import fit_to_machine  # noqa: PLC0415
    from gpu_runtime.machine.scheduling import scheduled  # noqa: PLC0415
    from gpu_runtime.serve.run import bind, default_sampling, is_public, perform, stop_tokens, url_of  # noqa: PLC0415
    from gpu_runtime.serve.server import ServerOptions  # noqa: PLC0415
    from gpu_runtime.serve.text import load_codec  # noqa: PLC0415
    from sim.run.files import RowsAtOnce, draw_result, print_result, record, table_columns  # noqa: PLC0415
    from sim.run.prepare import prepare  # noqa: PLC0415

    api_key = arguments.api_key or os.environ.get(API_KEY) or None
    if arguments.max_queue < 1:
        raise UserError(f"--max-queue: {arguments.max_queue} is less than 1: give how many requests may wait")
    _refuse_traffic(arguments.scenario)
    arguments.workload = HTTP
    check_device(arguments.device)
    name_gpu(arguments, arguments.device)
    scenario, policies, folder, outputs = read_options(arguments)
    if len(policies) != 1:
        raise UserError(f"serve takes one --policy, {len(policies)} given")
    if scenario.tp != 1:
        raise UserError(f"--tp: {scenario.tp} GPUs; requests over HTTP reach one process: give them to `kvtwin live`")
    live = LiveOptions(arguments.device, arguments.weights, scenario.seed, arguments.attention_backend)
    bound = bind(arguments.host, arguments.port)
    if is_public(bound) and api_key is None:
        print(
            f"kvtwin: warning: anyone who reaches {url_of(bound)} may use it: give --api-key or --host 127.0.0.1",
            file=sys.stderr,
        )
    scenario, decoder = decoder_for(scenario, live, policies)
    codec = load_codec(arguments.tokenizer_folder, decoder.config.vocab_size, arguments.chat_template)
    label, policy = policies[0]
    scenario, policy = scheduled(scenario, policy, arguments.device)
    setup = prepare(fit_to_machine(scenario, policy, arguments.device, decoder), label, policy)
    options = ServerOptions(
        model=arguments.served_model_name or setup.model.name,
        root=scenario.model,
        max_model_len=setup.limits.max_model_len,
        vocab_size=decoder.config.vocab_size,
        stop=stop_tokens(arguments.weights),
        sampling=default_sampling(arguments.weights),
        max_queue=arguments.max_queue,
        api_key=api_key,
    )

    table = RowsAtOnce(folder, table_columns(setup))

    def begin() -> None:
        if not table.is_open:
            clear(folder)
            table.open()

    def announce() -> None:
        if not outputs.quiet:
            what = f"{options.model} with {setup.label} on {arguments.device}, {setup.limits.num_gpu_blocks} KV blocks"
            print(f"kvtwin: serving {what}: {url_of(bound)}", flush=True)

    def on_device(setup: "Setup", requests: object, table: Any, keep: Any) -> "Run":  # noqa: ANN401
        how = {"folder": folder, "begin": begin, "announce": announce}
        return perform(setup, table, keep, decoder, live, codec, options, bound, **how)

    with owning(folder):
        run, result = record(setup, folder, outputs, on_device, requests=(), table=table)
        draw_result(run, result, folder, outputs)
    status = print_result(run, result, folder, outputs)
    return FAILED if run.error else status


def _refuse_traffic(path: Path | None) -> None:
    for name in read_scenario(path) if path else ():
        if name in TRAFFIC:
            raise UserError(f"{path}: {flag(name)[2:]} says which requests come; here clients send them: leave it out")

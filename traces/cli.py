"""`kvtwin trace`: look at traces, convert them, generate workloads, and list and fetch public ones."""

import argparse
import json
import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

from traces.adapters import with_adapters
from traces.errors import TraceError
from traces.fields import TIME_UNITS
from traces.readers import FORMATS, Trace, open_trace
from traces.request import Request
from traces.rows import ZERO_TOKENS, ReadOptions
from traces.tool_calls import with_tool_calls
from traces.transforms import at_request_rate, clip, head, merge, scale_rate, spread_ties, window
from traces.workloads import ABOUT, WORKLOADS, option_help, option_type
from traces.writers import STANDARD_OUTPUT, write_trace

_FORMAT_HELP = "\n".join(
    ("formats, told by their first line:", *(f"  {name}" for name in FORMATS), "gzipped files are read as they are")
)
_WORKLOAD_HELP = "\n".join(("workloads:", *(f"  {name:16} {about}" for name, about in WORKLOADS.items())))


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Mount the commands of `trace`; each sets `run`, a function from the parsed arguments to the exit status."""
    parser.description = __doc__
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_convert(commands)
    _add_generate(commands)
    listing = commands.add_parser("list", help="list the public traces that `fetch` knows")
    listing.add_argument("--json", action="store_true", help="print the whole catalogue as JSON")
    listing.set_defaults(run=run_list)
    _add_fetch(commands)


def _parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, about: str, epilog: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--trace-format",
        "--format",
        dest="format",
        metavar="NAME",
        help="format of the input (default: told by its first line)",
    )
    group.add_argument(
        "--time-unit", choices=TIME_UNITS, help="unit of numeric times, where it is not the format's (Mooncake: ms)"
    )
    group.add_argument(
        "--hash-block-tokens", type=int, metavar="N", help="tokens of a prefix block (Mooncake: 512, Bailian: 16)"
    )
    group.add_argument(
        "--zero-tokens",
        choices=ZERO_TOKENS,
        default="error",
        help="rows of 0 prompt or output tokens (BurstGPT's failures): refuse, drop, or read as 1 token",
    )
    group.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json for prompts in words, or bytes:4 to estimate their lengths"
    )
    group.add_argument("--default-prompt-tokens", type=int, metavar="N", help="length of prompts that have none")
    group.add_argument("--default-output-tokens", type=int, metavar="N", help="length of outputs that have none")
    group.add_argument(
        "--no-sharegpt-filter",
        dest="sharegpt_filter",
        action="store_false",
        help="keep the conversations that vLLM's benchmarks leave out (under 4 or over 1,024 + 1,024 tokens)",
    )
    group.add_argument("--sort", action="store_true", help="sort by arrival, holding the trace in memory")


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _parser(
        commands, "inspect", "show what a trace looks like: rate, burstiness, lengths, reuse", _FORMAT_HELP
    )
    parser.add_argument("path", type=Path, metavar="FILE", help="trace file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_reading(parser)
    parser.set_defaults(run=run_inspect)


def _add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    steps = "steps, in this order: window, clip, rate scale, spread ties (of each input), merge, request rate, head"
    parser = _parser(commands, "convert", "convert, cut, scale and merge traces", f"{steps}\n\n{_FORMAT_HELP}")
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="trace files; several are merged by time")
    _add_output(parser)
    group = parser.add_argument_group("changes")
    group.add_argument("--window", metavar="START:END", help="keep arrivals in [START, END) s; START becomes 0")
    group.add_argument("--clip", type=int, metavar="TOKENS", help="fit prompt + output into a context of this length")
    group.add_argument("--rate-scale", type=float, metavar="X", help="X times the rate: 2 halves all arrival times")
    group.add_argument(
        "--spread-ties", action="store_true", help="spread requests of one time stamp up to the next one"
    )
    group.add_argument("--request-rate", type=float, metavar="R", help="replace arrivals: R requests/s (inf: all at 0)")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="with --request-rate; 1 is Poisson")
    group.add_argument("--seed", type=int, default=0, help="of the arrivals that --request-rate draws (default 0)")
    group.add_argument("--head", type=int, metavar="N", help="keep the first N requests")
    _add_drawn(parser)
    _add_reading(parser)
    parser.set_defaults(run=run_convert)


def _add_drawn(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tool calls, drawn by --seed")
    group.add_argument("--tool-calls", type=float, metavar="N", help="mean calls of tools of a request (Poisson)")
    group.add_argument(
        "--tool-call-s", type=float, default=1.0, metavar="S", help="mean seconds of a call, exponential (default 1)"
    )
    group.add_argument(
        "--tool-call-tokens", type=float, default=32.0, metavar="N",
        help="mean tokens that a call returns, exponential (default 32)",
    )  # fmt: skip
    group = parser.add_argument_group("adapters (LoRA), drawn by --seed")
    group.add_argument("--loras", type=int, metavar="N", help="give each request one of N adapters")
    group.add_argument(
        "--lora-skew", type=float, default=0.0, metavar="S",
        help="the adapter of rank r is drawn with a weight of 1 / r^S (default 0: all alike)",
    )  # fmt: skip


def _with_drawn(stream: Iterable[Request], args: argparse.Namespace) -> Iterable[Request]:
    if args.tool_calls is not None:
        stream = with_tool_calls(stream, args.tool_calls, args.tool_call_s, args.tool_call_tokens, args.seed)
    return stream if args.loras is None else with_adapters(stream, args.loras, args.lora_skew, args.seed)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="our CSV, or Mooncake's JSONL for a .jsonl name; -: to standard output",
    )


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _parser(commands, "generate", "write a synthetic workload", _WORKLOAD_HELP)
    parser.add_argument("name", metavar="WORKLOAD", help="one of the workloads below")
    _add_output(parser)
    parser.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="how many requests (default 1000)")
    parser.add_argument(
        "--request-rate", type=float, metavar="R", help="requests/s (default: the workload's own, else 1)"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson, below it burstier")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same requests (default 0)")
    parser.add_argument("--input-len", type=int, metavar="TOKENS", help="prompt length, or its mean")
    parser.add_argument("--output-len", type=int, metavar="TOKENS", help="output length, or its mean")
    _add_drawn(parser)
    group = parser.add_argument_group("by workload")
    for name in ABOUT:
        kind = option_type(name)
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=option_help(name))
    parser.set_defaults(run=run_generate, more=tuple(ABOUT))


def _add_fetch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _parser(
        commands,
        "fetch",
        "download a public trace and verify it",
        "An interrupted download is resumed. Mind the licence and cite the authors: see `kvtwin trace list`.",
    )
    parser.add_argument("name", metavar="NAME", help="a name of `kvtwin trace list`")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="file or folder (default: here)")
    parser.add_argument("--url", help="a mirror to download from instead")
    parser.add_argument("--sha256", metavar="HEX", help="the checksum to verify, where the catalogue has none")
    parser.set_defaults(run=run_fetch)


def _open(path: Path, args: argparse.Namespace) -> Trace:
    names = [name for name in ReadOptions.__struct_fields__ if name != "needs_times"]
    reading: dict[str, Any] = {name: getattr(args, name) for name in names}
    # Lengths can be looked at without, and --request-rate makes others.
    return open_trace(
        path, format=args.format, needs_times="request_rate" in args and args.request_rate is None, **reading
    )


def run_inspect(args: argparse.Namespace) -> int:
    """Print the statistics of a trace."""
    from traces.summary import summarize  # noqa: PLC0415
    from traces.tables import print_summary  # noqa: PLC0415  (rich)

    trace = _open(args.path, args)
    summary = summarize(trace)
    if args.json:
        about = {"path": str(trace.path), "format": trace.format, "skipped": trace.skipped}
        print(json.dumps({**about, **summary.to_dict()}, indent=2))
    else:
        print_summary(trace, summary)
    return 0


def parse_window(text: str) -> tuple[float, float]:
    """Return the bounds that START:END names, in seconds; a missing one is open."""
    start, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(start) if start else 0.0, float(end) if end else inf
    except ValueError:
        raise TraceError(f"window {text!r} is not START:END in seconds; write for example 600:1200, or 600:") from None


def run_convert(args: argparse.Namespace) -> int:
    """Read, change and write traces."""
    bounds = parse_window(args.window) if args.window is not None else None
    traces = [_open(path, args) for path in args.paths]
    stream = merge(*(_changed(trace, bounds, args) for trace in traces))
    if args.request_rate is not None:
        stream = at_request_rate(stream, args.request_rate, args.burstiness, args.seed)
    if args.head is not None:
        stream = head(stream, args.head)
    count = write_trace(_with_drawn(stream, args), args.output)
    skipped = sum(trace.skipped for trace in traces)
    _say_written(count, args.output, f" ({skipped:,} rows skipped)" if skipped else "")
    return 0


def _changed(
    trace: Iterable[Request], bounds: tuple[float, float] | None, args: argparse.Namespace
) -> Iterable[Request]:
    if bounds is not None:
        trace = window(trace, *bounds)
    if args.clip is not None:
        trace = clip(trace, args.clip)
    if args.rate_scale is not None:
        trace = scale_rate(trace, args.rate_scale)
    return spread_ties(trace) if args.spread_ties else trace


def run_generate(args: argparse.Namespace) -> int:
    """Write a synthetic workload."""
    from traces.generators import generate  # noqa: PLC0415  (numpy)

    given = {name: getattr(args, name) for name in args.more if getattr(args, name) is not None}
    stream = generate(
        args.name,
        num_prompts=args.num_prompts,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        seed=args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        **given,
    )
    _say_written(write_trace(_with_drawn(stream, args), args.output), args.output)
    return 0


def _say_written(count: int, path: Path, more: str = "") -> None:
    # What is written to standard output stays free of words.
    if path == STANDARD_OUTPUT:
        print(f"wrote {count:,} requests{more}", file=sys.stderr)
    else:
        print(f"wrote {count:,} requests to {path}{more}")


def run_list(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    from traces.catalogue import CATALOGUE, entries  # noqa: PLC0415  (http)
    from traces.tables import print_catalogue  # noqa: PLC0415

    if args.json:
        print(CATALOGUE.read_text(encoding="utf-8"), end="")
    else:
        print_catalogue(entries())
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Download a public trace and verify it."""
    from traces.catalogue import entry, fetch  # noqa: PLC0415
    from traces.tables import download_bar  # noqa: PLC0415

    item = entry(args.name)
    with download_bar(item.name, shown=sys.stderr.isatty()) as progress:
        path = fetch(args.name, args.output, url=args.url, sha256=args.sha256, progress=progress)
    print(f"{path}: verified. Licence: {item.licence}. Please cite: {item.citation}")
    return 0

"""The command line's parser, and what becomes of a command's errors."""

import argparse
import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from sim.errors import UserError
from sim.run.interrupts import INTERRUPTED, exit_status, sigterm_interrupts
from sim.version import VERSION, is_compiled
from traces.errors import TraceError

BROKEN_PIPE = 141


class _Help(argparse.Action):
    """`--help [TOPIC]`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.help_on(values))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Errors in one line, with exit status 2."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        # Flags are spelled out: what abbreviates one of them today may mean two tomorrow.
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self._fills: list[tuple[tuple[str, ...], Callable[[Parser], None]]] = []
        self.rare: Collection[str] = ()
        """Options that the short help of a command with many has not; those of policies are not in it either."""
        self.needed: Collection[str] = ()
        """Options that it has, even so."""
        text = "this help; of a command with many options `--help all`, or `--help layerkv` for a policy's"
        self.add_argument("-h", "--help", nargs="?", action=_Help, metavar="TOPIC", dest=argparse.SUPPRESS, help=text)

    def later(self, fill: "Callable[[Parser], None]", words: tuple[str, ...] = ()) -> None:
        """Add the flags when they are needed: a command has dozens, and only one command runs.

        `words`: only when a flag that begins as one of them is given, or help asked for.
        """
        self._fills.append((words, fill))

    def _add_flags(self, given: Sequence[str] | None = None) -> None:
        """Add those that `given` words need; all without any. What is added may add more."""
        while True:
            needed = [
                (words, fill)
                for words, fill in self._fills
                if given is None or not words or any(word.startswith(words) for word in given)
            ]
            if not needed:
                return
            self._fills = [entry for entry in self._fills if entry not in needed]
            for _, fill in needed:
                fill(self)

    def format_help(self) -> str:
        self._add_flags()
        return super().format_help()

    def help_on(self, topic: str | None) -> str:
        """The help on what most need, on `all`, or on a policy's options; exits where there is no such topic."""
        whole = self.format_help()
        if topic == "all" or (topic is None and not self.rare):
            return whole
        if topic is None:
            return self._short_help()
        groups = {str(group.title): group for group in self._action_groups}
        group = groups.get(f"options of {topic}")
        if group is None:
            topics = [title.removeprefix("options of ") for title in groups if title.startswith("options of ")]
            self.error(f"--help {topic}: no such topic; there are {', '.join(['all', *topics])}")
        formatter = self._get_formatter()
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
        return formatter.format_help()

    def _short_help(self) -> str:
        """The help without the options that few need and those of policies."""
        of_policies = [g for g in self._action_groups if str(g.title).startswith("options of ")]
        rare = {*self.rare, *(action.dest for group in of_policies for action in group._group_actions)}
        rare.difference_update(self.needed)
        formatter, shown = self._get_formatter(), [action for action in self._actions if action.dest not in rare]
        formatter.add_usage(f"%(prog)s {' '.join(['[options]', *self._positionals_shown()])}".rstrip(), [], [])
        formatter.add_text(self.description)
        formatter.start_section("what most need")
        formatter.add_arguments(shown)
        formatter.end_section()
        left = len(self._actions) - len(shown)
        formatter.add_text(
            f"{left} more options: {self.prog} --help all; those of a policy: {self.prog} --help layerkv. "
            "docs/guide.md says what they are for."
        )
        return formatter.format_help()

    def _positionals_shown(self) -> list[str]:
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def parse_known_args(  # type: ignore[override]
        self,
        args: Any = None,  # noqa: ANN401
        namespace: Any = None,  # noqa: ANN401
    ) -> tuple[Any, list[str]]:
        """Refuse unknown flags here, where the command's own are known, with the nearest right one."""
        self._add_flags(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # A policy that is not known yet may have them.
            self._add_flags()
            found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def _one_line(message: object) -> str:
    return str(message).replace("\n", "\\n")


COMMANDS = {
    "run": ("sim.cli", "simulate one policy"),
    "compare": ("sim.cli", "simulate several policies side by side"),
    "report": ("sim.cli", "one HTML page of saved runs"),
    "explain": ("sim.cli", "why one request waited, or the slowest, in sentences"),
    "policies": ("kvtwin.policies", "list the systems, their parts and options, and what mixes"),
    "plan": ("sim.study.cli", "the deployment and the GPUs for my traffic under SLOs"),
    "sweep": ("sim.study.cli", "simulate every point of a study file"),
    "tune": ("sim.study.cli", "search for the best policy and knobs under SLOs"),
    "map": ("sim.study.cli", "draw which policy wins over two parameters"),
    "reproduce": ("sim.study.cli", "a paper's figures beside ours"),
    "trace": ("traces.cli", "inspect, convert, generate, list and fetch traces"),
    "live": ("gpu_runtime.cli", "execute one policy on this machine, in real time"),
    "validate": ("gpu_runtime.cli", "run the same traffic simulated and live, or beside a server's run, and compare"),
    "serve": ("gpu_runtime.serve.cli", "serve a model over HTTP with one policy"),
    "calibrate": ("calib.cli", "measure this machine's kernels and copies, and fit a profile"),
    "profile": ("calib.cli", "list, show, compare, fit and import fitted constants"),
    "completion": ("kvtwin.completion", "the script by which bash, zsh or fish complete all this"),
}
"""The module of each, whose function `add_NAME` fills the command's parser, and what it does."""


def build_parser(word: object = None) -> Parser:
    """All commands, or the one that is `word`; each is imported, and adds its flags, when it is asked for."""
    parser = Parser(prog="kvtwin", description="Which KV-cache policy for this model, GPU and traffic?")
    parser.add_argument("--version", action="version", version=f"kvtwin {VERSION}{' (compiled)' * is_compiled()}")
    commands: Any = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name in [word] if isinstance(word, str) and word in COMMANDS else COMMANDS:
        module, about = COMMANDS[name]
        commands.add_parser(name, help=about).later(partial(_fill, name=name, module=module))
    return parser


def _fill(parser: Parser, name: str, module: str) -> None:
    getattr(import_module(module), f"add_{name}")(parser)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. KeyboardInterrupt where it is interrupted before it begins."""
    # A process that ends gives its memory back at once: cycles need not be looked for.
    atexit.register(gc.freeze)
    # No linear algebra here is worth a thread, and starting them costs every run; numpy asks when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(next(iter(words), None))
    for word in words:
        if not isinstance(word, str) or "\0" in word:
            parser.error(f"{word!r} is no word of a command line")
        if not word.isascii() and word != word.encode(errors="replace").decode():
            parser.error(f"{word!a} is not UTF-8 text, as the results have to be; rename it")
    arguments = parser.parse_args(words)
    with sigterm_interrupts():
        return exit_status(_run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    try:
        status = arguments.run(arguments)
        # What cannot be printed is told here; at exit Python would complain.
        sys.stdout.flush()
        return status
    except (UserError, TraceError) as error:
        print(f"kvtwin: {_one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return _unread()
    except SystemExit as end:
        # rich makes an exit of it.
        if isinstance(end.__context__, BrokenPipeError):
            return _unread()
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; make room, or name another" if full else ""
        # Files' errors have names.
        name = "standard output: " if full and error.filename is None else ""
        print(f"kvtwin: {name}{_one_line(error)}{remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvtwin: interrupted", file=sys.stderr)
        return INTERRUPTED


def _unread() -> int:
    """The exit status when what read our output has left."""
    # Python would complain when it flushes the rest at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE

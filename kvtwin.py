"""`kvtwin`: the command line. Mounts each package's commands; nothing heavy is imported before it is needed."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sim import cli as sim_cli
from sim.errors import UserError
from traces import cli as traces_cli
from traces.errors import TraceError

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Errors in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 130 when interrupted."""
    parser = Parser(prog="kvtwin", description="Which KV-cache policy for this model, GPU and traffic?")
    commands: Any = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    sim_cli.add_commands(commands)
    traces_cli.add_commands(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (UserError, TraceError) as error:
        print(f"kvtwin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvtwin: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""The command line. Each module here adds the commands of one area.

Heavy imports happen inside the commands.
"""

import importlib
import sys
from collections.abc import Sequence

from agent.cli.arguments import CommandParser
from planner.ir.errors import PortError

AREAS = ("exec", "plan_and_train", "devices_and_plots", "daemon", "energy", "mcu")
"""Modules of this package that add commands, in the order of `--help`. Each has `add_commands(subparsers)`; a command sets
`run=function(arguments) -> exit code` with `set_defaults`."""


def build_parser() -> CommandParser:
    """Return the parser of the whole command line."""
    parser = CommandParser(
        prog="port-agent",
        description="Train PyTorch models on the device you own, inside the RAM you give it.",
        epilog="Start with: port-agent plan train.py --ram 300M -o job.port; port-agent train job.port",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for area in AREAS:
        importlib.import_module(f"agent.cli.{area}").add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A `PortError` is printed without a traceback.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except PortError as error:
        print(f"port-agent: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    return code

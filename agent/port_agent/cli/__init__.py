"""The command line. Each module here adds the commands of one area.

Heavy imports happen inside the commands.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence

from port_agent.cli.arguments import CommandParser
from port_agent.cli.settings_file import with_settings_file
from port_agent.cli.terminal import guarded
from port_agent.system import VERSION
from port_planner.base.errors import ExitCode, PortError

AREAS: Mapping[str, tuple[str, ...]] = {
    "exec": ("exec",),
    "finetune.command": ("finetune",),
    "finetune.merge": ("merge",),
    "chat.command": ("chat",),
    "plan.command": ("plan",),
    "plan.show": ("show",),
    "plan.train": ("train",),
    "devices_and_plots": ("boards", "profile", "draw", "frontier"),
    "daemon": (
        "run",
        "submit",
        "status",
        "why",
        "jobs",
        "job",
        "logs",
        "result",
        "feed",
        "pause",
        "resume",
        "run-now",
        "not-now",
        "cancel",
        "priority",
        "recall",
        "deadline",
        "reload",
        "doctor",
        "completion",
    ),
    "manual": ("manual",),
    "session": ("session",),
    "peers.pairing": ("peers", "pair", "unpair"),
    "peers.federate": ("federate",),
    "peers.identity": ("identity",),
    "energy": ("energy", "dashboard"),
    "mcu.command": ("mcu",),
}
"""Modules of this package and the commands that each adds, in the order of `--help`. Each has `add_commands(subparsers)`; a command
sets `run=function(arguments) -> exit code` with `set_defaults`. A command loads its own module and no other."""


def build_parser(areas: Iterable[str] = AREAS) -> CommandParser:
    """Return the parser of the whole command line, or of some of its areas."""
    parser = CommandParser(
        prog="port-agent",
        description="Train PyTorch models on the device you own, inside the RAM you give it.",
        epilog="Start with your script as it is: port-agent exec --ram 600M -- train.py",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for area in areas:
        importlib.import_module(f"port_agent.cli.{area}").add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A `PortError` is printed without a traceback.
    """
    with guarded():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    own = [area for area, commands in AREAS.items() if words and words[0] in commands]
    parser = build_parser(own or AREAS)
    try:
        if words[:1] == ["finetune"]:
            words = with_settings_file(words)
        arguments = parser.parse_args(words)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except PortError as error:
        print(f"port-agent: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:  # a path that the user gave; errors about our own files carry their own remedies
        path = f"{error.filename}: " if error.filename else ""
        print(
            f"port-agent: {path}{error.strerror or error}; check the path, its permissions and the free space on its disk",
            file=sys.stderr,
        )
        return ExitCode.IMPOSSIBLE
    return code

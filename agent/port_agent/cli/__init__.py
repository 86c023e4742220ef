"""The command line. Each module here adds the commands of one area.

Heavy imports happen inside the commands.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast

from port_agent.cli.absent import absent
from port_agent.cli.arguments import CommandParser
from port_agent.cli.groups import GroupedCommands, names_before, with_group
from port_agent.cli.settings_file import with_settings_file
from port_agent.cli.terminal import guarded
from port_agent.system import VERSION
from port_planner.base.errors import ExitCode, PortError

AREAS: Mapping[str, tuple[str, ...]] = {
    "exec": ("exec",),
    "finetune.command": ("finetune",),
    "finetune.merge": ("merge",),
    "finetune.export": ("export",),
    "finetune.decode": ("decode",),
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
"""Modules of this package and the commands that each adds, in the order of `--help-all`; grouped commands stand by
their old names (`groups`). Each module has `add_commands(subparsers)`; a command sets
`run=function(arguments) -> exit code` with `set_defaults`. A command loads its own module and no other.
"""


_WITHOUT_COMMANDS = (["-h"], ["--help"], ["--version"])
"""Command lines for which no area is loaded."""
SHORT_HELP = """\
usage: port-agent COMMAND ...

Train PyTorch models on the device you own, inside the RAM you give it.

your script, unchanged, in a memory budget:
  port-agent exec --ram 600M -- train.py
a language model on your own text:
  port-agent finetune SmolLM2-135M --data notes.txt --ram 600M --out my-adapter
a bundle, which needs no code of yours to train:
  port-agent plan train.py --ram 300M -o job.port
  port-agent train job.port --epochs 3 --out weights.safetensors
the same while the device charges and is idle:
  port-agent job submit job.port --epochs 3
  port-agent status
a microcontroller, emulated or on a serial port:
  port-agent mcu simulate examples/imu_gestures

`port-agent COMMAND --help` explains a command; `port-agent --help-all` lists all of them.
"""
"""Help with the most frequent commands; `--help-all` lists every command."""


class _ShortHelp(argparse.Action):
    """Prints the help with the most frequent commands, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object, **options: object) -> NoReturn:
        print(SHORT_HELP, end="")
        parser.exit()


def build_parser(areas: Iterable[str] = AREAS) -> CommandParser:
    """Return the parser of the whole command line, or of some of its areas."""
    parser = CommandParser(
        prog="port-agent",
        description="Train PyTorch models on the device you own, inside the RAM you give it.",
        epilog="port-agent job --help, peer --help and mcu --help list the commands of these groups. Until 0.3, "
        "commands of jobs and peers also work by their names before 0.2: port-agent submit, jobs, job JOB, pause, "
        "peers, pair and so on.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help="show the most common commands, and exit")
    parser.add_argument("--help-all", action="help", help="list all commands, and exit")
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {VERSION}", help="print the version, and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    grouped = cast("argparse._SubParsersAction[argparse.ArgumentParser]", GroupedCommands(commands))
    for area in areas:
        importlib.import_module(f"port_agent.cli.{area}").add_commands(grouped)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A `PortError` is printed without a traceback.
    """
    with guarded():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    words = with_group(sys.argv[1:] if argv is None else argv)
    wanted = names_before(words)
    own = [area for area, commands in AREAS.items() if any(name in commands for name in wanted)]
    if words[:1] == ["run"]:
        with absent("bz2", "lzma"):  # argparse loads it, and it loads both: 0.4 MB
            import shutil  # noqa: F401
    parser = build_parser(() if words[:1] in _WITHOUT_COMMANDS else own or AREAS)
    try:
        if words[:1] == ["finetune"]:
            words = with_settings_file(words)
        arguments = parser.parse_args(words)
        del parser  # an agent runs for months, and its parser takes 0.2 MB
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
            f"port-agent: {path}{error.strerror or error}; check the path, its permissions and the free space on its "
            "disk",
            file=sys.stderr,
        )
        return ExitCode.IMPOSSIBLE
    return code

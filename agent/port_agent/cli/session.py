"""The command that a desktop session runs to report to the agent whether somebody uses the desktop."""

import argparse
import signal
import sys
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command of this area to `commands`."""
    session = commands.add_parser(
        "session", help="tell the agent whether somebody is using this desktop (systemd runs this at login)"
    )
    session.set_defaults(run=_session)


def _session(arguments: argparse.Namespace) -> int:
    from port_agent.facts.sessions import SessionError, SessionHelper

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        helper = SessionHelper()
    except SessionError as error:
        print(f"port-agent: {error}", file=sys.stderr)
        return 0  # not a failure: this desktop does not report idleness
    helper.run(SHARED_MEMORY)
    return 0

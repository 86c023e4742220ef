"""Read a bundle completely once, at submission: `python -m port_agent.supervisor.job.bundle_check BUNDLE`.

This is a separate process, so that the daemon does not keep the memory of graphs. Errors go to standard error.
"""

import sys
from pathlib import Path

from port_agent.system.helper_process import HelperCommand, helper_exit_code

MODULE = "port_agent.supervisor.job.bundle_check"


def check_command(bundle: Path) -> HelperCommand:
    """Return the command that reads a bundle; it fails if a member, a tensor or a row differs from what was written."""
    return HelperCommand(MODULE, (str(bundle.absolute()),))


def main(bundle: str) -> int:
    """Read the bundle and return the exit code."""
    from port_planner.ir.bundle.bundle import Bundle

    return helper_exit_code(lambda: Bundle(Path(bundle)).check_contents())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

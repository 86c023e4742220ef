"""Read all of a bundle once, where it is submitted: `python -m port_agent.supervisor.job.bundle_check BUNDLE`.

A process of its own: graphs take memory, and the daemon keeps none of it. What is wrong goes to standard error.
"""

import sys
from pathlib import Path

from port_agent.system.helper_process import HelperCommand, helper_exit_code

MODULE = "port_agent.supervisor.job.bundle_check"


def check_command(bundle: Path) -> HelperCommand:
    """Return what reads a bundle; it ends with an error where a member, a tensor or a row is not as it was written."""
    return HelperCommand(MODULE, (str(bundle.absolute()),))


def main(bundle: str) -> int:
    """Read the bundle and return the exit code."""
    from port_planner.ir.bundle.bundle import Bundle

    return helper_exit_code(lambda: Bundle(Path(bundle)).check_contents())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

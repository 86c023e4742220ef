"""Python processes of ours.

What they import comes from where we are installed, never from where they are started.
"""

import os
import sys
from pathlib import Path

NEUTRAL_DIRECTORY = Path("/")
"""Where a process stands that opens nothing by a relative path; only root may put a file there."""
_ROOT = Path(__file__).resolve().parents[2]


def module_command(module: str) -> tuple[str, ...]:
    """Return the words that run a module of ours; `-P` keeps the working directory off its import path."""
    return (sys.executable, "-P", "-m", module)


def module_environment() -> dict[str, str]:
    """Return this process's environment with the folder of our packages on PYTHONPATH.

    And no relative entry there.

    An empty entry would be the working directory.
    """
    theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [str(_ROOT), *(entry for entry in theirs if Path(entry).is_absolute())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}

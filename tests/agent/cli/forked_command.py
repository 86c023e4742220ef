"""The command line in a process that has loaded what `plan` needs, for forks (`tests/forked.py`)."""

import os
import sys

import port_agent.intercept.budget
import port_agent.prepare.measurement.within_budget  # noqa: F401
from port_agent.cli import main
from tests.simulated_device import register
from tests.torch_forks import fork_from_here

__all__ = ["main_with_device"]


def main_with_device(words: list[str]) -> int:
    """Run a command that knows the simulated device, as do its workers; the environment says
    where the package of that is.
    """
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    register()
    fork_from_here()
    return main(words)

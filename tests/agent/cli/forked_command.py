"""The command line in a process that has loaded what `plan` needs, for forks (`tests/forked.py`)."""

import os
import sys

import port_agent.intercept.budget
import port_agent.prepare.measurement.within_budget  # noqa: F401
from port_agent.cli import main
from tests.simulated_device import register

__all__ = ["main", "main_with_device"]


def main_with_device(words: list[str]) -> int:
    """Run a command that knows the simulated device; the environment says where the package of that is."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    register()
    return main(words)

"""The command line in a process that has loaded what `plan` needs and knows the simulated device, for forks (`tests/forked.py`)."""

import os
import sys

import agent.follow.budget
import agent.prepare.within_budget  # noqa: F401
from agent import cli
from tests.simulated_device import register


def main(words: list[str]) -> int:
    """Run a command; the device is where the environment says that packages are."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    register()
    return cli.main(words)

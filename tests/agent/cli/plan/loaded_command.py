"""The command line in a process that has loaded what `plan` needs, for forks (`tests/forked.py`)."""

import agent.follow.budget
import agent.prepare.within_budget  # noqa: F401
from agent.cli import main

__all__ = ["main"]

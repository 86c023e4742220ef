"""The command line in a process that has loaded the libraries of language models, for forks (`tests/forked.py`)."""

import peft  # noqa: F401
import transformers  # noqa: F401

from agent.cli import main

__all__ = ["main"]

"""Kinds of devices that a storage may lie on, by the names that graphs and bundles carry.

A kind names no particular card: which one it is, the machine says that runs the step.
"""

from collections.abc import Iterable

CPU = "cpu"
CUDA = "cuda"
MPS = "mps"

BACKEND_GROUP = "port_agent.backends"
"""The entry point group of other people's devices: the name of a kind, and a class that is an `port_agent.backend.base.Backend`."""

MAX_NAME = 32
"""Longer than the name of any backend of torch; a longer one is a damaged or hostile file."""


def accelerator_of(kinds: Iterable[str]) -> str:
    """Return the one kind among `kinds` that is not the CPU, or the CPU where there is none; ValueError for two."""
    found = sorted(set(kinds) - {CPU})
    if len(found) > 1:
        raise ValueError(f"one step uses {' and '.join(found)}; a plan is for the CPU and one other device")
    return found[0] if found else CPU

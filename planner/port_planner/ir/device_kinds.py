"""Kinds of devices that a storage may lie on, by their names in graphs and bundles.

A kind does not name a particular card: the machine that runs the step selects it.
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
    """Return the only kind that is not the CPU, or the CPU if there is none. Raises ValueError for two."""
    found = sorted(set(kinds) - {CPU})
    if len(found) > 1:
        raise ValueError(f"one step uses {' and '.join(found)}; a plan is for the CPU and one other device")
    return found[0] if found else CPU

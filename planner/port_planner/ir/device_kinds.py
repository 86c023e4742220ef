"""Kinds of devices on which a storage may be, by their names in graphs and bundles.

A kind does not name a particular card: the machine that runs the step selects it.
"""

from collections.abc import Iterable

CPU = "cpu"
CUDA = "cuda"
MPS = "mps"

BACKEND_GROUP = "port_agent.backends"
"""The entry point group for devices of other packages: the name of a kind, and a subclass of
`port_agent.backend.base.Backend`.
"""

MAX_NAME = 32
"""Largest length of a name, longer than that of any torch backend; a longer one is in a damaged or hostile file."""


def accelerator_of(kinds: Iterable[str]) -> str:
    """Return the only kind that is not the CPU, or the CPU if there is none. Raises ValueError for two."""
    found = sorted(set(kinds) - {CPU})
    if len(found) > 1:
        raise ValueError(f"one step uses {' and '.join(found)}; a plan is for the CPU and one other device")
    return found[0] if found else CPU

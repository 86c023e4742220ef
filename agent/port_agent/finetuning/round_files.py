"""Open files of a federation, in directories that the fine-tuning's user cannot access: the worker gets them as
descriptors. Torch-free.
"""

import os
from pathlib import Path

import msgspec

from port_agent.worker.worker_options import FinetuneWorkerOptions


class RoundFiles(msgspec.Struct, frozen=True):
    """Descriptors that a worker inherits: `weights` to read the given adapter from, `result` to
    write the trained one to.

    `number`: rounds that this job trained before. `result` and `number` are None if nothing is trained.
    """

    weights: int
    result: int | None = None
    number: int | None = None

    def encoded(self) -> str:
        """Return them as one word for a command line."""
        return msgspec.json.encode(self).decode()


def open_round(options: FinetuneWorkerOptions) -> RoundFiles | None:
    """Open the adapter that a worker starts from and, for a round, its result; None outside a federation. Raises
    OSError.
    """
    if options.weights is None:
        return None
    weights = _inherited(options.weights, os.O_RDONLY)
    if options.round is None or options.out is None:
        return RoundFiles(weights)
    return RoundFiles(weights, _inherited(options.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), options.round)


def _inherited(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    os.set_inheritable(descriptor, True)
    return descriptor

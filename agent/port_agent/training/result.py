"""The file of the trained weights: its destination is checked before training, and it is written
completely or not at all.
"""

import os
import shutil
from pathlib import Path

from port_agent.system.atomic_file import atomic_stream
from port_agent.system.checksum import RunningChecksum
from port_agent.training.state.resident_state import Persistents, bundle_chunks
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import format_bytes
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.safetensors_io import encode, tensor_bytes


class ResultError(PortError):
    """The trained weights cannot be written to their destination."""


class ResultPlaceError(ResultError):
    """The destination cannot be a file."""

    exit_code = ExitCode.IMPOSSIBLE


def trained_bytes(bundle: Bundle) -> int:
    """Return the bytes of the trained weights, without their names."""
    layouts, tensors = bundle.manifest.layouts, bundle.tensors
    keys = {bundle.result_key(name) for name in bundle.manifest.result}
    return sum(tensor_bytes(layouts[k].dtype, layouts[k].shape) if k in layouts else tensors[k].nbytes for k in keys)


def check_result(bundle: Bundle, path: Path) -> None:
    """Reject a destination at which `save_result` would fail after the training.

    Raises ResultPlaceError for an impossible place, ResultError for lack of space.
    """
    if not path.parent.is_dir():
        raise ResultPlaceError(f"the weights cannot go to {path}: there is no directory {path.parent}; create it")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "that is a directory" if path.is_dir() else f"{path.parent} cannot be written"
        raise ResultPlaceError(f"the weights cannot go to {path}: {reason}; choose another --out")
    free = shutil.disk_usage(path.parent).free
    if free < trained_bytes(bundle):
        raise ResultError(
            f"the weights take {format_bytes(trained_bytes(bundle))}, but {path.parent} has {format_bytes(free)} "
            "free; free some space or choose another --out"
        )


def save_result(bundle: Bundle, persistents: Persistents, step: int, path: Path) -> str:
    """Write the model's state as safetensors; return the checksum of the file.

    Raises ResultError, and PageError from reading.
    """
    keys = {name: bundle.result_key(name) for name in bundle.manifest.result}
    tensors = persistents.chunks([k for k in keys.values() if k in bundle.manifest.layouts])
    tensors |= {name: bundle_chunks(bundle, k) for name, k in keys.items() if name not in tensors}
    checksum = RunningChecksum()
    try:
        with atomic_stream(path, trained_bytes(bundle)) as stream:
            for chunk in encode(tensors, {"format": "pt", "step": str(step)}):
                stream.write(chunk)
                checksum.update(chunk)
    except OSError as error:
        raise ResultError(
            f"the weights ({format_bytes(trained_bytes(bundle))}) could not be written to {path}: {error.strerror}; "
            "free some space or choose another --out; the trained state is safe"
        ) from error
    return checksum.text()

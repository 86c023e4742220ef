"""Checkpoints of lightning, written to their file as they are made: its own way has them whole in memory before."""

from collections.abc import Callable
from typing import Any

import torch

MODULES = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
"""What writes checkpoints, in either of the two packages."""

ATOMIC_SAVE = "_atomic_save"


def saving_as_stream(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return what takes the place of `_atomic_save`: the same bytes in the same place, whole or not there, of files of this machine."""

    def save(checkpoint: Any, path: Any) -> None:
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        files, place = fsspec.core.url_to_fs(str(path))
        if not isinstance(files, LocalFileSystem):
            original(checkpoint, path)
            return
        with files.transaction, files.open(place, "wb") as stream:
            torch.save(checkpoint, stream)

    return save

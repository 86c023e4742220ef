"""Write lightning's checkpoints directly to their file; lightning itself first builds them whole in memory."""

from collections.abc import Callable
from typing import Any

import torch

MODULES = ("lightning.fabric.plugins.io.torch_io", "lightning_fabric.plugins.io.torch_io")
"""Modules that write checkpoints, in either of the two packages."""

ATOMIC_SAVE = "_atomic_save"


def saving_as_stream(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return the replacement of `_atomic_save` for local files, which writes the same bytes to the same place,
    completely or not at all.
    """

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

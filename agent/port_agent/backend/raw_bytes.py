"""Memory as bytes: host blocks for storages that return from flash, and the bytes of a storage."""

import mmap

import torch

from port_agent.malloc import active
from port_planner.base.direct_io import BLOCK, padded
from port_planner.ir.device_kinds import CPU

_ACTIVE = active()


def block(nbytes: int) -> torch.Tensor:
    """Return a byte tensor of at least `nbytes`, whole blocks long.

    It is aligned where the allocator aligns its blocks.

    Under the preloaded allocator torch's own blocks are page-aligned; elsewhere a private anonymous map is, which,
    unlike a shared one, the kernel counts as data of this process and gives back the moment it is freed.
    """
    size = max(padded(nbytes), BLOCK)
    if _ACTIVE is not None or size < 16 * BLOCK:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8, count=size
    )


def whole_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the storage of `tensor`."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def placed(contents: torch.Tensor, kind: str, nbytes: int) -> torch.Tensor:
    """Return `nbytes`, which is in the host's memory, on a kind of device: unchanged on the CPU,
    otherwise a copy that has arrived.
    """
    return contents if kind == CPU else contents[:nbytes].to(kind)

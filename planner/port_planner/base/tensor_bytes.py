"""The bytes of a tensor: yielded in parts, so that they need not all be in memory, and
compared with another tensor's.
"""

from collections.abc import Iterator

import torch

_CHUNK_BYTES = 1 << 20


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one data type, one shape and the same bits; zeros have a
    sign, and a NaN equals itself.
    """
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(_flat_bytes(one), _flat_bytes(other))


def chunks_of_tensor(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order.

    Each part is a copy, because under a memory budget the memory that numpy uses stays resident, and the
    whole tensor may not fit.
    """
    flat = _flat_bytes(tensor)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].to("cpu", copy=True).numpy().data


def storage_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of the tensor's whole storage, as `chunks_of_tensor` does."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return chunks_of_tensor(empty.set_(storage, 0, (storage.nbytes(),), (1,)))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

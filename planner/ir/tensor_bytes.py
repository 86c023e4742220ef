"""The bytes of a tensor piece by piece, without needing all of them at once."""

from collections.abc import Iterator

import torch

_PIECE_BYTES = 1 << 20


def tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order.

    Each piece is a copy: under a memory budget what numpy sees stays resident, and the whole tensor may not fit.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE_BYTES):
        yield flat[start : start + _PIECE_BYTES].to("cpu", copy=True).numpy().data


def storage_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of the storage that a tensor lies in, as `tensor_pieces` does."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor_pieces(empty.set_(storage, 0, (storage.nbytes(),), (1,)))

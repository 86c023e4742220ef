"""A Triton kernel for `benchmarks.gpu_exec`."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def _add_one(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * block + tl.arange(0, block)
    mask = places < count
    tl.store(target + places, tl.load(source + places, mask=mask) + 1, mask=mask)


_KERNEL = triton.jit(_add_one)


def add_one(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write each number of `source`, plus one, into `target`."""
    count = source.numel()
    _KERNEL[(triton.cdiv(count, _BLOCK),)](source, target, count, block=_BLOCK)

"""Which media use packed pages: those so slow that packing a page takes less time than it saves."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from port_agent import packing
from port_agent.packing.pages import pack_page, unpack_page
from port_agent.paging.pager import CHUNK
from port_planner.ir.costs import DeviceCosts, Flash

_SAMPLED_WEIGHTS = 16
"""The number of largest weights sampled to see how small pages get."""
_WORTH_PACKING_PAGES = 0.95
"""Share of the seconds of writing and reading a page below which packing must stay, so that it saves
more than measurement noise.
"""
_PACKED = torch.float32
"""Type as which pages are packed: that of weights, momenta and activations."""


@dataclass(frozen=True, slots=True)
class _PagePacking:
    """The packed share of a page's size, and seconds per byte to pack and to unpack it."""

    share: float
    pack_s: float
    unpack_s: float


def with_packed_pages(device: DeviceCosts, weights: Iterable[torch.Tensor]) -> DeviceCosts:
    """Return the device with packed pages on each medium that is slow enough for that to save time.

    Packed size and packing time are measured on `weights`; momenta and activations are similar.
    """
    found = _page_packing(weights)
    if found is None:
        return device
    targets = [_packing_medium(target, found, device.compute_watts) for target in device.targets]
    return replace(device, flash=targets[0], scratch_targets=tuple(targets[1:]))


def _page_packing(weights: Iterable[torch.Tensor]) -> _PagePacking | None:
    """Pack the beginnings of the largest weights; None if none is large enough, or if nothing can be packed here."""
    width = _PACKED.itemsize
    large = sorted((w for w in weights if w.dtype is _PACKED and w.nbytes >= CHUNK), key=lambda w: -w.numel())
    if not large or not packing.available():
        return None
    target, stored_bytes, pack_s, unpack_s = bytearray(CHUNK), 0, 0.0, 0.0
    sampled = large[:_SAMPLED_WEIGHTS]
    for weight in sampled:
        page = weight.detach().reshape(-1)[: CHUNK // width].clone()  # a weight whose address is taken stays resident
        back = torch.empty(CHUNK, dtype=torch.uint8)
        begin = time.thread_time()
        size = pack_page(page.data_ptr(), CHUNK, width, target)
        middle = time.thread_time()
        if size:
            unpack_page(memoryview(target)[:size], back.data_ptr(), CHUNK, width)
        pack_s += middle - begin
        unpack_s += time.thread_time() - middle
        stored_bytes += size or CHUNK
    total = len(sampled) * CHUNK
    return _PagePacking(stored_bytes / total, pack_s / total, unpack_s / total)


def _packing_medium(flash: Flash, found: _PagePacking, compute_watts: float) -> Flash:
    """Return the medium with packed pages, or unchanged if they would not save time."""
    read_s = found.share / flash.read_bytes_per_s + found.unpack_s
    write_s = found.share / flash.write_bytes_per_s + found.pack_s
    if read_s + write_s > _WORTH_PACKING_PAGES * (1 / flash.read_bytes_per_s + 1 / flash.write_bytes_per_s):
        return flash
    return replace(
        flash,
        packs_pages=True,
        read_bytes_per_s=1 / read_s,
        write_bytes_per_s=1 / write_s,
        read_joules_per_byte=found.share * flash.read_joules_per_byte + found.unpack_s * compute_watts,
        write_joules_per_byte=found.share * flash.write_joules_per_byte + found.pack_s * compute_watts,
        wear_joules_per_byte=found.share * flash.wear_joules_per_byte,
        endurance_bytes=None if flash.endurance_bytes is None else flash.endurance_bytes / found.share,
    )

"""Pack and unpack memory by address.

Booleans to bits, integers to their range, sparse items to a bitmap.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import assert_never

from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes
from port_planner.ir.costs import Codec

# packing.h
_OVERFLOW, _UNSUITABLE, _CORRUPT = -1, -2, -3
_NARROW_HEADER_BYTES = 16
_PAIR_HEADER_BYTES = 8
_BITMAP_ITEM_BYTES = (1, 2, 4, 8)
_MAX_ITEMS = 2**48
"""Largest number of items: more than any address space can hold, and small enough to keep every size below 2**63."""
_UNSUITABLE_BECAUSE = {
    Codec.BITS: "a byte is neither 0 nor 1",
    Codec.PAIR: "a third value is among them",
    Codec.INSIDE: "one is NaN, for which torch's own backward pass has no fixed result",
}


class PackingError(PortError):
    """Base class of the errors of this package."""


class PackingUnavailableError(PackingError):
    """The packing library is missing."""


class PackingOverflowError(PackingError):
    """The packed form does not fit into the reserved memory; the source is unchanged."""

    def __init__(self, layout: "Layout", capacity_bytes: int) -> None:
        self.layout = layout
        self.capacity_bytes = capacity_bytes
        super().__init__(
            f"{layout.count} items need more than the {format_bytes(capacity_bytes)} reserved for them packed as "
            f"{layout.codec.value}; keep or page this tensor, or calibrate the plan with more batches"
        )


class UnsuitableDataError(PackingError):
    """The data is not of the kind that the codec restores to the bit."""

    def __init__(self, layout: "Layout") -> None:
        self.layout = layout
        super().__init__(
            f"{layout.count} items cannot be packed as {layout.codec.value}: "
            f"{_UNSUITABLE_BECAUSE[layout.codec]}; "
            "leave this tensor unpacked"
        )


class CorruptPackingError(PackingError):
    """Packed memory that contradicts itself or its layout."""

    def __init__(self, layout: "Layout", given_bytes: int) -> None:
        self.layout = layout
        self.given_bytes = given_bytes
        super().__init__(
            f"{given_bytes} bytes are not {layout.count} items packed as {layout.codec.value}; "
            "the memory was overwritten: restore the last checkpoint"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of the memory to be packed."""

    codec: Codec
    count: int
    """Number of items."""
    item_bytes: int = 4
    """Size of an item in bytes for BITMAP; the other codecs have fixed sizes."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Interval of the codec INSIDE: an item's bit is set if the item lies in it."""

    def __post_init__(self) -> None:
        if not 0 <= self.count < _MAX_ITEMS:
            raise PackingError(f"cannot pack {self.count} items; the number must lie between 0 and 2**48")
        if self.codec is Codec.BITMAP and self.item_bytes not in _BITMAP_ITEM_BYTES:
            raise PackingError(f"cannot pack items of {self.item_bytes} bytes; use 1, 2, 4 or 8")

    @property
    def source_bytes(self) -> int:
        """Return the size of the unpacked memory."""
        sizes = {Codec.BITS: 1, Codec.NARROW: 8, Codec.BITMAP: self.item_bytes, Codec.PAIR: 4}
        return self.count * sizes.get(self.codec, 4)


def available() -> bool:
    """Return whether packing works in this installation."""
    try:
        loaded_library()
    except PackingUnavailableError:
        return False
    return True


def largest_bytes(layout: Layout) -> int:
    """Return the largest packed size that data of this layout can have."""
    match layout.codec:
        case Codec.BITS | Codec.SIGN | Codec.INSIDE:
            return -(-layout.count // 8)
        case Codec.PAIR:
            return _PAIR_HEADER_BYTES + -(-layout.count // 8)
        case Codec.NARROW:
            return _NARROW_HEADER_BYTES + 8 * layout.count
        case Codec.BITMAP:
            return 8 * -(-layout.count // 64) + layout.item_bytes * layout.count
        case _:
            assert_never(layout.codec)


def packed_bytes(layout: Layout, source: int, *, level: int | None = None) -> int:
    """Return the exact packed size of the memory at address `source`; reads it once (BITS, PAIR,
    SIGN, INSIDE: not at all).

    `level` (here and below) forces an implementation, for tests and benchmarks; see packing.h.
    """
    library, level = library_and_level(level)
    match layout.codec:
        case Codec.BITS | Codec.PAIR | Codec.SIGN | Codec.INSIDE:
            return largest_bytes(layout)
        case Codec.NARROW:
            return int(library.port_narrow_size(level, source, layout.count))
        case Codec.BITMAP:
            return int(library.port_bitmap_size(level, source, layout.count, layout.item_bytes))
        case _:
            assert_never(layout.codec)


def pack(layout: Layout, source: int, target: int, capacity_bytes: int, *, level: int | None = None) -> int:
    """Pack the memory at `source` into the memory at `target`, and return the number of bytes used.

    At most `capacity_bytes` are used.

    The two must not overlap. Raises PackingOverflowError or UnsuitableDataError with the source unchanged and the
    target's content undefined; memory beyond the capacity is never touched.
    """
    library, level = library_and_level(level)
    match layout.codec:
        case Codec.BITS:
            result = library.port_bits_pack(level, source, layout.count, target, capacity_bytes)
        case Codec.PAIR:
            result = library.port_pair_pack(level, source, layout.count, target, capacity_bytes)
        case Codec.SIGN:
            result = library.port_sign_pack(level, source, layout.count, target, capacity_bytes)
        case Codec.INSIDE:
            result = library.port_inside_pack(level, source, layout.count, *layout.interval, target, capacity_bytes)
        case Codec.NARROW:
            result = library.port_narrow_pack(level, source, layout.count, target, capacity_bytes)
        case Codec.BITMAP:
            result = library.port_bitmap_pack(level, source, layout.count, layout.item_bytes, target, capacity_bytes)
        case _:
            assert_never(layout.codec)
    if result == _OVERFLOW:
        raise PackingOverflowError(layout, capacity_bytes)
    if result == _UNSUITABLE:
        raise UnsuitableDataError(layout)
    return int(result)


def unpack(layout: Layout, packed: int, size_bytes: int, target: int, *, level: int | None = None) -> None:
    """Restore `layout.source_bytes` at `target` from the `size_bytes` at `packed` that `pack` returned.

    Raises CorruptPackingError, before anything is written, if sizes and flags contradict each other. Changed items are
    not noticed; checksums are left to the code that stores the bytes.
    """
    library, level = library_and_level(level)
    match layout.codec:
        case Codec.BITS:
            result = library.port_bits_unpack(level, packed, size_bytes, target, layout.count)
        case Codec.PAIR:
            result = library.port_pair_unpack(level, packed, size_bytes, target, layout.count)
        case Codec.SIGN | Codec.INSIDE:
            raise PackingError("signs do not restore the values; use `select` with them")
        case Codec.NARROW:
            result = library.port_narrow_unpack(level, packed, size_bytes, target, layout.count)
        case Codec.BITMAP:
            result = library.port_bitmap_unpack(level, packed, size_bytes, target, layout.count, layout.item_bytes)
        case _:
            assert_never(layout.codec)
    if result == _CORRUPT:
        raise CorruptPackingError(layout, size_bytes)


def select(
    layout: Layout,
    packed: int,
    size_bytes: int,
    gradients: int,
    target: int,
    *,
    inverted: bool = False,
    level: int | None = None,
) -> None:
    """Write the gradient (32-bit floats) of each item whose bit is set to `target`, +0 for the others; `layout`: SIGN,
    INSIDE or BITS.

    `inverted`: of each item whose bit is not set. Raises CorruptPackingError, before anything is written, if sizes and
    bits contradict each other.
    """
    library, level = library_and_level(level)
    if library.port_sign_select(level, packed, size_bytes, gradients, target, layout.count, inverted) == _CORRUPT:
        raise CorruptPackingError(layout, size_bytes)


def multiply(
    layout: Layout, packed: int, size_bytes: int, factors: int, target: int, *, level: int | None = None
) -> None:
    """Write the product of each factor (32-bit floats) and item to `target`; `layout` is of the codec PAIR.

    Raises CorruptPackingError, before anything is written, if sizes and bits contradict each other.
    """
    library, level = library_and_level(level)
    if library.port_pair_multiply(level, packed, size_bytes, factors, target, layout.count) == _CORRUPT:
        raise CorruptPackingError(layout, size_bytes)


def scatter(
    layout: Layout, packed: int, size_bytes: int, gradients: int, target: int, *, planes: int, places: int
) -> None:
    """Write to `target` the sums of gradients (32-bit floats) at the places that packed indices give;
    `layout` is of the codec NARROW.

    The indices are those of `planes` equal planes, each into a plane of `places` floats. Raises CorruptPackingError if
    sizes contradict each other or an index lies outside its plane; the target's content is then undefined.
    """
    if layout.count % planes:
        raise PackingError(f"{layout.count} indices are not those of {planes} planes; report this")
    along = layout.count // planes
    if loaded_library().port_narrow_scatter(packed, size_bytes, gradients, planes, along, places, target) == _CORRUPT:
        raise CorruptPackingError(layout, size_bytes)


def best_level() -> int:
    """Return the fastest implementation that this CPU can run (enum pack_level of packing.h)."""
    return int(loaded_library().port_pack_best_level())


def _library_path() -> Path | None:
    here = Path(__file__).resolve().parent
    candidates = (here / f"native{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def library_and_level(level: int | None) -> tuple[ctypes.CDLL, int]:
    """Return the library and the requested level, None for the best. Raises PackingError for an unavailable one."""
    best = best_level()
    if level is not None and not 0 <= level <= best:
        raise PackingError(f"this CPU has packing levels 0 to {best}, not {level}")
    return loaded_library(), best if level is None else level


@cache
def loaded_library() -> ctypes.CDLL:
    """Return the library with its functions declared; raises PackingUnavailableError if it is missing."""
    path = _library_path()
    if path is None:
        raise PackingUnavailableError(
            "packing was not built; install a C compiler and reinstall the package, or plan without packing"
        )
    library = ctypes.CDLL(str(path))
    level, pointer, size, number = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
    for name, arguments in (
        ("port_bits_pack", [level, pointer, size, pointer, size]),
        ("port_bits_unpack", [level, pointer, size, pointer, size]),
        (
            "port_grid_decode",
            [level, pointer, pointer, pointer, size, size, size, size, size, size, pointer],
        ),
        ("port_grid_encode", [pointer, size, size, pointer, pointer, pointer]),
        ("port_planes_split", [level, pointer, size, size, pointer, pointer]),
        ("port_planes_join", [level, pointer, pointer, size, size, pointer]),
        ("port_sign_pack", [level, pointer, size, pointer, size]),
        ("port_inside_pack", [level, pointer, size, number, number, pointer, size]),
        ("port_sign_select", [level, pointer, size, pointer, pointer, size, level]),
        ("port_pair_pack", [level, pointer, size, pointer, size]),
        ("port_pair_unpack", [level, pointer, size, pointer, size]),
        ("port_pair_multiply", [level, pointer, size, pointer, pointer, size]),
        ("port_narrow_scatter", [pointer, size, pointer, size, size, size, pointer]),
        ("port_narrow_size", [level, pointer, size]),
        ("port_narrow_pack", [level, pointer, size, pointer, size]),
        ("port_narrow_unpack", [level, pointer, size, pointer, size]),
        ("port_bitmap_size", [level, pointer, size, size]),
        ("port_bitmap_pack", [level, pointer, size, size, pointer, size]),
        ("port_bitmap_unpack", [level, pointer, size, pointer, size, size]),
    ):
        function = getattr(library, name, None)
        if function is None:
            raise PackingUnavailableError(
                f"{path} was built for another version; reinstall the package, or plan without packing"
            )
        function.argtypes, function.restype = arguments, ctypes.c_int64
    return library

"""Pages of floating-point numbers, smaller on flash without loss, each in the form that suits it.

- On a grid: a page of weights that lie on the NF4 or int8 grid is their codes and scales, 4.5 or 8.25 bits a weight.
- Bitmap: a page of which a fifth or more is zero, as pruned weights and activations after ReLU, is a bit an item
  and the items that are not.
- Planes: of any other page sign and exponent are Huffman-coded, the rest is as it is. An entropy coder without matches
  (zlib's) is what this takes: the exponents of weights and momenta are few, and do not repeat in patterns.

A page begins with 4 bytes, little-endian: which of the first two forms it has, or the length of the coded bytes.
"""

import ctypes
import zlib
from collections.abc import Callable

from port_agent.packing.codec import (
    CorruptPackingError,
    Layout,
    PackingError,
    PackingOverflowError,
    loaded_library,
    pack,
    packed_bytes,
    unpack,
)
from port_agent.packing.quantized import Quantization, QuantizedMatrix, decode, encode_quantized
from port_planner.ir.costs import Codec

ITEM_BYTES = (2, 4)
"""Sizes of the items that are packed, in bytes (bfloat16, float16, float32); the exponent is too
small a part of wider items.
"""

_HEADER_BYTES = 4
_SCALE_BYTES = 4
_FASTEST, _RAW_WINDOW, _MAX_MEMORY = 1, -15, 9
_BITMAP = 0xFFFFFFFF
_QUANTIZED = {Quantization.NF4: 0xFFFFFFFE, Quantization.INT8: 0xFFFFFFFD}
_SPARSE = 0.8
"""Share of a page's size up to which a bitmap is smaller than the planes of the same page;
it is made at memory speed.
"""


class DamagedPageError(PackingError):
    """Bytes that are not a packed page of this length."""

    def __init__(self, stored_bytes: int, page_bytes: int) -> None:
        super().__init__(
            f"{stored_bytes} bytes are not a valid packed page of {page_bytes}; the medium may be failing: restore "
            "the last checkpoint"
        )


def pack_page(address: int, nbytes: int, item_bytes: int, target: bytearray) -> int:
    """Pack a page into `target`; return the number of bytes there, or 0 if the page would not become smaller.

    `target` has space for `nbytes`. Raises PackingUnavailableError if the library is missing.
    """
    if item_bytes not in ITEM_BYTES or nbytes % item_bytes or nbytes <= _HEADER_BYTES:
        return 0
    forms: tuple[Callable[[int, int, int, bytearray], int], ...] = (_pack_quantized, _pack_bitmap, _pack_planes)
    return next((stored for form in forms if (stored := form(address, nbytes, item_bytes, target))), 0)


def unpack_page(stored: memoryview, address: int, nbytes: int, item_bytes: int) -> None:
    """Restore a page at `address`. Raises DamagedPageError for an invalid one, before anything is written there."""
    form = int.from_bytes(stored[:_HEADER_BYTES], "little")
    quantization = next((quantization for quantization, number in _QUANTIZED.items() if number == form), None)
    if quantization is not None:
        _unpack_quantized(quantization, stored, address, nbytes, item_bytes)
    elif form == _BITMAP:
        layout, body = Layout(Codec.BITMAP, nbytes // item_bytes, item_bytes), bytes(stored[_HEADER_BYTES:])
        try:
            unpack(layout, _address(body), len(body), address)
        except CorruptPackingError as error:
            raise DamagedPageError(len(stored), nbytes) from error
    else:
        _unpack_planes(stored, address, nbytes, item_bytes)


def _pack_quantized(address: int, nbytes: int, item_bytes: int, target: bytearray) -> int:
    count = nbytes // item_bytes
    for quantization, number in _QUANTIZED.items():
        scales, size = count // quantization.block * _SCALE_BYTES, _quantized_bytes(quantization, count)
        if count % quantization.block or size >= nbytes:
            continue
        buffer = (ctypes.c_char * size).from_buffer(target)
        begin = ctypes.addressof(buffer) + _HEADER_BYTES
        if encode_quantized(quantization, address, count, item_bytes, begin + scales, begin):
            target[:_HEADER_BYTES] = number.to_bytes(_HEADER_BYTES, "little")
            return size
    return 0


def _quantized_bytes(quantization: Quantization, count: int) -> int:
    return _HEADER_BYTES + count // quantization.block * _SCALE_BYTES + count * quantization.code_bits // 8


def _unpack_quantized(
    quantization: Quantization, stored: memoryview, address: int, nbytes: int, item_bytes: int
) -> None:
    count = nbytes // item_bytes
    if count % quantization.block or len(stored) != _quantized_bytes(quantization, count):
        raise DamagedPageError(len(stored), nbytes)
    body = bytes(stored[_HEADER_BYTES:])
    begin = _address(body)
    matrix = QuantizedMatrix(quantization, begin + count // quantization.block * _SCALE_BYTES, begin, count)
    decode(matrix, range(1), range(count), item_bytes, address)


def _pack_bitmap(address: int, nbytes: int, item_bytes: int, target: bytearray) -> int:
    layout = Layout(Codec.BITMAP, nbytes // item_bytes, item_bytes)
    size = packed_bytes(layout, address)
    if _HEADER_BYTES + size > _SPARSE * nbytes:
        return 0
    buffer = (ctypes.c_char * (_HEADER_BYTES + size)).from_buffer(target)
    try:
        pack(layout, address, ctypes.addressof(buffer) + _HEADER_BYTES, size)
    except PackingOverflowError:  # something writes to it meanwhile; its page on flash is then not read
        return 0
    target[:_HEADER_BYTES] = _BITMAP.to_bytes(_HEADER_BYTES, "little")
    return _HEADER_BYTES + size


def _pack_planes(address: int, nbytes: int, item_bytes: int, target: bytearray) -> int:
    count = nbytes // item_bytes
    top, rest = ctypes.create_string_buffer(count), ctypes.create_string_buffer(nbytes - count)
    loaded_library().port_planes_split(0, address, count, item_bytes, top, rest)
    coder = zlib.compressobj(_FASTEST, zlib.DEFLATED, _RAW_WINDOW, _MAX_MEMORY, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(top) + coder.flush()
    stored = _HEADER_BYTES + len(coded) + nbytes - count
    if stored >= nbytes:
        return 0
    target[:_HEADER_BYTES] = len(coded).to_bytes(_HEADER_BYTES, "little")
    target[_HEADER_BYTES : stored - nbytes + count] = coded
    target[stored - nbytes + count : stored] = memoryview(rest)
    return stored


def _unpack_planes(stored: memoryview, address: int, nbytes: int, item_bytes: int) -> None:
    count = nbytes // item_bytes
    size = int.from_bytes(stored[:_HEADER_BYTES], "little")
    if _HEADER_BYTES + size + nbytes - count != len(stored):
        raise DamagedPageError(len(stored), nbytes)
    decoder = zlib.decompressobj(_RAW_WINDOW)
    try:
        top = decoder.decompress(stored[_HEADER_BYTES : _HEADER_BYTES + size], count + 1)
    except zlib.error as error:
        raise DamagedPageError(len(stored), nbytes) from error
    if len(top) != count or not decoder.eof or decoder.unused_data:
        raise DamagedPageError(len(stored), nbytes)
    rest = bytes(stored[_HEADER_BYTES + size :])
    loaded_library().port_planes_join(0, top, rest, count, item_bytes, address)


def _address(body: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p).value or 0

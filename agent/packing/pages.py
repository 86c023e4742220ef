"""Pages of floating-point numbers, smaller on flash without loss: sign and exponent Huffman-coded, the rest as it is.

A page is: the length of the coded bytes (4 bytes, little-endian), those, then the other bytes of every item. An entropy coder without
matches (zlib's) is what this takes: the exponents of weights and momenta are few, and do not repeat in patterns.
"""

import ctypes
import zlib

from agent.packing.codec import PackingError, loaded_library

ITEM_BYTES = (2, 4)
"""bfloat16, float16 and float32: of wider items the exponent is too small a part."""

_HEADER_BYTES = 4
_FASTEST, _RAW_WINDOW, _MOST_MEMORY = 1, -15, 9


class DamagedPageError(PackingError):
    """Bytes that are no packed page of this length."""

    def __init__(self, stored_bytes: int, page_bytes: int) -> None:
        super().__init__(
            f"{stored_bytes} bytes are no packed page of {page_bytes}; the medium may be failing: restore the last checkpoint"
        )


def pack_page(address: int, nbytes: int, item_bytes: int, target: bytearray) -> int:
    """Pack a page into `target`; return the bytes it takes there, 0 where the page would not get smaller.

    `target` has room for `nbytes`. Raises PackingUnavailableError where the library is not there.
    """
    count, odd = divmod(nbytes, item_bytes)
    if odd or item_bytes not in ITEM_BYTES:
        return 0
    top, rest = ctypes.create_string_buffer(count), ctypes.create_string_buffer(nbytes - count)
    loaded_library().port_planes_split(0, address, count, item_bytes, top, rest)
    coder = zlib.compressobj(_FASTEST, zlib.DEFLATED, _RAW_WINDOW, _MOST_MEMORY, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(top) + coder.flush()
    stored = _HEADER_BYTES + len(coded) + nbytes - count
    if stored >= nbytes:
        return 0
    target[:_HEADER_BYTES] = len(coded).to_bytes(_HEADER_BYTES, "little")
    target[_HEADER_BYTES : stored - nbytes + count] = coded
    target[stored - nbytes + count : stored] = memoryview(rest)
    return stored


def unpack_page(stored: memoryview, address: int, nbytes: int, item_bytes: int) -> None:
    """Restore a page at `address`. Raises DamagedPageError, before anything is written there, where it is none."""
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

"""Packed pages give back every bit, are smaller where numbers are like weights, and what is
damaged is refused by name.
"""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from port_agent import packing
from port_agent.packing.pages import DamagedPageError, pack_page, unpack_page
from port_agent.packing.quantized import Quantization, QuantizedMatrix, decode

pytestmark = pytest.mark.skipif(not packing.available(), reason="packing was not built (no compiler)")

Bytes = NDArray[np.uint8]


def stored(page: Bytes, item_bytes: int) -> bytes:
    """Return the packed form of a page; empty where it is not smaller."""
    target = bytearray(page.size)
    return bytes(target[: pack_page(page.ctypes.data, page.size, item_bytes, target)])


def restored(packed: bytes, nbytes: int, item_bytes: int) -> bytes:
    page = np.full(nbytes + 16, 0xA5, np.uint8)
    unpack_page(memoryview(packed), page.ctypes.data, nbytes, item_bytes)
    assert (page[nbytes:] == 0xA5).all()
    return page[:nbytes].tobytes()


def weights(count: int) -> Bytes:
    return (0.02 * np.random.default_rng(0).standard_normal(count)).astype(np.float32).view(np.uint8)


@pytest.mark.parametrize("count", [1000, 4096, 1 << 18])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_weights_come_back_from_fewer_bytes(count: int, item_bytes: int) -> None:
    page = weights(count)
    if item_bytes == 2:
        page = np.ascontiguousarray(page.reshape(-1, 4)[:, 2:]).ravel()  # bfloat16
    packed = stored(page, item_bytes)
    assert 0 < len(packed) < (0.75 if item_bytes == 2 else 0.88) * page.size
    assert restored(packed, page.size, item_bytes) == page.tobytes()


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("quantization", Quantization)
def test_weights_on_a_grid_take_their_codes_and_scales_alone(quantization: Quantization, item_bytes: int) -> None:
    """Scales at random, as a job chose them: of bfloat16 items the scale itself is nowhere to be read."""
    draw, blocks = np.random.default_rng(3), 200
    codes = draw.integers(0, 256, blocks * quantization.block * quantization.code_bits // 8, np.uint8)
    if quantization is Quantization.INT8:
        codes = np.maximum(codes.view(np.int8), -127).view(np.uint8)
        codes[:: quantization.block] = 127
    else:
        codes[:: quantization.block // 2] = 0xF0  # the first two are -1 and 1 times the scale
    scales = (10.0 ** draw.uniform(-3, 1, blocks)).astype(np.float32)
    scales[7] = 0.0
    made = np.zeros(blocks * quantization.block * item_bytes, np.uint8)
    matrix = QuantizedMatrix(quantization, codes.ctypes.data, scales.ctypes.data, blocks * quantization.block)
    decode(matrix, range(1), range(blocks * quantization.block), item_bytes, made.ctypes.data)
    made.view(np.uint16 if item_bytes == 2 else np.uint32)[7 * quantization.block : 8 * quantization.block] = 0
    packed = stored(made, item_bytes)
    assert len(packed) == 4 + blocks * (4 + quantization.block * quantization.code_bits // 8)
    assert restored(packed, made.size, item_bytes) == made.tobytes()
    for damaged in (packed[:-1], packed + b"\0"):
        with pytest.raises(DamagedPageError):
            unpack_page(memoryview(damaged), made.ctypes.data, made.size, item_bytes)
    made[9 * quantization.block * item_bytes] ^= 1  # one bit of one weight beside the grid
    assert len(stored(made, item_bytes)) != len(packed)
    assert not stored(made, item_bytes) or restored(stored(made, item_bytes), made.size, item_bytes) == made.tobytes()


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_page_with_many_zeros_takes_a_bit_for_each(item_bytes: int) -> None:
    page = weights(1 << 14)
    items = page.view(np.uint16 if item_bytes == 2 else np.uint32)
    items[np.random.default_rng(4).random(items.size) < 0.8] = 0
    packed = stored(page, item_bytes)
    kept = int(np.count_nonzero(items))
    assert len(packed) == 4 + items.size // 8 + kept * item_bytes
    assert restored(packed, page.size, item_bytes) == page.tobytes()
    for damaged in (packed[:-1], packed + b"\0", packed[:4] + bytes([packed[4] ^ 1]) + packed[5:]):
        with pytest.raises(DamagedPageError):
            unpack_page(memoryview(damaged), page.ctypes.data, page.size, item_bytes)


@pytest.mark.slow
@given(st.binary(min_size=1, max_size=64), st.integers(1, 200), st.sampled_from([2, 4]))
@settings(max_examples=200, deadline=None)
def test_whatever_gets_smaller_comes_back_to_the_bit(pattern: bytes, times: int, item_bytes: int) -> None:
    """NaN payloads, -0.0, denormals: bytes are bytes."""
    page = np.frombuffer(pattern * times, np.uint8).copy()
    packed = stored(page, item_bytes)
    assert not packed or restored(packed, page.size, item_bytes) == page.tobytes()


def test_what_would_not_get_smaller_is_left_as_it_is() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 4096).astype(np.uint8)
    assert stored(noise, 4) == b"" and stored(noise[:3], 4) == b"" and stored(weights(1000), 8) == b""


def test_damaged_pages_are_refused_before_anything_is_written() -> None:
    page = weights(1000)
    packed = stored(page, 4)
    size = int.from_bytes(packed[:4], "little")
    short = zlib.compress(bytes(999), 1, wbits=-15)
    wrong = [
        packed[:-1],
        packed + b"\0",
        packed[:3],
        b"",
        (size + 1).to_bytes(4, "little") + packed[4:],
        packed[:4] + bytes(size) + packed[4 + size :],
        len(short).to_bytes(4, "little") + short + packed[4 + size :],
    ]
    for damaged in wrong:
        target = np.full(page.size, 0xA5, np.uint8)
        with pytest.raises(DamagedPageError, match="not a valid packed page of 4000"):
            unpack_page(memoryview(damaged), target.ctypes.data, page.size, 4)
        assert (target == 0xA5).all()

"""Packed pages give back every bit, are smaller where numbers are like weights, and what is damaged is refused by name."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent import packing
from agent.packing.pages import DamagedPageError, pack_page, unpack_page

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
        packed[:-1], packed + b"\0", packed[:3], b"", (size + 1).to_bytes(4, "little") + packed[4:],
        packed[:4] + bytes(size) + packed[4 + size :],
        len(short).to_bytes(4, "little") + short + packed[4 + size :],
    ]  # fmt: skip
    for damaged in wrong:
        target = np.full(page.size, 0xA5, np.uint8)
        with pytest.raises(DamagedPageError, match="no packed page of 4000"):
            unpack_page(memoryview(damaged), target.ctypes.data, page.size, 4)
        assert (target == 0xA5).all()

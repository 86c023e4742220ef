"""Writing until a medium's cache is full: media with known speeds, and a real directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from port_planner.profiling.sustained_writes import (
    MAX_BYTES,
    MAX_SECONDS,
    WINDOW_BYTES,
    is_steady,
    measure_sustained,
    until_steady,
)

MIB = 1 << 20


def card(cache_bytes: int, fast: float, slow: float) -> Callable[[int], float]:
    """Return a medium that takes `cache_bytes` at `fast` bytes per second and everything after at `slow`."""
    written = 0

    def write(count_bytes: int) -> float:
        nonlocal written
        cached = max(0, min(count_bytes, cache_bytes - written))
        written += count_bytes
        return cached / fast + (count_bytes - cached) / slow

    return write


def test_a_card_whose_cache_fills() -> None:
    for cache in (0, 100, 700, 1500):
        found = until_steady(card(cache * MIB, 80.0 * MIB, 22.0 * MIB), max_bytes=MAX_BYTES)
        assert found.steady and found.sustained_bytes_per_s == pytest.approx(22.0 * MIB)
        assert found.burst_bytes_per_s == pytest.approx((80.0 if cache else 22.0) * MIB)
        assert found.written_bytes <= max(1536, cache + 6 * 64) * MIB


def test_a_cache_beyond_the_bound_is_not_seen() -> None:
    found = until_steady(card(8 << 30, 80.0 * MIB, 22.0 * MIB), max_bytes=MAX_BYTES)
    assert found.sustained_bytes_per_s == pytest.approx(80.0 * MIB) and found.written_bytes == 1536 * MIB


def test_it_ends_at_its_bounds_and_says_that_the_speed_still_fell() -> None:
    seconds = [1.0]

    def slower(count_bytes: int) -> float:
        seconds.append(seconds[-1] * 1.2)
        return seconds[-1]

    falling = until_steady(slower, max_bytes=MAX_BYTES)
    assert not falling.steady
    assert falling.written_bytes <= MAX_BYTES
    slow = until_steady(card(0, 1.0, float(MIB)), max_bytes=MAX_BYTES)
    assert slow.written_bytes <= MAX_SECONDS * MIB + WINDOW_BYTES
    assert not is_steady([1.0] * 23) and is_steady([1.0] * 24) and not is_steady([1.0] * 23 + [1.3])
    assert is_steady([1.0, 2.0, 2.0, 2.0, 2.0]) and not is_steady([1.0, 1.0, 2.0, 2.0, 2.0])


@pytest.mark.slow
def test_a_real_directory(tmp_path: Path) -> None:
    shares: list[float] = []
    found = measure_sustained(tmp_path, max_bytes=2 * WINDOW_BYTES, progress=shares.append)
    assert found.written_bytes == 2 * WINDOW_BYTES and found.burst_bytes_per_s > 0
    assert shares == [0.5, 1.0] and list(tmp_path.iterdir()) == []

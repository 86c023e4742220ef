"""The one grammar of sizes and durations: what it reads, and hostile inputs refused with the remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from port_planner.base.units import (
    LARGEST_BYTES,
    LONGEST_S,
    DurationError,
    SizeError,
    parse_bytes,
    parse_duration,
    size_at_least,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("300M", 300 << 20), ("300MiB", 300 << 20), ("300MB", 300_000_000), ("1.5GiB", 3 << 29), (" 12 k ", 12 << 10),
        ("7", 7), ("0", 0), ("9007199254740993", 9007199254740993), ("0.3M", 314572), (4096, 4096),
    ],
)  # fmt: skip
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "abc", "-5", "-5M", "1e400", "nan", "9" * 5000, "9999999T", "1.5.5M", "5 M B", "１", -1]
)
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(SizeError, match=r"write it like 300M") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 160 and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("30min", 1800), ("30m", 1800), ("8h", 28800), ("3d", 259_200), ("2w", 1_209_600),
        ("1d12h", 129_600), ("1h 30min", 5400), ("1.5 d", 129_600), ("PT8H", 28800), ("P1DT12H", 129_600), ("P2W", 1_209_600),
        ("PT1.5S", 1.5), ("50ms", 0.05), ("0", 0), ("45", 45), (2.5, 2.5),
    ],
)  # fmt: skip
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "abc", "-5", "-3h", "1e400", "nan", "99999999d", "12h1d", "1h1h", "P", "PT", "P1M", "8 lightyears", "9" * 5000, "１h"],
)  # fmt: skip
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(DurationError, match=r"write it like 90s, 30min, 8h") as caught:
        parse_duration(text)
    assert len(str(caught.value)) < 160 and caught.value.exit_code == 2


@pytest.mark.parametrize("value", [-1, 10**400, float("nan"), float("inf")])
def test_numbers_that_are_no_durations(value: float) -> None:
    with pytest.raises(DurationError, match="ten years"):
        parse_duration(value)


@given(st.text(max_size=40))
def test_any_text_is_read_within_bounds_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_bytes(text) <= LARGEST_BYTES
    except SizeError as error:
        assert "\n" not in str(error)
    try:
        assert 0 <= parse_duration(text) <= LONGEST_S
    except DurationError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (65535, "65535"), (65537, "65K"), ((64 << 20) - 1, "65536K"), ((200 << 20) + 1, "201M")],
)
def test_a_size_to_be_given_is_no_less_than_what_is_needed(count: int, text: str) -> None:
    assert size_at_least(count) == text
    assert 0 <= parse_bytes(text) - count < max(1, count / 64)

"""Numbers and texts from outside stay where sums of them stay."""

from typing import Any

import msgspec
import pytest

from port_planner.base.bounds import MAX_WHOLE, Count, Figure, PositiveFigure, Text


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        (Count, (0, MAX_WHOLE - 1), (-1, MAX_WHOLE, 1.5, True)),
        (Figure, (0.0, 1e29, 3), (-1.0, 1e30, float("nan"), float("inf"))),
        (PositiveFigure, (1e-9, 1e29), (0.0, float("nan"))),
        (Text, ("", "x" * 1000), ("x" * 1001, 3)),
    ],
)
def test_what_is_outside_is_refused(kind: Any, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    for value in inside:
        assert msgspec.convert(value, kind) == value
    for value in outside:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)

"""Plans with packing are told to be costlier where they take more of anything, or where there is none."""

import pytest

from benchmarks.packing_plans import Row

CHEAPER = Row("net", 0.5, 1 << 20, (2.0, 1.0), (1.0, 1.0), (100, 0), 3, 1)


def test_a_plan_that_takes_no_more_is_not_dearer() -> None:
    assert not CHEAPER.costlier
    none = (None, 1.0)
    assert not Row("net", 0.3, 1, none, none, (None, 100), 1, 0).costlier, "it fits where none did"


@pytest.mark.parametrize(
    ("row", "costlier"),
    [
        (Row("net", 0.5, 1, (1.0, 1.1), (1.0, 1.0), (0, 0), 1, 0), ("joules",)),
        (Row("net", 0.5, 1, (1.0, 0.9), (1.0, 1.1), (0, 1), 1, 0), ("seconds", "written bytes")),
        (Row("net", 0.5, 1, (1.0, None), (1.0, None), (0, None), 0, 0), ("joules", "seconds", "written bytes")),
    ],
)
def test_what_it_takes_more_of_is_named(row: Row, costlier: tuple[str, ...]) -> None:
    assert row.costlier == costlier


def test_on_a_card_less_written_may_take_a_quarter_more_time() -> None:
    def on_card(seconds: float, written: int) -> Row:
        return Row("net", 0.5, 1, (1.0, 0.9), (1.0, seconds), (100, written), 1, 0, on_card=True)

    assert not on_card(1.2, 50).costlier
    assert on_card(1.2, 100).costlier == ("seconds",) and on_card(1.3, 50).costlier == ("seconds",)

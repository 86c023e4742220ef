"""Rows made from what changes between stages say what rows that are written out stage by stage say."""

import numpy as np
import pytest

from port_planner.milp.held_bytes import HeldBytes, HeldRows
from port_planner.milp.highs import LinearModel

SIZE, COLUMNS = 12, 5


def held_by_stage(seed: int) -> tuple[HeldBytes, list[dict[int, int]]]:
    """Return bytes that columns hold over random stretches, some of them around the step's end,
    and the same stage by stage.
    """
    rng = np.random.default_rng(seed)
    held, stages = HeldBytes(SIZE), [dict.fromkeys(range(COLUMNS), 0) for _ in range(SIZE)]
    for _ in range(20):
        column, nbytes = int(rng.integers(COLUMNS)), int(rng.integers(0, 9))
        first = int(rng.integers(2 * SIZE))
        end = first + int(rng.integers(0, SIZE + 1))
        held.add(column, nbytes, first, end)
        for s in range(first, end):
            stages[s % SIZE][column] += nbytes
    return held, stages


def model_with_columns() -> LinearModel:
    """Return a model with the columns that hold something, and one more."""
    model = LinearModel()
    for k in range(COLUMNS + 1):
        model.column(f"x({k})")
    return model


@pytest.mark.parametrize("seed", range(20))
def test_changes_add_up_to_what_is_held_in_each_stage(seed: int) -> None:
    held, stages = held_by_stage(seed)
    rows = HeldRows(model_with_columns(), 2.0, 0.0)
    for s, expected in enumerate(stages):
        rows.advance(held.changes(s))
        assert dict(rows.held) == {column: nbytes / 2.0 for column, nbytes in expected.items() if nbytes}


def model_of(seed: int, limit: float) -> tuple[LinearModel, list[dict[int, int]]]:
    model = model_with_columns()
    held, stages = held_by_stage(seed)
    rows = HeldRows(model, 1.0, limit)
    for s in range(SIZE):
        rows.advance(held.changes(s))
        rows.offer(f"bare({s})", [], 1.0)
        rows.offer(f"fuller({s})", [], 2.0)
        rows.offer(f"further({s})", [(COLUMNS, 3.0), (0, 1.0)], 0.0)
    rows.write()
    return model, stages


def rows_of(model: LinearModel) -> dict[str, tuple[dict[int, float], float]]:
    found = {}
    for row, name in enumerate(model.row_names):
        part = slice(model.row_start[row], model.row_start[row + 1])
        found[name] = dict(zip(model.index[part], model.value[part], strict=True)), model.row_upper[row]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_row_limits_what_is_held_with_its_further_terms_beside_what_is_fixed(seed: int) -> None:
    model, stages = model_of(seed, limit=1.0)
    found = rows_of(model)
    assert found
    for name, (terms, upper) in found.items():
        expected = {column: float(nbytes) for column, nbytes in stages[int(name[name.index("(") + 1 : -1])].items()}
        if name.startswith("further"):
            expected = {**expected, 0: expected[0] + 1.0, COLUMNS: 3.0}
        assert terms == {column: nbytes for column, nbytes in expected.items() if nbytes}
        assert upper == (1.0 if name.startswith("further") else -1.0)


def test_of_the_same_terms_the_fullest_row_is_left_and_none_that_cannot_be_broken() -> None:
    model, stages = model_of(3, limit=1.0)
    names = [name.partition("(")[0] for name in model.row_names]
    assert "bare" not in names and "fuller" in names
    most = max(sum(stage.values()) for stage in stages) + 4.0
    assert model_of(3, limit=most)[0].rows == 0

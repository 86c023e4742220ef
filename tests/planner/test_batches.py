"""Batches of any structure become columns and the same batches again; what one step cannot take is refused by name."""

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree

from port_planner.batches import MAX_BUCKETS, as_columns
from port_planner.job import JobError, ScriptError


def batch(rows: int, first: int = 0) -> dict[str, Any]:
    x = torch.arange(first, first + rows * 3).reshape(rows, 3).float()
    return {"x": x, "more": [np.arange(first, first + rows), (torch.ones(7), "mean", 0.5)], "none": None}


def test_columns_and_back() -> None:
    batches = [batch(4), batch(4, 100), batch(2, 200)]
    (kind,) = as_columns(iter(batches))
    assert kind.batch_size == 4 and kind.batches == 3
    assert [tuple(c.shape) for c in kind.columns] == [(10, 3), (10,)]
    begin = 0
    for given in batches:
        rows = len(given["x"])
        again = kind.rebuilt(*(c[begin : begin + rows] for c in kind.columns))
        for one, other in zip(*map(pytree.tree_leaves, (given, again)), strict=True):
            assert (
                one is other
                if one is None or isinstance(one, str | float)
                else torch.equal(torch.as_tensor(one), torch.as_tensor(other))
            )
        begin += rows


def test_mappings_of_other_kinds() -> None:
    (kind,) = as_columns([OrderedDict(x=torch.zeros(2, 1), y=torch.ones(2))])
    assert kind.rebuilt(torch.zeros(1, 1), torch.ones(1)).keys() == {"x", "y"}


def test_rows_of_other_shapes_are_other_kinds_the_largest_first() -> None:
    def long(rows: int, length: int) -> dict[str, Any]:
        return {"x": torch.full((rows, length), float(length)), "length": length, "y": torch.arange(rows)}

    batches = [long(4, 3), long(2, 8), long(4, 3), long(2, 8), long(1, 8), long(3, 3)]
    found = as_columns(batches)
    assert [[tuple(c.shape) for c in kind.columns] for kind in found] == [[(5, 8), (5,)], [(11, 3), (11,)]]
    assert [kind.batch_size for kind in found] == [2, 4] and sum(kind.batches for kind in found) == len(batches)
    for kind, length in zip(found, (8, 3), strict=True):
        again = kind.rebuilt(*(column[:1] for column in kind.columns))
        assert again["length"] == length and torch.equal(again["x"], torch.full((1, length), float(length)))


def test_what_has_no_rows_makes_other_kinds_by_its_value() -> None:
    batches = [
        changed(more=[np.arange(4), (torch.ones(7) * i, task, 0.5)])[1]
        for i, task in ((0, "a"), (0, "b"), (1, "a"), (0, "b"))
    ]
    found = as_columns([*batches, batch(4)])
    assert [kind.batches for kind in found] == [2, 1, 1, 1]
    for kind, given in zip(found, (batches[1], batches[0], batches[2], batch(4)), strict=True):
        scale, task, _ = kind.rebuilt(*(column[:4] for column in kind.columns))["more"][1]
        assert task == given["more"][1][1] and torch.equal(scale, given["more"][1][0])


def changed(**leaves: Any) -> list[dict[str, Any]]:
    return [batch(4), {**batch(4), **leaves}, batch(4)]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there is no batch"),
        ([{"x": 1}], "no tensor with a row per sample"),
        ([{"x": torch.zeros(2, n)} for n in range(1, MAX_BUCKETS + 2)], "have more than 16 shapes.*pad them to that many"),
        (changed(x=torch.zeros(4, 5, 1)), r"leaf 0 of batch 2 is float32 \[4, 5, 1\], and float32 with 2 dimensions in the first"),
        (changed(x=torch.zeros(4, 3).double()), r"is float64 \[4, 3\]"),
        (changed(x=torch.zeros(2, 3)), r"batch 2 is float32 \[2, 3\].*every sample needs a row"),
        (
            [changed(more=[np.arange(4), (torch.ones(7), "mean", i)])[1] for i in range(MAX_BUCKETS + 1)],
            "leaf 4 of batch 17 is 16, and 15 in batch 16: .*more than 16",
        ),
        (
            [{"x": torch.zeros(2, 1), "of": i or None} for i in range(MAX_BUCKETS + 1)],
            "leaf 1 of batch 17 is 16, and 15 in batch 16",
        ),
        (
            [{"x": torch.zeros(2, 1), "of": i if i < MAX_BUCKETS - 1 else [None, 99][i % 2]} for i in range(MAX_BUCKETS + 1)],
            "leaf 1 of batch 17 is None, and 99 in batch 16|leaf 1 of batch 17 is 99, and None in batch 16",
        ),
        (changed(extra=1), "batch 2 has a different structure"),
        ([batch(4), batch(5)], r"batch 2 has 5 rows of \[3\], after batches of that kind of 4:"),
        ([batch(4), batch(3), batch(4)], r"batch 3 has 4 rows of \[3\], after batches of that kind of 4 and of fewer:"),
        ([{"x": np.array(["a", "b"])}], "leaf 0 of batch 1 is an array of <U1; give an array of numbers"),
    ],
)  # fmt: skip
def test_what_one_step_cannot_take(batches: list[Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        as_columns(batches)


def test_data_that_raises_is_the_users_own() -> None:
    def broken() -> Any:
        yield batch(4)
        raise KeyError("row 5")

    with pytest.raises(ScriptError, match="iterating over the batches failed"):
        as_columns(broken())


def test_a_data_set_is_there_once() -> None:
    """Rows of batches that were joined are let go, those of the first batch, whose structure is kept, too."""
    held = list[Any]()

    def batches() -> Iterator[dict[str, Any]]:
        for i in range(3):
            batch = {"x": torch.full((2, 3), i), "scale": 0.5}
            held.append(weakref.ref(batch["x"]))
            yield batch

    (kind,) = as_columns(batches())
    assert [one() for one in held] == [None] * 3
    rebuilt = kind.rebuilt(kind.columns[0][2:4])
    assert rebuilt["scale"] == 0.5 and torch.equal(rebuilt["x"], torch.full((2, 3), 1))

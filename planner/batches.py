"""Batches of any structure as columns with a row per sample, which is how a bundle keeps its data, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from planner.job import Bucket, JobError, own_code

MOST_BUCKETS = 16
"""Of shapes in one job: each is recorded, measured and planned on its own."""

_Shapes = tuple[tuple[int, ...], ...]
"""Of the rows of each leaf that has one for each sample."""


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """All batches of an epoch, joined: those whose rows have the same shapes into one bucket, the largest bucket first.

    A bucket has one column per leaf that has a row for each sample, its rows in the order of the batches, and as many rows to a batch
    as each of its batches but the last, which may have fewer. `rebuilt`: returns the batch, in its own structure, of some rows of
    a bucket's columns.
    """

    buckets: tuple[Bucket, ...]
    rebuilt: Callable[..., Any]

    @property
    def batches(self) -> int:
        """How many there are."""
        return sum(-(-len(bucket.data[0]) // bucket.batch_size) for bucket in self.buckets)


def as_columns(batches: Iterable[Any]) -> BatchColumns:
    """Go once over batches (tensors or arrays, in tuples, lists and mappings, nested) and join them.

    Leaves without a row per sample (numbers, strings, tensors of another length) have to be the same in all batches of a bucket and
    belong to its step. Raises JobError where the steps of a bundle cannot take all batches, and ScriptError where iterating
    raises.
    """
    with own_code("iterating over the batches"):
        flat = [_flattened(batch) for batch in batches]
    if not flat:
        raise JobError("there is no batch; give an iterable that yields at least one")
    leaves, structure = flat[0]
    size = next((len(leaf) for leaf in leaves if _has_rows(leaf)), 0)
    if not size:
        raise JobError(
            "the first batch holds no tensor with a row per sample; a batch is tensors in tuples, lists or mappings"
        )
    places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf) and len(leaf) == size]
    grouped: dict[_Shapes, list[tuple[int, list[Any]]]] = {}
    for number, (others, other_structure) in enumerate(flat, 1):
        if other_structure != structure:
            raise JobError(
                f"batch {number} has another structure than the first ({other_structure} instead of {structure}); "
                "a bundle's steps take one. Train with `port-agent exec`, which follows what changes"
            )
        _check_rows(number, leaves, others, places)
        grouped.setdefault(_row_shapes(others, places), []).append((number, others))
    if len(grouped) > MOST_BUCKETS:
        raise JobError(
            f"the batches have {len(grouped)} shapes, and each takes a step of its own: pad them to at most {MOST_BUCKETS} (in the "
            "collate_fn, to multiples of a length), or train with `port-agent exec`, which follows what changes"
        )
    for members in grouped.values():
        for place, (number, own_leaves) in enumerate(members):
            _check_alike(number, members[0], own_leaves, places, last=place == len(members) - 1)
    found = sorted((_bucket([b for _, b in members], places) for members in grouped.values()), key=_elements)
    firsts = {shapes: members[0][1] for shapes, members in grouped.items()}

    def rebuilt(*rows: torch.Tensor) -> Any:
        whole = list(firsts[tuple(tuple(row.shape[1:]) for row in rows)])
        for place, row in zip(places, rows, strict=True):
            whole[place] = row
        return pytree.tree_unflatten(whole, structure)

    return BatchColumns(tuple(reversed(found)), rebuilt)


def _bucket(batches: Sequence[list[Any]], places: Sequence[int]) -> Bucket:
    """Join the leaves at these places, column by column, and let those of the batches go: a data set is there once, and a column of it."""
    rows, columns = len(batches[0][places[0]]), list[torch.Tensor]()
    for i in places:
        columns.append(torch.cat([torch.as_tensor(leaves[i]) for leaves in batches]))
        for leaves in batches:
            leaves[i] = None
    return Bucket(tuple(columns), rows)


def _elements(bucket: Bucket) -> int:
    return sum(column.numel() for column in bucket.data)


def _row_shapes(leaves: Sequence[Any], places: Sequence[int]) -> _Shapes:
    return tuple(tuple(leaves[i].shape[1:]) for i in places)


def _flattened(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a batch and its structure; mappings of other kinds become dictionaries."""
    return pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _check_rows(number: int, first: Sequence[Any], leaves: Sequence[Any], places: Sequence[int]) -> None:
    """Raise JobError unless a batch has rows where the first has some, of the same kind of numbers, in all leaves as many."""
    rows = {len(leaves[i]) if _has_rows(leaves[i]) else None for i in places}
    for i in places:
        leaf, model = leaves[i], first[i]
        if not _has_rows(leaf) or leaf.dtype != model.dtype or leaf.ndim != model.ndim or len(rows) > 1:
            raise JobError(
                f"leaf {i} of batch {number} is {_shown(leaf)}, and {_shown(model)} in the first batch: every sample has a row of "
                "that kind in each of these leaves. Train with `port-agent exec`, which follows what changes"
            )


def _check_alike(
    number: int, model: tuple[int, Sequence[Any]], leaves: Sequence[Any], places: Sequence[int], *, last: bool
) -> None:
    """Raise JobError unless a batch differs from the first of its shape in nothing but its rows' contents, the last in their number."""
    first, leaves_there = model
    for i, (leaf, there) in enumerate(zip(leaves, leaves_there, strict=True)):
        if i not in places and not _same(leaf, there):
            raise JobError(
                f"leaf {i} of batch {number} is {_shown(leaf)}, and {_shown(there)} in batch {first}: it has no row for "
                "each sample, so it belongs to the step and must stay the same. Train with `port-agent exec`, which "
                "follows what changes"
            )
    leaf, there = leaves[places[0]], leaves_there[places[0]]
    if len(leaf) != len(there) and not (last and len(leaf) < len(there)):
        raise JobError(
            f"leaf {places[0]} of batch {number} is {_shown(leaf)}, and {_shown(there)} in batch {first}: a bundle's step takes "
            "one number of rows, and fewer in the last batch of a shape alone. Train with `port-agent exec`, which follows what changes"
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray) and isinstance(other, type(one)):
        return one.dtype == other.dtype and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(type(one) is type(other) and one == other)


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return f"{leaf!r:.40}"

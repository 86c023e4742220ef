"""Batches of any structure as columns with a row per sample, which is how a bundle keeps its data, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from planner.column_file import ColumnFile
from planner.job import Bucket, JobError, own_code

MOST_BUCKETS = 16
"""Of shapes in one job: each is recorded, measured and planned on its own."""

_Shapes = tuple[tuple[int, ...], ...]
"""Of the rows of each leaf that has one for each sample."""
_Kind = tuple[torch.dtype, int]
"""Of a leaf: its numbers, and how many dimensions."""


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
        return sum(-(-bucket.data[0].shape[0] // bucket.batch_size) for bucket in self.buckets)


class _Group:
    """Batches whose rows have the same shapes. Of the first the leaves are kept that have no row per sample; rows go to the columns."""

    def __init__(self, number: int, leaves: list[Any], places: Sequence[int], folder: Path | None) -> None:
        self._first, self._places = number, places
        self.leaves = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        self._columns = [ColumnFile(leaves[i].dtype, tuple(leaves[i].shape[1:]), folder) for i in places]
        self._batch_size = len(leaves[places[0]])
        self._ended = False

    def add(self, number: int, leaves: Sequence[Any]) -> None:
        """Append a batch; raise JobError where it differs from the first in more than its rows' contents, the last in their number."""
        for i, (leaf, there) in enumerate(zip(leaves, self.leaves, strict=True)):
            if i not in self._places and not _same(leaf, there):
                raise JobError(
                    f"leaf {i} of batch {number} is {_shown(leaf)}, and {_shown(there)} in batch {self._first}: it has no row for "
                    "each sample, so it belongs to the step and must stay the same. Train with `port-agent exec`, which "
                    "follows what changes"
                )
        rows = [leaves[i] for i in self._places]
        if self._ended or len(rows[0]) > self._batch_size:
            raise JobError(
                f"batch {number} has {len(rows[0])} rows of {list(rows[0].shape[1:])}, after batches of that shape of {self._batch_size}"
                f"{' and of fewer' if self._ended else ''}: a bundle's step takes one number of rows, and fewer in the last batch of a "
                "shape alone. Train with `port-agent exec`, which follows what changes"
            )
        self._ended = len(rows[0]) < self._batch_size
        for column, own in zip(self._columns, rows, strict=True):
            column.append(own)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self._columns), self._batch_size)


def as_columns(batches: Iterable[Any], folder: Path | None = None) -> BatchColumns:
    """Go once over batches (tensors or arrays, in tuples, lists and mappings, nested) and join them in files in a `folder`.

    Leaves without a row per sample (numbers, strings, tensors of another length) have to be the same in all batches of a bucket and
    belong to its step. Raises JobError where the steps of a bundle cannot take all batches or the disk does not, and ScriptError where
    iterating raises.
    """
    groups: dict[_Shapes, _Group] = {}
    places, structure, kinds = list[int](), None, list[_Kind]()
    for number, (leaves, own_structure) in enumerate(_iterated(batches), 1):
        if structure is None:
            places, structure = _places(leaves), own_structure
        elif own_structure != structure:
            raise JobError(
                f"batch {number} has another structure than the first ({own_structure} instead of {structure}); "
                "a bundle's steps take one. Train with `port-agent exec`, which follows what changes"
            )
        for i in places:
            leaves[i] = _as_rows(number, i, leaves[i])
        kinds = kinds or [_kind(leaves[i]) for i in places]
        _check_rows(number, leaves, places, kinds)
        shapes = tuple(tuple(leaves[i].shape[1:]) for i in places)
        if shapes not in groups:
            if len(groups) == MOST_BUCKETS:
                raise JobError(
                    f"the batches have more than {MOST_BUCKETS} shapes, and each takes a step of its own: pad them to as many (in the "
                    "collate_fn, to multiples of a length), or train with `port-agent exec`, which follows what changes"
                )
            groups[shapes] = _Group(number, leaves, places, folder)
        groups[shapes].add(number, leaves)
    if structure is None:
        raise JobError("there is no batch; give an iterable that yields at least one")
    whole_structure = structure

    def rebuilt(*rows: torch.Tensor) -> Any:
        whole = list(groups[tuple(tuple(row.shape[1:]) for row in rows)].leaves)
        for place, row in zip(places, rows, strict=True):
            whole[place] = row
        return pytree.tree_unflatten(whole, whole_structure)

    found = sorted((group.bucket() for group in groups.values()), key=_elements)
    return BatchColumns(tuple(reversed(found)), rebuilt)


def _iterated(batches: Iterable[Any]) -> Iterator[tuple[list[Any], pytree.TreeSpec]]:
    """Yield the leaves of each batch and its structure; mappings of other kinds become dictionaries."""
    with own_code("iterating over the batches"):
        for batch in batches:
            yield pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def _places(leaves: Sequence[Any]) -> list[int]:
    """Return which leaves have a row for each sample: as many as the first tensor of the batch."""
    size = next((len(leaf) for leaf in leaves if _has_rows(leaf)), 0)
    if not size:
        raise JobError(
            "the first batch holds no tensor with a row per sample; a batch is tensors in tuples, lists or mappings"
        )
    return [i for i, leaf in enumerate(leaves) if _has_rows(leaf) and len(leaf) == size]


def _elements(bucket: Bucket) -> int:
    return sum(column.shape.numel() for column in bucket.data)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _as_rows(number: int, place: int, leaf: Any) -> Any:
    """Return an array as a tensor, anything else as it is."""
    try:
        return torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
    except TypeError as error:
        raise JobError(
            f"leaf {place} of batch {number} is an array of {leaf.dtype}; give an array of numbers"
        ) from error


def _kind(leaf: torch.Tensor) -> _Kind:
    return leaf.dtype, leaf.ndim


def _check_rows(number: int, leaves: Sequence[Any], places: Sequence[int], kinds: Sequence[_Kind]) -> None:
    """Raise JobError unless a batch has rows where the first has some, of the same kind of numbers, in all leaves as many."""
    rows = {len(leaves[i]) if _has_rows(leaves[i]) else None for i in places}
    for i, kind in zip(places, kinds, strict=True):
        leaf = leaves[i]
        if not _has_rows(leaf) or _kind(leaf) != kind or len(rows) > 1:
            dtype, dimensions = kind
            raise JobError(
                f"leaf {i} of batch {number} is {_shown(leaf)}, and {str(dtype).removeprefix('torch.')} with {dimensions} dimensions in "
                "the first batch: every sample has a row of that kind in each of these leaves. Train with `port-agent exec`, which "
                "follows what changes"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray) and isinstance(other, type(one)):
        return one.dtype == other.dtype and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(type(one) is type(other) and one == other)


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return f"{leaf!r:.40}"

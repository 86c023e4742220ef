"""Convert batches of any structure to columns with one row per sample, as bundles store data, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from port_planner.column_file import ColumnFile
from port_planner.job import JobError, own_code
from port_planner.torch_compat.modes import pytree

MAX_BUCKETS = 16
"""Kinds of batches in one job: each is recorded, measured and planned on its own."""

_Shapes = tuple[tuple[int, ...], ...]
"""Per-sample shapes of the leaves that have a row for each sample."""
_Numbers = tuple[torch.dtype, int]
"""A leaf's data type and number of dimensions."""


@dataclass(frozen=True, slots=True)
class JoinedBatches:
    """The batches of one kind, joined: one column per leaf that has a row for each sample. Rows are in
    the order of the batches.

    Each batch but the last, which may have fewer, has `batch_size` rows. `rebuilt`: returns the batch, in its own
    structure, of some rows of the columns.
    """

    columns: tuple[ColumnFile, ...]
    batch_size: int
    rebuilt: Callable[..., Any]

    @property
    def batches(self) -> int:
        """How many there are."""
        return -(-len(self.columns[0]) // self.batch_size)


class _BatchJoiner:
    """Joins batches whose rows have the same shapes and whose other leaves are equal; those leaves are
    kept from the first batch.
    """

    def __init__(self, number: int, leaves: list[Any], places: Sequence[int], folder: Path | None) -> None:
        self.number, self._places = number, places
        self.leaves = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        self._columns = tuple(ColumnFile(leaves[i].dtype, tuple(leaves[i].shape[1:]), folder) for i in places)
        self._batch_size = len(leaves[places[0]])
        self._ended = False

    def differing(self, leaves: Sequence[Any]) -> int | None:
        """Return the first leaf that makes a batch with rows of the same shapes another kind; None if
        the batch is of this kind.
        """
        pairs = enumerate(zip(leaves, self.leaves, strict=True))
        return next((i for i, (leaf, there) in pairs if i not in self._places and not _same(leaf, there)), None)

    def add(self, number: int, leaves: Sequence[Any]) -> None:
        """Append a batch; raise JobError if its number of rows differs from the first's and another batch follows."""
        rows = [leaves[i] for i in self._places]
        if self._ended or len(rows[0]) > self._batch_size:
            raise JobError(
                f"batch {number} has {len(rows[0])} rows of {list(rows[0].shape[1:])}, after batches of that kind of "
                f"{self._batch_size}{' and of fewer' if self._ended else ''}: a bundle's step takes a fixed number "
                "of rows, and fewer only in the last batch of a kind alone. Train with `port-agent exec`, which "
                "supports changing kinds"
            )
        self._ended = len(rows[0]) < self._batch_size
        for column, own in zip(self._columns, rows, strict=True):
            column.append(own)

    def joined(self, structure: pytree.TreeSpec) -> JoinedBatches:
        def rebuilt(*rows: torch.Tensor) -> Any:
            whole = list(self.leaves)
            for place, row in zip(self._places, rows, strict=True):
                whole[place] = row
            return pytree.tree_unflatten(whole, structure)

        return JoinedBatches(self._columns, self._batch_size, rebuilt)


def as_columns(batches: Iterable[Any], folder: Path | None = None) -> tuple[JoinedBatches, ...]:
    """Go once over batches (tensors or arrays, in tuples, lists and mappings, nested) and join
    them in files in a `folder`.

    Batches whose rows have other shapes, or whose leaves without a row per sample (numbers, strings, tensors of another
    length) have other values, are of another kind; the kind with the most numbers comes first. Raises JobError where
    the steps of a bundle cannot take all batches or the disk does not, and ScriptError where iterating raises.
    """
    kinds: dict[_Shapes, list[_BatchJoiner]] = {}
    places, structure, numbers = list[int](), None, list[_Numbers]()
    for number, (leaves, own_structure) in enumerate(_iterated(batches), 1):
        if structure is None:
            places, structure = _places(leaves), own_structure
        elif own_structure != structure:
            raise JobError(
                f"batch {number} has a different structure from the first ({own_structure} instead of {structure}); a "
                "bundle's steps take a single structure. Train with `port-agent exec`, which supports changing "
                "structures"
            )
        for i in places:
            leaves[i] = _as_rows(number, i, leaves[i])
        numbers = numbers or [_numbers(leaves[i]) for i in places]
        _check_rows(number, leaves, places, numbers)
        alike = kinds.setdefault(tuple(tuple(leaves[i].shape[1:]) for i in places), [])
        kind = next((kind for kind in alike if kind.differing(leaves) is None), None)
        if kind is None:
            kind = _BatchJoiner(number, leaves, places, folder)
            alike.append(kind)
            if sum(map(len, kinds.values())) > MAX_BUCKETS:
                raise _too_many(number, leaves, alike)
        kind.add(number, leaves)
    if structure is None:
        raise JobError("there is no batch; give an iterable that yields at least one")
    found = [kind.joined(structure) for alike in kinds.values() for kind in alike]
    return tuple(sorted(found, key=_elements, reverse=True))


def _too_many(number: int, leaves: Sequence[Any], alike: Sequence[_BatchJoiner]) -> JobError:
    """Return the error for too many kinds of batches; `alike`: earlier kinds whose rows have the same shapes."""
    before = alike[-2] if len(alike) > 1 else None
    i = None if before is None else before.differing(leaves)
    if before is None or i is None:
        return JobError(
            f"the batches have more than {MAX_BUCKETS} shapes, and each needs its own step: pad them to that many (in "
            "the collate_fn, to multiples of a length), or train with `port-agent exec`, which supports changing shapes"
        )
    return JobError(
        f"leaf {i} of batch {number} is {_shown(leaves[i])}, and {_shown(before.leaves[i])} in batch "
        f"{before.number}: it has no row for each sample, so each of its values needs its own step, and there are "
        f"more than {MAX_BUCKETS}. Train with `port-agent exec`, which supports changing values"
    )


def _iterated(batches: Iterable[Any]) -> Iterator[tuple[list[Any], pytree.TreeSpec]]:
    """Yield the leaves of each batch and its structure; all kinds of mappings become dictionaries."""
    with own_code("iterating over the batches"):
        for batch in batches:
            yield pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def _places(leaves: Sequence[Any]) -> list[int]:
    """Return the indices of the leaves with one row per sample: as many as the first tensor of the batch has."""
    size = next((len(leaf) for leaf in leaves if _has_rows(leaf)), 0)
    if not size:
        raise JobError(
            "the first batch holds no tensor with a row per sample; a batch is tensors in tuples, lists or mappings"
        )
    return [i for i, leaf in enumerate(leaves) if _has_rows(leaf) and len(leaf) == size]


def _elements(joined: JoinedBatches) -> int:
    return sum(column.shape.numel() for column in joined.columns)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _as_rows(number: int, place: int, leaf: Any) -> Any:
    """Return an array as a tensor, and anything else unchanged."""
    try:
        return torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
    except TypeError as error:
        raise JobError(
            f"leaf {place} of batch {number} is an array of {leaf.dtype}; give an array of numbers"
        ) from error


def _numbers(leaf: torch.Tensor) -> _Numbers:
    return leaf.dtype, leaf.ndim


def _check_rows(number: int, leaves: Sequence[Any], places: Sequence[int], numbers: Sequence[_Numbers]) -> None:
    """Raise JobError unless each leaf has the same kind of rows as in the first batch, and all leaves
    have the same number of rows.
    """
    rows = {len(leaves[i]) if _has_rows(leaves[i]) else None for i in places}
    for i, wanted in zip(places, numbers, strict=True):
        leaf = leaves[i]
        if not _has_rows(leaf) or _numbers(leaf) != wanted or len(rows) > 1:
            dtype, dimensions = wanted
            raise JobError(
                f"leaf {i} of batch {number} is {_shown(leaf)}, and {str(dtype).removeprefix('torch.')} with "
                f"{dimensions} dimensions in the first batch: every sample needs a row of that kind in each of these "
                "leaves. Train with `port-agent exec`, which supports changing kinds"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray) and isinstance(other, type(one)):
        return one.dtype == other.dtype and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(type(one) is type(other) and one == other)


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return f"{leaf!r:.40}"

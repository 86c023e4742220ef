"""Batches of any structure as columns with a row per sample, which is how a bundle keeps its data, and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from planner.job import JobError, own_code


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """All batches of an epoch, joined.

    `columns`: one tensor per leaf that has a row for each sample, rows in the order of the batches. `batch_size`: rows of
    every batch but the last, which may have fewer. `rebuilt`: returns the batch, in its own structure, of some rows of the
    columns.
    """

    columns: tuple[torch.Tensor, ...]
    batch_size: int
    rebuilt: Callable[..., Any]


def as_columns(batches: Iterable[Any]) -> BatchColumns:
    """Go once over batches (tensors or arrays, in tuples, lists and mappings, nested) and join them.

    Leaves without a row per sample (numbers, strings, tensors of another length) have to be the same in every batch and
    belong to the step. Raises JobError where a bundle's one step cannot take all batches, and ScriptError where iterating
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
    for number, (others, other_structure) in enumerate(flat, 1):
        if other_structure != structure:
            raise JobError(
                f"batch {number} has another structure than the first ({other_structure} instead of {structure}); "
                "a bundle's step takes one. Train with `port-agent exec`, which follows what changes"
            )
        _check_alike(number, leaves, others, places, last=number == len(flat))
    columns = tuple(torch.cat([torch.as_tensor(leaves[i]) for leaves, _ in flat]) for i in places)

    def rebuilt(*rows: torch.Tensor) -> Any:
        whole = list(leaves)
        for place, row in zip(places, rows, strict=True):
            whole[place] = row
        return pytree.tree_unflatten(whole, structure)

    return BatchColumns(columns, size, rebuilt)


def _flattened(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a batch and its structure; mappings of other kinds become dictionaries."""
    return pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _check_alike(
    number: int, first: Sequence[Any], leaves: Sequence[Any], places: Sequence[int], *, last: bool
) -> None:
    """Raise JobError unless a batch differs from the first in nothing but its rows' contents, and the last in their number."""
    rows = {len(leaves[i]) for i in places if _has_rows(leaves[i])}
    for i, (leaf, model) in enumerate(zip(leaves, first, strict=True)):
        if i not in places:
            if not _same(leaf, model):
                raise JobError(
                    f"leaf {i} of batch {number} is {_shown(leaf)}, and {_shown(model)} in the first batch: it has no row for "
                    "each sample, so it belongs to the step and must stay the same. Train with `port-agent exec`, which "
                    "follows what changes"
                )
            continue
        alike = _has_rows(leaf) and leaf.shape[1:] == model.shape[1:] and leaf.dtype == model.dtype and len(rows) == 1
        if not alike or (len(leaf) != len(model) and not (last and len(leaf) < len(model))):
            raise JobError(
                f"leaf {i} of batch {number} is {_shown(leaf)}, and {_shown(model)} in the first batch: a bundle's step takes "
                "one shape, and fewer rows in the last batch alone. Pad to one length, or train with `port-agent exec`, which "
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

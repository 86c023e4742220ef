"""Whether a bundle can repeat a program's data: each sample is stored once, as first read, and
batches are made of any samples.
"""

import hashlib
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from port_planner.base.errors import of_the_program, place_of_function
from port_planner.batches import JoinedBatches, as_columns
from port_planner.column_file import ColumnFile
from port_planner.job import JobError, own_code

_EXEC = "or train with `port-agent exec`, which runs the program itself"
_READ_AGAIN, _READ_AGAIN_S = 256, 1.0
"""Samples of a data set that are read twice, and seconds after which this stops."""
_DIGEST_BYTES = 16


def check_repeatable(batches: Iterable[Any]) -> None:
    """Raise JobError if samples differ when they are read again, or depend on the others of their batch.

    Some samples of a DataLoader's data set are read; of other batches that can be read again, all are
    if the first batch differs.
    """
    if not isinstance(batches, DataLoader) or isinstance(batches.dataset, IterableDataset):
        _check_read_again(batches)
        return
    collate, data_set, size = batches.collate_fn, batches.dataset, _batch_size(batches)

    def read(indices: Iterable[int]) -> JoinedBatches:
        (batch,) = as_columns([collate([data_set[i] for i in indices])])
        return batch

    with own_code("reading samples of the data"):
        before = _generators()
        differ = any(not _equal(read(part), read(part)) for part in _chosen(data_set, size))
        draws = _generators() != before  # by what is rare, these samples may still be the same
    if draws or differ:
        raise JobError(
            f"{_reader_of(data_set)}the data changes each time it is read (random masks or augmentation), but a bundle "
            f"would always repeat the first version: move the random part into the model, using torch's operators, {_EXEC}"
        )
    with own_code("reading samples of the data"):
        together = _depend_on_their_batch(read, data_set, size)
    if together:
        raise JobError(
            f"the collate_fn ({place_of_function(collate)}) makes a sample's row from its place in the batch or from other samples (such as torch.arange(len(batch))), but a "
            f"bundle makes batches of any rows: do that in the loss, using torch's operators, {_EXEC}"
        )


def _reader_of(data_set: Any) -> str:
    """Return the start of a message: where the program reads a sample, in the innermost of data sets within each other; "" if in a library."""
    inner = getattr(data_set, "dataset", None)
    found = "" if inner is None else _reader_of(inner)
    code = getattr(getattr(type(data_set), "__getitem__", None), "__code__", None)
    if found or code is None or not of_the_program(code.co_filename):
        return found
    return f"{place_of_function(type(data_set).__getitem__)}: "


def _batch_size(loader: DataLoader[Any]) -> int:
    """Return the number of samples in a DataLoader's first batch."""
    if loader.batch_size is not None or loader.batch_sampler is None:
        return loader.batch_size or 1
    return len(next(iter(loader.batch_sampler), [0]))


def _chosen(data_set: Any, size: int) -> Iterator[Sequence[int]]:
    """Yield batches of the data set: the first one, then samples from all over it while there is time."""
    samples = len(data_set) if hasattr(data_set, "__len__") else size
    yield range(min(size, samples))
    began, all_over = time.perf_counter(), range(0, samples, max(1, samples // _READ_AGAIN))
    for i in range(0, len(all_over) if samples > size else 0, size):
        if time.perf_counter() - began > _READ_AGAIN_S:
            return
        yield all_over[i : i + size]


def _equal(one: JoinedBatches, other: JoinedBatches) -> bool:
    return all(torch.equal(a[:], b[:]) for a, b in zip(one.columns, other.columns, strict=True))


def _depend_on_their_batch(read: Callable[[Sequence[int]], JoinedBatches], data_set: Any, size: int) -> bool:
    """Return whether rows of a batch differ if half of its samples do.

    Their order may differ; padded rows are not compared.
    """
    if not hasattr(data_set, "__len__") or len(data_set) < 2 * size or size == 1:
        return False
    kept, new = size // 2, size - size // 2
    batches = [read(i) for i in (range(size), range(size, 2 * size), [*range(size, size + new), *range(kept)])]
    alike = [c for c in zip(*(batch.columns for batch in batches), strict=True) if len({x.shape for x in c}) == 1]
    moved = [(a, b, m) for a, b, m in alike if not torch.equal(torch.cat([b[:new], a[:kept]]), m[:])]
    if any(torch.equal(a[:], b[:]) and torch.equal(a[:], m[:]) for a, b, m in moved):
        return True
    if not moved:
        return False
    one, other, mixed = (Counter(_rows([columns[i] for columns in alike])) for i in range(3))
    return bool(mixed - (one + other))


def _check_read_again(batches: Iterable[Any]) -> None:
    """Raise JobError if batches of any kind have other samples when they are read again."""
    if iter(batches) is batches:
        return
    with own_code("reading the first batch of the data"):
        first, again = (as_columns(islice(iter(batches), 1)) for _ in range(2))
        if len(first) == len(again) and all(map(_equal, first, again)):
            return
        passes = [Counter(chain.from_iterable(_rows(kind.columns) for kind in as_columns(batches))) for _ in range(2)]
    if passes[0] != passes[1]:
        raise JobError(
            "the batches hold other samples each time they are read (random masks, augmentation, or samples left out), but a bundle would "
            f"always repeat the first ones: move the random part into the model, using torch's operators, {_EXEC}"
        )


def _rows(columns: Sequence[ColumnFile]) -> Iterator[bytes]:
    """Yield a digest of each sample."""
    for i in range(len(columns[0]) if columns else 0):
        parts = (column[i : i + 1].contiguous().reshape(-1).view(torch.uint8).numpy() for column in columns)
        yield hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=_DIGEST_BYTES).digest()


def _generators() -> bytes:
    """Return the states of the global generators."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().numpy().tobytes()))


def each_sample_once(batches: Iterable[Any]) -> tuple[Iterable[Any], bool]:
    """Return batches that contain every sample of an epoch, and whether epochs omit the last, short one.

    Raises JobError if a DataLoader's sampler selects different samples in each epoch, or repeats some.
    """
    if not isinstance(batches, DataLoader) or isinstance(batches.dataset, IterableDataset):
        return batches, False
    of_batches = batches.batch_sampler
    usual = of_batches if isinstance(of_batches, BatchSampler) and type(of_batches) is BatchSampler else None
    sampler: Any = usual.sampler if usual is not None else batches.sampler if of_batches is None else of_batches
    if not isinstance(sampler, SequentialSampler):
        with own_code("the sampler of the data"):
            one, other = (Counter(_indices(sampler)) for _ in range(2))
        if one != other or any(count > 1 for count in one.values()):
            raise JobError(
                f"{type(sampler).__name__} selects different samples in each epoch or repeats some, but a bundle "
                f"uses each sample once per epoch: weight them in the loss, repeat them in the data, {_EXEC}"
            )
    if usual is None or not usual.drop_last:
        return batches, False
    return DataLoader(batches.dataset, usual.batch_size, sampler=sampler, collate_fn=batches.collate_fn), True


def _indices(sampler: Iterable[Any]) -> Iterator[Any]:
    """Yield the indices of a sampler, or of a batch sampler."""
    for one in sampler:
        yield from one if isinstance(one, list | tuple) else (one,)

"""Data that a bundle would repeat otherwise than the program reads it is refused; what only
comes in another order is not.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from port_planner.job import JobError
from port_planner.repeatable_data import check_repeatable

SAMPLES, BATCH = 70, 14
ROWS, CLASSES = torch.arange(4.0 * SAMPLES).reshape(SAMPLES, 4), torch.arange(SAMPLES) % 2
LENGTHS = [4 + i % 5 for i in range(SAMPLES)]


class SeldomOther(Dataset[torch.Tensor]):
    """Changes a sample of thirty, by a generator of its own."""

    def __init__(self) -> None:
        self._own = random.Random(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        return -ROWS[i] if self._own.random() < 1 / 30 else ROWS[i]


class Streamed(IterableDataset[torch.Tensor]):
    """Samples in a new order each time, changed or not."""

    def __init__(self, changed: bool) -> None:
        self._changed = changed

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in torch.randperm(SAMPLES).tolist():
            yield ROWS[i] * random.random() if self._changed else ROWS[i]


class Batches:
    """Batches by hand, in a new order each time; the last, short one may be left out."""

    def __init__(self, size: int, *, drops: bool) -> None:
        self._size, self._drops = size, drops

    def __iter__(self) -> Iterator[torch.Tensor]:
        for chosen in torch.randperm(SAMPLES).split(self._size):
            if len(chosen) == self._size or not self._drops:
                yield ROWS[chosen]


class InOrder(Sampler[list[int]]):
    """Batches of neighbours."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([*range(i, i + BATCH)] for i in range(0, SAMPLES, BATCH))


def padded(lengths: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [torch.full((length,), float(length)) for length in lengths]
    return pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts])


def loader(data: Any, collate: Callable[[Any], Any] = default_collate, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, collate_fn=collate, **({"batch_size": BATCH} | settings))


PAIRS = TensorDataset(ROWS, CLASSES)


@pytest.mark.parametrize(
    "batches",
    [
        loader(PAIRS),
        loader(PAIRS, batch_size=1),
        loader(PAIRS, batch_size=2 * SAMPLES),
        DataLoader(PAIRS, batch_sampler=InOrder()),
        loader(PAIRS, lambda pairs: default_collate(sorted(pairs, key=lambda pair: float(pair[0][0] % 7)))),
        loader(LENGTHS, padded),
        loader(LENGTHS, lambda lengths: padded(sorted(lengths))),
        loader(Streamed(changed=False)),
        Batches(BATCH, drops=False),
        [ROWS[:BATCH], ROWS[BATCH:]],
        iter(Batches(16, drops=True)),
    ],
    ids=["pairs", "one", "all", "sampler", "sorted", "padded", "sorted and padded", "streamed", "by hand", "list", "once"],
)  # fmt: skip
def test_samples_in_any_order_are_the_same_data(batches: Iterable[Any]) -> None:
    check_repeatable(batches)


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (loader(SeldomOther()), r"test_repeatable_data\.py:\d+: the data changes each time it is read"),
        (loader(PAIRS, lambda pairs: (default_collate(pairs)[0], torch.arange(len(pairs)))), r"collate_fn \(test_repeatable_data\.py:\d+\) makes .*its place in the batch"),
        (DataLoader(PAIRS, batch_sampler=InOrder(), collate_fn=lambda pairs: torch.arange(len(pairs))), "its place in the batch"),
        (loader(PAIRS, lambda pairs: (rows := default_collate(pairs)[0]) - rows.mean(0)), "other samples"),
        (loader(LENGTHS, lambda lengths: (padded(lengths)[0], torch.arange(len(lengths)))), "its place in the batch"),
        (loader(Streamed(changed=True)), "other samples each time"),
        (Batches(16, drops=True), "samples left out"),
    ],
    ids=["seldom", "places", "places of a sampler", "mean", "padded places", "streamed", "left out"],
)  # fmt: skip
def test_what_is_other_data_in_other_batches_or_later_is_refused(batches: Iterable[Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        check_repeatable(batches)

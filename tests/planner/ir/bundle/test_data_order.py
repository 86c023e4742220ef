"""The order of a job's data: every sample once an epoch, the same again, from any batch on."""

import itertools

import pytest
import torch

from port_planner.ir.bundle.data_order import batch_rows, epoch_order


def test_an_epoch_holds_every_sample_once_and_epochs_differ() -> None:
    orders = [epoch_order(7, epoch, 50) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert not torch.equal(orders[0], orders[1]) and torch.equal(orders[0], epoch_order(7, 0, 50))


def test_the_default_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(7, 0, 50)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_resumed_job_goes_on_where_it_was(drop_last: bool) -> None:
    def batches(start: int, count: int) -> list[tuple[int, list[int]]]:
        rows = batch_rows(3, 10, 4, drop_last=drop_last, start=start)
        return [(epoch, indices.tolist()) for epoch, indices in itertools.islice(rows, count)]

    whole = batches(0, 12)
    assert [batches(start, 1)[0] for start in range(12)] == whole
    per_epoch = 2 if drop_last else 3
    assert [epoch for epoch, _ in whole] == [i // per_epoch for i in range(12)]
    assert {len(rows) for _, rows in whole} == ({4} if drop_last else {4, 2})

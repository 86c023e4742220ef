"""Batches in the order of the job's data, each alone or all of an update; what no plan was made for is left out."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from port_agent.training.batching import Batching, BatchRows
from port_agent.training.samples.columns import DataError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.data_order import batch_rows
from tests.agent.jobs_small import BATCH, ROWS, make_job, small_bundle, write_job

SHORT = ROWS % BATCH
PER_EPOCH = -(-ROWS // BATCH)
SEED = 3
"""Of the small job."""


def rows_of(runs: Sequence[Sequence[BatchRows]]) -> list[list[int]]:
    return [rows.tolist() for together in runs for _, _, rows in together]


def lengths(batching: Batching, *places: int) -> list[int]:
    return [len(together) for together in batching.runs(*places)]


def test_batches_come_in_the_order_of_the_data_from_any_step() -> None:
    batching = Batching(Bundle(small_bundle()), [ROWS], compared=0)
    assert batching.per_epoch == PER_EPOCH
    runs = list(batching.runs(0, 2 * PER_EPOCH))
    expected = [
        rows.tolist()
        for _, (_, rows) in zip(range(2 * PER_EPOCH), batch_rows(SEED, ROWS, BATCH, drop_last=False), strict=False)
    ]
    assert all(len(together) == 1 for together in runs) and rows_of(runs) == expected
    assert rows_of(list(batching.runs(4, 2 * PER_EPOCH))) == expected[4:]
    assert rows_of(list(batching.runs(1, PER_EPOCH, before=3))) == expected[4 : 3 + PER_EPOCH]


def test_a_short_batch_that_no_plan_was_made_for_is_left_out() -> None:
    one_more = Batching(Bundle(small_bundle()), [ROWS + 1], compared=0)
    assert SHORT + 1 < BATCH and one_more.per_epoch == PER_EPOCH - 1
    assert {rows.numel() for together in one_more.runs(0, 10) for _, _, rows in together} == {BATCH}


def test_too_few_samples_are_refused_with_their_number() -> None:
    with pytest.raises(DataError, match=f"1 samples are too few for a batch of {BATCH}; wait for more"):
        next(Batching(Bundle(small_bundle()), [1], compared=0).runs(0, 1))


@pytest.mark.slow
def test_an_update_runs_as_one_but_for_short_batches_and_where_the_comparison_ends_within(tmp_path: Path) -> None:
    write_job(tmp_path / "job.port", make_job(accumulate=2), remake=False, seeds=(0,))
    bundle = Bundle(tmp_path / "job.port")
    assert lengths(Batching(bundle, [ROWS], compared=0), 0, 8) == [2, 2, 1, 1, 2], "the sixth batch is short"
    assert lengths(Batching(bundle, [ROWS], compared=0), 1, 5) == [1, 2, 1], (
        "goes on within an update, and ends within one"
    )
    assert lengths(Batching(bundle, [ROWS], compared=2), 0, 4) == [2, 2]
    assert lengths(Batching(bundle, [ROWS], compared=3), 0, 4) == [2, 1, 1]

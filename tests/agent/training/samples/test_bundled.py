"""Rows of a bundle's data, read from the file when a batch needs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from port_agent.training.samples.bundled import Samples
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BundleError
from port_planner.job import TrainingJob
from tests.agent.jobs_small import ROWS, make_job, small_bundle, write_job


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle(small_bundle())


@pytest.fixture
def samples(bundle: Bundle) -> Iterator[Samples]:
    made = Samples(bundle, ["train"])
    yield made
    made.close()


def test_rows_come_in_the_order_that_was_asked_for_and_as_often(samples: Samples) -> None:
    x, y = make_job().data
    assert samples.counts == (ROWS,)
    for rows in ([ROWS - 1, 0, 3], [5, 5], []):
        got_x, got_y = samples.batch(rows)
        assert got_x.dtype == x.dtype and torch.equal(got_x, x[rows])
        assert got_y.dtype == y.dtype and torch.equal(got_y, y[rows])


def test_the_data_for_evaluation_stands_apart(bundle: Bundle) -> None:
    held_out = Samples(bundle, ["eval"])
    assert held_out.counts == (6,)
    assert torch.equal(held_out.batch(range(6))[0], make_job().eval_data[0])
    held_out.close()
    nothing = Samples(bundle, ["nothing"])
    assert nothing.counts == (0,) and nothing.batch([]) == []
    nothing.close()


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_does_not_exist_is_refused(samples: Samples, row: int) -> None:
    with pytest.raises(BundleError, match=f"row {row} of train/0 does not exist, the data has {ROWS}"):
        samples.batch([0, row])


def test_ten_columns_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Column 10 is not the one behind column 1."""
    model = torch.nn.Linear(1, 1)

    def loss_fn(model: torch.nn.Module, *columns: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(torch.stack(columns).sum(0)).sum()
        return loss

    data = [torch.full((4, 1), float(i)) for i in range(11)]
    job = TrainingJob(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), data, 4)
    write_job(tmp_path / "wide.port", job, seeds=(0,))
    samples = Samples(Bundle(tmp_path / "wide.port"), ["train"])
    assert [column.item() for column in samples.batch([2])] == list(range(11))
    samples.close()


def test_a_file_that_was_cut_off_is_refused_and_not_padded(tmp_path: Path) -> None:
    write_job(tmp_path / "cut.port", make_job())
    cut = Bundle(tmp_path / "cut.port")
    samples = Samples(cut, ["train"])
    column = cut.data["train/0"]
    with cut.path.open("r+b") as file:
        file.truncate(column.offset + column.nbytes - 1)
    with pytest.raises(BundleError, match="ends in the middle of a tensor; copy it again or recreate it"):
        samples.batch([ROWS - 1])
    samples.close()

"""Operators run on made-up data; the medium under a directory is measured, priced, and nothing left behind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_planner.capture.step import capture_step
from port_planner.profiling.operator_profile import FlashError, measure_flash, medium_joules, profile_operators
from tests.planner.steps import tiny_step


def test_a_fast_medium_takes_no_less_than_a_drive_and_a_slow_one_its_watts() -> None:
    assert medium_joules(25e6) == pytest.approx(6e-9)
    assert medium_joules(3e9) == 2e-9


@pytest.mark.slow
def test_a_transfer_also_takes_the_time_of_the_cpu(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    idle, busy = (
        measure_flash(tmp_path, compute_watts=watts, progress=lambda *at: seen.append(at)) for watts in (0.0, 4.0)
    )
    assert idle.read_joules_per_byte == medium_joules(idle.read_bytes_per_s)
    assert busy.read_joules_per_byte > medium_joules(busy.read_bytes_per_s)
    assert busy.write_joules_per_byte > medium_joules(busy.write_bytes_per_s)
    assert 0 < busy.latency_s < 1
    assert seen[-1] == (128, 128)
    assert not list(tmp_path.iterdir())


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/.port-flash-test").symlink_to("../victim")
    measure_flash(tmp_path / "pages", compute_watts=0.0)
    assert (tmp_path / "victim").read_bytes() == b"kept"


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FlashError, match=r"file could not be measured.*--page-dir"):
        measure_flash(tmp_path / "file", compute_watts=4.0)


@pytest.mark.slow
def test_a_mask_chooses_as_many_rows_as_it_did() -> None:
    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.sounds = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
            words = self.words(ids)
            words[ids == 8] = self.sounds(sound).flatten(0, 1)
            return words.square().sum() + words[ids < 8].sum()

    model = Scattered()
    batch = torch.tensor([[1, 8, 8], [8, 8, 2]]), torch.randn(2, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, *columns: m(*columns), optimizer, batch).graphs["step"]
    names = {op.name for op in graph.ops}
    assert names >= {"aten::index.Tensor", "aten::index_put_"}, names
    (costs,) = profile_operators([graph], compute_watts=4.0).ops
    assert all(cost.seconds > 0 for cost, op in zip(costs, graph.ops, strict=True) if op.name in names)


@pytest.mark.slow
def test_of_a_step_of_another_device_what_does_not_run_here_or_lies_otherwise_is_absent() -> None:
    graph = tiny_step().graphs["step"]
    lacking = next(i for i, op in enumerate(graph.ops) if op.name == "aten::native_batch_norm")
    apart = next(i for i, op in enumerate(graph.ops) if op.name == "aten::addmm")
    ops = tuple(replace(op, name="aten::cudnn_batch_norm") if i == lacking else op for i, op in enumerate(graph.ops))
    (made,) = ops[apart].outputs
    values = list(graph.values)
    values[made or 0] = replace(values[made or 0], stride=(1, 4))
    there = replace(graph, ops=ops, values=tuple(values))
    found = profile_operators([there], compute_watts=4.0, elsewhere=True)
    assert {lacking, apart} <= set(found.absent[0]) and 0 not in found.absent[0]
    assert all(found.ops[0][i].seconds == 0.0 for i in found.absent[0])
    assert profile_operators([graph], compute_watts=4.0, elsewhere=True).absent == ((),)

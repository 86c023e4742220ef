"""What users import: starting, stopping, reporting, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent import budget
from port_agent.intercept.budget import leaving_headroom, strict_budget
from port_agent.intercept.residency import backing
from port_agent.intercept.residency.memory import BudgetTooSmallError
from port_agent.intercept.residency.refusals import UnsupportedError
from port_agent.intercept.residency.residency import NotRestorableError
from port_agent.intercept.residency.storages import resize
from port_planner.base.units import SizeError


def step(model: torch.nn.Module) -> float:
    loss = model(torch.ones(8, 256)).square().mean()
    loss.backward()
    return loss.item()


def test_started_and_stopped_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    expected = step(model)
    model.zero_grad()
    b = budget(tensors="300K", page_dir=tmp_path)
    assert b.start() is b
    assert step(model) == expected
    running = b.report
    stopped = b.stop()
    assert stopped.operators == running.operators > 0 and stopped.segments == 1
    assert stopped.read_bytes > 0 and stopped.written_bytes > 0
    assert step(model) == expected, "everything is back, and nothing is followed"
    assert b.report == stopped or b.report.operators == stopped.operators


def test_what_torch_refused_to_make_counts_as_nothing(tmp_path: Path) -> None:
    with budget(tensors="1M", page_dir=tmp_path).resizing() as b:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(1 << 50)
        assert b.report.over_bytes == 0
        torch.ones(1 << 20)
        assert b.report.over_bytes == 3 << 20


def test_used_wrongly_it_says_so(tmp_path: Path) -> None:
    b = budget(tensors="1G", page_dir=tmp_path)
    for wrong in (b.stop, lambda: b.report):
        with pytest.raises(UnsupportedError, match="not started"):
            wrong()
    with b:
        with pytest.raises(UnsupportedError, match=r"call stop\(\) first"):
            b.start()
        with pytest.raises(UnsupportedError, match="one at a time"):
            budget(tensors="1G", page_dir=tmp_path).start()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({}, "give either"),
        ({"ram": "1G", "tensors": "1M"}, "give either"),
        ({"ram": "abc"}, "write it like 300M"),
        ({"ram": -1}, "negative"),
        ({"ram": 1.5}, "is a float; give a string or a whole number"),
        ({"ram": True}, "is a bool"),
        ({"ram": [1]}, "is a list"),
        ({"tensors": 0}, 'at least tensors="4K"'),
        ({"tensors": "1M", "read_bytes_per_s": 0}, "read_bytes_per_s is 0; give bytes per second above 0"),
        ({"tensors": "1M", "read_bytes_per_s": float("nan")}, "is nan"),
        ({"tensors": "1M", "write_bytes_per_s": float("inf")}, "is inf"),
        ({"tensors": "1M", "write_bytes_per_s": "20M"}, "is '20M'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_followed(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(SizeError, match=remedy):
        budget(**arguments)


def test_what_does_not_fit_into_memory_stays_away_and_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [torch.full((256, 256), float(k)) for k in range(8)]
    b = budget(tensors="300K", page_dir=tmp_path)
    with monkeypatch.context() as short, pytest.raises(NotRestorableError, match="the budget stays in force"), b:
        values = [one.mean().item() for one in kept]
        short.setattr(backing, "available_bytes", lambda: 256 << 10)
    assert [one.mean().item() for one in kept] == values == list(range(8))
    assert b.report.peak_tensor_bytes < sum(one.nbytes for one in kept), "it is followed still"
    b.stop()
    assert [one.mean().item() for one in kept] == values


def test_where_the_allocator_refuses_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [torch.full((256, 256), float(k)) for k in range(8)]
    b = budget(tensors="300K", page_dir=tmp_path).resizing().start()
    assert [one.mean().item() for one in kept] == list(range(8))
    left = iter(range(3))

    def scarce(memory: torch.UntypedStorage, nbytes: int) -> object:
        if nbytes and next(left, None) is None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return resize(memory, nbytes)

    with monkeypatch.context() as short:
        short.setattr(backing, "resize", scarce)
        with pytest.raises(NotRestorableError, match="can't allocate memory"):
            b.stop()
    assert [one.mean().item() for one in kept] == list(range(8))
    b.stop()
    assert [one.mean().item() for one in kept] == list(range(8))


def test_at_the_end_of_a_process_everything_goes_that_nobody_else_reads(tmp_path: Path) -> None:
    followed = budget(tensors="1M", page_dir=tmp_path).resizing().start()
    mine, shared = torch.ones(100_000) + 1, torch.ones(100_000) + 1
    array = shared.numpy()
    assert mine.sum() == 200_000
    followed.stop(restore=False)
    assert mine.untyped_storage().nbytes() == 0
    assert array.sum() == 200_000


@pytest.mark.slow
def test_a_strict_budget_refuses_what_would_exceed_it(tmp_path: Path, held_bytes: int) -> None:
    with budget(ram=held_bytes + (400 << 20), page_dir=tmp_path).resizing() as bound:
        small = torch.ones(1 << 20)
        assert strict_budget() is not None
        with pytest.raises(BudgetTooSmallError, match=r"needs 4\.0 GiB at once .* more than the budget of .*; give "):
            torch.ones(1 << 30)
        with pytest.raises(BudgetTooSmallError, match=r"needs 2\.0 GiB at once"):  # less than what was refused before
            torch.ones(1 << 29)
        assert small.sum() == 1 << 20
    assert bound.report.peak_tensor_bytes < 1 << 30
    assert strict_budget() is None


@pytest.mark.slow
def test_tensors_leave_for_another_process(tmp_path: Path, held_bytes: int) -> None:
    with budget(ram=held_bytes + (400 << 20), page_dir=tmp_path) as bound:
        kept = [torch.full((4 << 20,), float(number)) for number in range(8)]
        read_bytes, written_bytes = bound.report.read_bytes, bound.report.written_bytes
        with leaving_headroom(1 << 40):
            assert bound.report.written_bytes >= written_bytes + (64 << 20)
        assert [one.mean().item() for one in kept] == list(range(8))
        assert bound.report.read_bytes >= read_bytes + (64 << 20)
    with budget(tensors="1G", page_dir=tmp_path) as bound, leaving_headroom(1 << 40):
        assert torch.ones(1 << 20).sum() == 1 << 20 and bound.report.written_bytes == 0
    with leaving_headroom(1 << 40):
        assert kept[3].mean().item() == 3


@pytest.mark.slow
def test_a_product_is_not_refused_for_a_copy_of_its_operands(tmp_path: Path, held_bytes: int) -> None:
    weight = torch.ones(1 << 16, 1 << 10)
    with budget(ram=held_bytes + weight.nbytes + (150 << 20), page_dir=tmp_path):
        assert strict_budget() is not None
        assert (torch.ones(4, 1 << 10) @ weight.T)[0, 0] == 1 << 10


def test_a_budget_for_tensors_alone_is_not_made_strict(tmp_path: Path) -> None:
    with budget(tensors="1M", page_dir=tmp_path):
        assert strict_budget() is None


def test_what_dies_while_everything_comes_back_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As garbage does that is collected meanwhile."""
    with budget(tensors="4K", page_dir=tmp_path) as held:
        garbage = [torch.ones(6000), torch.ones(6000)]
        torch.ones(6000).mul_(2.0)  # which sends them away
        residency = held.interceptor.residency
        start = residency._start
        monkeypatch.setattr(residency, "_start", lambda storage: (garbage.clear(), start(storage)))

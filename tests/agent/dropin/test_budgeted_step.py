"""The drop-in: the user's own model, optimizer and loop, within a budget, with plain PyTorch's numbers."""

import copy
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from agent import budgeted_step
from agent.train.executor import Executor
from agent.train.pager import PageError, Pager
from agent.train.step_values import GraphChangedError
from planner.ir.errors import CaptureError, PortError
from planner.make_bundle import InfeasibleError
from tests.agent.exactness import bits
from tests.agent.jobs_small import BATCH, Odd, make_job, next_token, small_bundle, state_on_flash, write_job

ROOT = Path(__file__).resolve().parents[3]
PLENTY = 1 << 40


def scenario(name: str, page_dir: Path) -> dict[str, Any]:
    page_dir.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.agent.dropin.scenario_program", name, str(page_dir)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_whole_loop_under_a_tight_budget(tmp_path: Path) -> None:
    found = scenario("train", tmp_path / "pages")
    assert found["read_bytes"] > 0, "the budget was meant to force paging"
    assert found["peak"] <= found["ram"], "resident memory stays below ram"
    assert found["left"] == []
    wrong = [k for k in ("losses", "weights", "state", "saved", "identity", "evaluated", "usable") if not found[k]]
    assert not wrong


def test_an_exception_in_the_block_loses_nothing(tmp_path: Path) -> None:
    found = scenario("fail", tmp_path / "pages")
    assert found == {"caught": True, "left": [], "same": True}


def test_budgets_that_cannot_be_kept(tmp_path: Path) -> None:
    found = scenario("infeasible", tmp_path / "pages")
    assert [e[0] for e in found["errors"]] == ["InfeasibleError", "InfeasibleError"], found
    assert all(needed and needed > 10 << 20 for _, needed, _ in found["errors"])
    assert found["left"] == [] and found["same"]


def test_a_medium_that_fills_up_on_entry(tmp_path: Path) -> None:
    found = scenario("full", tmp_path / "pages")
    assert found["errors"] == [["FlashError", True], ["PageError", True]]
    assert found["left"] == [] and found["same"]


@pytest.mark.long
def test_without_restoring_the_saved_file_is_the_result(tmp_path: Path) -> None:
    assert scenario("no_restore", tmp_path / "pages") == {"saved": True, "left": []}


# -- in this process, with plenty of memory


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = model(x)
    return functional.cross_entropy(out, y), {"hits": (out.argmax(1) == y).sum()}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)) for _ in range(count)]


def test_accumulation_clipping_and_extra_outputs(tmp_path: Path) -> None:
    model, data = net(), batches(4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    with budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path, accumulate=2, clip_grad_norm=0.5) as step:
        torch.manual_seed(1)
        for batch in data:
            loss, aux = step(*batch)
            seen.append((loss.item(), int(aux["hits"])))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    expected = []
    for i, batch in enumerate(data):
        loss, aux = classify(plain, *batch)
        loss.backward()
        expected.append((loss.item(), int(aux["hits"])))
        if i % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, foreach=False)
            reference.step()
            reference.zero_grad()
    assert seen == expected
    assert all(
        bits(a) == bits(b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    assert not list(tmp_path.iterdir())


def test_training_goes_on_in_plain_pytorch_and_back(tmp_path: Path) -> None:
    """Two steps in the block, one outside, one in a second block: the optimizer's state follows."""
    model, data = net(), batches(4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for part in (data[:2], None, data[3:]):
        if part is None:
            optimizer.zero_grad()
            classify(model, *data[2])[0].backward()
            optimizer.step()
            continue
        with budgeted_step(model, classify, optimizer, part[0], PLENTY, tmp_path) as step:
            for batch in part:
                step(*batch)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for batch in data:
        reference.zero_grad()
        classify(plain, *batch)[0].backward()
        reference.step()
    assert all(
        bits(a) == bits(b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert all(bits(optimizer.state[p][k]) == bits(v) for k, v in reference.state[q].items())


def test_a_change_of_mode_is_detected(tmp_path: Path) -> None:
    model, data = net(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path) as step:
        model.eval()
        with pytest.raises(GraphChangedError, match="evaluate"):
            step(*data[0])
        model.train()
        step(*data[0])


def test_a_bundle_as_the_plan(tmp_path: Path) -> None:
    job = make_job()
    plain = make_job()
    assert job.scheduler is not None
    with budgeted_step(
        job.model, job.loss_fn, job.optimizer, [c[:BATCH] for c in job.data], PLENTY, tmp_path, plan=small_bundle()
    ) as step:
        torch.manual_seed(1)
        seen = [step(*(c[i : i + BATCH] for c in job.data))[0].item() for i in (0, BATCH, 20)]
    torch.manual_seed(1)
    expected = []
    for i in (0, BATCH, 20):
        plain.optimizer.zero_grad()
        loss, _ = plain.loss_fn(plain.model, *(c[i : i + BATCH] for c in plain.data))
        loss.backward()
        plain.optimizer.step()
        expected.append(loss.item())
    assert seen == expected
    assert all(
        bits(a) == bits(b)
        for a, b in zip(job.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    )


def test_a_new_shape_is_recorded_from_what_the_last_step_wrote(tmp_path: Path) -> None:
    """Optimizer state that lives on flash, and a medium so slow that they are not all there when the step returns."""
    job, plain = make_job(), make_job()
    first, short = ([c[:BATCH] for c in job.data], [c[: BATCH - 1] for c in job.data])
    write_job(tmp_path / "paging.port", make_job(), seeds=(1,), plan=state_on_flash)
    with budgeted_step(
        job.model, job.loss_fn, job.optimizer, first, PLENTY, tmp_path, plan=tmp_path / "paging.port"
    ) as step:
        step.pager._limits[True] = 2e6
        torch.manual_seed(1)
        step(*first)
        assert not all(transfer.finished.is_set() for transfer in step._kept().store.under_way.values())
        step(*short)
        step.save(tmp_path / "saved.safetensors")
    torch.manual_seed(1)
    for batch in (first, short):
        plain.optimizer.zero_grad()
        plain.loss_fn(plain.model, *batch)[0].backward()
        plain.optimizer.step()
    assert [bits(t) for t in job.model.state_dict().values()] == [bits(t) for t in plain.model.state_dict().values()]


def test_a_write_that_fails_after_its_step_leaves_it_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    batch = [c[:BATCH] for c in job.data]
    plan = tmp_path / "paging.port"
    write_job(plan, make_job(), seeds=(1,), plan=state_on_flash)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with (
        pytest.raises(PageError),
        budgeted_step(job.model, job.loss_fn, job.optimizer, batch, PLENTY, tmp_path, plan=plan) as step,
    ):
        step.pager._limits[True] = 2e6
        step(*batch)
        monkeypatch.setattr(Pager, "_write_piece", full)
        with pytest.raises(PageError, match="free space") as caught:
            step.save(tmp_path / "never.safetensors")
        assert "half-way" in caught.value.__notes__[0]
        with pytest.raises(PortError, match="half-way"):
            step(*batch)
    assert list(tmp_path.iterdir()) == [plan]


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    model, data = net(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(CaptureError, match="another model"),
        budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path, plan=small_bundle()),
    ):
        pass
    job = make_job()
    with (
        pytest.raises(InfeasibleError),
        budgeted_step(
            job.model, job.loss_fn, job.optimizer, [c[:4] for c in job.data], 1000, tmp_path, plan=small_bundle()
        ),
    ):
        pass
    with (
        pytest.raises(PortError, match="not a directory"),
        budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path / "none"),
    ):
        pass
    with (
        pytest.raises(CaptureError, match="scalar"),
        budgeted_step(model, lambda m, x, y: m(x), optimizer, data[0], PLENTY, tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


# -- faults in the middle of a step


def trained(count: int, data: list[tuple[torch.Tensor, torch.Tensor]]) -> nn.Module:
    """The model after `count` plain steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for batch in data[:count]:
        optimizer.zero_grad()
        classify(model, *batch)[0].backward()
        optimizer.step()
    return model


def same_state(a: nn.Module, b: nn.Module) -> bool:
    return all(bits(x) == bits(y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_refused_batch_changes_nothing(tmp_path: Path) -> None:
    """Neither weights nor the count of updates, which Adam's bias correction depends on."""
    model, data = net(), batches(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path) as step:
        torch.manual_seed(1)
        step(*data[0])
        with pytest.raises(CaptureError):
            step(data[1][0], data[1][1].float())
        for batch in data[1:]:
            step(*batch)
    assert same_state(model, trained(3, data))


def test_ctrl_c_waits_for_the_end_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts as done: it can be saved and built upon."""
    model, data = net(), batches(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path) as step:
        torch.manual_seed(1)
        step(*data[0])
        note = Executor._note_change
        monkeypatch.setattr(Executor, "_note_change", lambda self: (signal.raise_signal(signal.SIGINT), note(self)))
        executor = next(iter(step._programs.values()))[0]["step"]
        executor._code = executor._compile()
        with pytest.raises(KeyboardInterrupt) as caught:
            step(*data[1])
        assert not hasattr(caught.value, "__notes__") and step.scalars.steps_done == 2
        after_two = torch.get_rng_state()
        assert same_state(model, trained(2, data))
        monkeypatch.undo()
        executor._code = executor._compile()
        torch.set_rng_state(after_two)
        step.save(tmp_path / "saved.safetensors")
        step(*data[2])
    assert same_state(model, trained(3, data))


def test_a_step_cut_off_in_its_updates_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = net(), batches(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with budgeted_step(model, classify, optimizer, data[0], PLENTY, tmp_path) as step:
        torch.manual_seed(1)
        step(*data[0])
        before = step.scalars.steps_done

        def broken(self: Executor) -> None:
            self.changed = True
            raise PageError("the medium reports an error", errno.EIO)

        monkeypatch.setattr(Executor, "_note_change", broken)
        executor = next(iter(step._programs.values()))[0]["step"]
        executor._code = executor._compile()
        with pytest.raises(PageError) as caught:
            step(*data[1])
        assert "half-way" in caught.value.__notes__[0]
        assert step.scalars.steps_done == before
        with pytest.raises(PortError, match="half-way"):
            step(*data[1])
        with pytest.raises(PortError, match="half-way"):
            step.save(tmp_path / "never.safetensors")
    assert not list(tmp_path.iterdir())


def test_saved_is_the_whole_state_under_its_own_names(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    torch.manual_seed(0)
    model, fresh = Odd(), Odd()
    batch = torch.arange(8), torch.arange(8) + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = tmp_path / "saved.safetensors"
    with budgeted_step(model, next_token, optimizer, batch, PLENTY, tmp_path) as step:
        step(*batch)
        step.save(saved)
    assert load_model(fresh, saved, strict=True) == (set(), [])
    assert same_state(fresh, model)

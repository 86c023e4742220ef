"""What a followed program may not do, and threads that it starts."""

import io
import threading
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError
from tests.agent.intercept.programs import TRAIN, followed, plain, written


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_what_was_compiled_before_the_budget_is_refused_when_it_is_called(backend: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    model, function = torch.compile(layer, backend=backend), torch.compile(torch.nn.functional.relu, backend=backend)
    with budget(tensors="1G", page_dir=tmp_path).resizing():
        for compiled in (model, function):
            with pytest.raises(UnsupportedError, match=r"torch\.compile"):
                compiled(torch.ones(2, 8))
        assert layer(torch.ones(2, 8)).shape == (2, 8)
    if backend == "eager":
        assert torch.equal(model(torch.ones(2, 8)), layer(torch.ones(2, 8))), "after the budget it runs again"


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_program_that_compiles_is_followed_where_its_user_has_that_left_away(variable: str, tmp_path: Path) -> None:
    program = TRAIN.replace("for _ in range(3):", "compiled = torch.compile(model)\nfor _ in range(3):")
    written(tmp_path, program.replace("loss = model(", "loss = compiled("))
    run_conditions = {variable: "1"}
    expected = plain("train.py", folder=tmp_path, environment=run_conditions)
    done = followed("train.py", folder=tmp_path, environment=run_conditions)
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)


def test_an_operator_that_takes_programs_is_refused_by_name(tmp_path: Path) -> None:
    yes, x = torch.tensor(True), torch.ones(3)
    with (
        budget(tensors="4K", page_dir=tmp_path).resizing(),
        pytest.raises(UnsupportedError, match="cond of torch runs a program"),
    ):
        torch.ops.higher_order.cond(yes, torch.sin, torch.cos, (x,))


def test_a_thread_is_followed_from_its_start(tmp_path: Path) -> None:
    model, seen = torch.nn.Linear(256, 256), []
    plain = model(torch.ones(4, 256)).detach()
    with budget(tensors="4K", page_dir=tmp_path).resizing() as b:
        thread = threading.Thread(target=lambda: seen.append(model(torch.ones(4, 256)).detach()))
        thread.start()
        thread.join()
        assert b.report.written_bytes > 0
    assert torch.equal(seen[0], plain)


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "scripted"])
def test_a_scripted_module_is_written_whole_or_refused(traced: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()), torch.ones(1, 256)
    with budget(tensors="300K", page_dir=tmp_path).resizing():
        model(x)
        made = torch.jit.trace(model, x) if traced else torch.jit.script(model)
        torch.ones(256, 256) @ torch.ones(256, 256)
        buffer = io.BytesIO()
        torch.jit.save(made, buffer)
        other = torch.ones(256, 256) + 1
        with pytest.raises(UnsupportedError, match="not all tensors fit"):
            made.save(str(tmp_path / "never"))
        assert other.sum() == 2 * 256 * 256
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), model(x))


@pytest.mark.process
def test_a_gradient_asked_for_by_itself_ends_a_segment_only_in_programs_that_accumulate_none(tmp_path: Path) -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    with budget(tensors="4K", page_dir=tmp_path).resizing() as b:
        torch.autograd.grad((weight * 2).sum(), weight)
        torch.autograd.grad((weight * 2).sum(), weight)
        assert b.report.segments == 2
        (weight * 2).sum().backward()
        assert b.report.segments == 3
        torch.autograd.grad((weight * 2).sum(), weight)
        assert b.report.segments == 3

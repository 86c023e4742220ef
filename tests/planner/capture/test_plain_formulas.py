"""Recorded gradients are plain PyTorch's to the bit, also where autograd's formulas ask whether a mode is on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from port_planner.capture.plain_formulas import plain_formulas
from port_planner.capture.recorder import StepRecorder
from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.graph import Role


def _differentiated(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad((y * y.conj()).real.sum(), x, create_graph=True)[0] + x


_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.prod(),
    "rows": lambda x: x.prod(1),
    "columns": lambda x: x.prod(-2, keepdim=True),
    "of a view": lambda x: x.t()[1:].prod(0),
    "along": lambda x: x.cumprod(0),
    "back along": lambda x: x.cumprod(-1),
    "one by one": lambda x: x[0, 0].prod() + x[:1, :1].cumprod(1).sum(),
    "filled in": lambda x: x.masked_fill(x > 0.5, x[0, 0]),
    "differentiated": lambda x: _differentiated(x.prod(1), x),
    "running, differentiated": lambda x: _differentiated(x.cumprod(1), x),
    "all, differentiated": lambda x: _differentiated(x.prod(), x),
}


def _operand(zeros: int, dtype: torch.dtype) -> Tensor:
    x = torch.rand(5, 7, generator=torch.Generator().manual_seed(zeros), dtype=dtype) * 1.5 + 0.2
    x.view(-1)[: 8 * zeros : 8] = 0
    return x.requires_grad_()


def _gradient(form: str, x: Tensor) -> Tensor:
    loss = (_FORMS[form](x) * 1.1).abs().sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


def _recorded(form: str, x: Tensor) -> tuple[Tensor, StepRecorder, set[str]]:
    recorder = StepRecorder()
    recorder.add(x, Role.PARAMETER, "x")
    with recorder, plain_formulas() as others:
        found = _gradient(form, x)
    return found, recorder, others


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("form", _FORMS)
def test_recorded_gradients_are_plain_ones_to_the_bit(form: str, zeros: int, dtype: torch.dtype) -> None:
    if dtype.is_complex and form == "filled in":
        pytest.skip("complex numbers have no order to fill by")
    plain = _gradient(form, _operand(zeros, dtype))
    found, _, others = _recorded(form, _operand(zeros, dtype))
    if zeros and "cumprod" in (left := {name.lower().partition("backward")[0] for name in others}):
        assert left == {"cumprod"}  # by another formula, and named so
        return
    numbers = (torch.view_as_real(one.resolve_conj()) if dtype.is_complex else one for one in (found, plain))
    first, second = (one.contiguous().view(torch.int32) for one in numbers)
    assert torch.equal(first, second) and not others


def test_a_recorder_alone_takes_other_formulas() -> None:
    recorder, x = StepRecorder(), _operand(0, torch.float32)
    recorder.add(x, Role.PARAMETER, "x")
    with recorder:
        found = _gradient("rows", x)
    assert not torch.equal(found, _gradient("rows", _operand(0, torch.float32)))


def test_what_is_differentiated_once_is_chosen_by_operators_and_what_twice_by_a_guard() -> None:
    for form, guards in (("rows", 0), ("differentiated", 1)):
        _, recorder, _ = _recorded(form, _operand(0, torch.float32))
        assert sum(op.name == GUARD for op in recorder.tape.ops) == guards


def test_what_saved_tensors_hooks_pack_is_left_and_named() -> None:
    x, recorder = _operand(0, torch.float32), StepRecorder()
    recorder.add(x, Role.PARAMETER, "x")
    with recorder, plain_formulas() as others, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        x.prod(1).sum().backward()
    assert others == {"ProdBackward1"}


def test_autograd_is_as_before_after_the_block() -> None:
    engine = torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError), plain_formulas():
        assert torch.autograd._engine_run_backward is not engine
        raise ZeroDivisionError
    assert torch.autograd._engine_run_backward is engine

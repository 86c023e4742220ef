"""What a program does after each step of its optimizer is recorded as part of the update, or refused by name."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from port_planner.base.errors import CaptureError
from port_planner.capture.step import Capture, capture_step
from port_planner.ir.graph import Phase, Role, StepGraph
from tests.planner.small_classifier import batch, classify, net, sgd

Hook = Callable[..., Any]
FALLING = [[{"lr": 0.1}], [{"lr": 0.1}], [{"lr": 0.01}]]


def _captured(make: Callable[[Any], Hook], **options: Any) -> Capture:
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model, momentum=0.9)
    optimizer.register_step_post_hook(make(model))
    return capture_step(model, classify, optimizer, batch(), **options)


def _clamped(model: nn.Module) -> Hook:
    def hook(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    return hook


def _first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _written(graph: StepGraph, operator: str) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.name == operator and op.phase is Phase.UPDATE]


def test_what_concerns_one_parameter_runs_with_its_update() -> None:
    graph = _captured(_clamped).graphs["step"]
    clamped = _written(graph, "aten::clamp_")
    trained = [s for s, storage in enumerate(graph.storages) if storage.role is Role.PARAMETER]
    assert {s for i in clamped for s in graph.ops[i].writes} == {*trained}
    assert any(op.phase is Phase.BACKWARD for op in graph.ops[clamped[0] :])  # as soon as nothing reads the old weight
    for i in clamped:
        assert i == graph.writers[graph.ops[i].writes[0]][-1]


def test_what_concerns_several_follows_all_updates_once_an_update() -> None:
    def tied(model: nn.Module) -> Hook:
        first, second = [*model.parameters()][:2]
        return lambda *_: second.data.add_(first.data.sum())

    graphs = _captured(tied, accumulate=3).graphs
    assert not _written(graphs["first"], "aten::sum") and not _written(graphs["next"], "aten::sum")
    last = graphs["last"].ops
    assert [op.name for op in last[-2:]] == ["aten::sum", "aten::add_.Tensor"]
    assert all(op.phase is Phase.UPDATE for op in last[-2:])


def test_recording_leaves_everything_as_it_was() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.9)
    optimizer.register_step_post_hook(_clamped(model))

    def replaces(*_: Any) -> None:
        first = _first(model)
        first.data = first.data + torch.randn_like(first)

    optimizer.register_step_post_hook(replaces)
    before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    generator = torch.get_rng_state()
    capture_step(model, classify, optimizer, batch(), schedule=FALLING)
    assert all(p.data_ptr() == place and torch.equal(p, was) for p, place, was in before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] != 0.01


def _reads_the_rate(_: nn.Module) -> Hook:
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - 0.1 * group["lr"])

    return hook


def test_a_number_of_the_optimizers_is_taken_unless_a_schedule_changes_it() -> None:
    assert _written(_captured(_reads_the_rate).graphs["step"], "aten::mul_.Tensor")
    with pytest.raises(CaptureError, match=r"another lr, which the scheduler changes.*test_step_hooks.*aten::mul_"):
        _captured(_reads_the_rate, schedule=FALLING)


def _outside(model: nn.Module) -> Hook:
    average = copy.deepcopy(_first(model)).detach()
    return lambda *_: average.lerp_(_first(model).detach(), 0.1)


def _counts(model: nn.Module) -> Hook:
    updates = 0

    def hook(*_: Any) -> None:
        nonlocal updates
        updates += 1

    return hook


def _remembers(model: nn.Module) -> Hook:
    last = [torch.zeros_like(_first(model))]

    def hook(*_: Any) -> None:
        _first(model).data.lerp_(last[0], 0.1)
        last[0] = _first(model).detach().clone()

    return hook


def _sets_the_rate(_: nn.Module) -> Hook:
    return lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.5)


def _takes_state(_: nn.Module) -> Hook:
    return lambda optimizer, *_: [p.data.add_(s["momentum_buffer"]) for p, s in optimizer.state.items()]


def _takes_gradients(model: nn.Module) -> Hook:
    return lambda *_: [p.data.add_(p.grad) for p in model.parameters() if p.grad is not None]


def _draws_from_a_fork(model: nn.Module) -> Hook:
    def hook(*_: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            _first(model).data.add_(torch.rand_like(_first(model)))

    return hook


def _exchanges(model: nn.Module) -> Hook:
    return lambda *_: setattr(model.get_submodule("0"), "weight", nn.Parameter(_first(model).detach().clone()))


def _shares(model: nn.Module) -> Hook:
    def hook(*_: Any) -> None:
        whole = torch.zeros(1)
        for name in ("1.weight", "1.bias"):
            parameter = model.get_parameter(name)
            parameter.data = whole.expand(parameter.shape)

    return hook


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_outside, r"test_step_hooks\.py:\d+: aten::lerp_.* does not belong to the model"),
        (_counts, "changes updates .in hook, .*in Python each time"),
        (_remembers, "uses gradients, or results of the step or of another hook"),
        (_sets_the_rate, "changes the optimizer's groups"),
        (_takes_state, "uses the optimizer's state"),
        (lambda model: lambda *_: _first(model).requires_grad_(False), "changes which gradients are computed"),
        (_takes_gradients, "uses gradients"),
        (lambda _: lambda *_: torch.manual_seed(3), "sets torch's random generator"),
        (_draws_from_a_fork, r"test_step_hooks\.py:\d+: the step sets torch's random generator"),
        (lambda model: lambda *_: _first(model).detach().numpy(), r"test_step_hooks\.py:\d+ reads \d+ numbers"),
        (lambda model: lambda *_: _first(model).sum().item(), r"test_step_hooks\.py:\d+ reads the value"),
        (_exchanges, "replaces the model's tensors by others"),
        (_shares, "has another layout"),
    ],
)
def test_what_a_bundle_cannot_repeat_is_refused_by_line(make: Callable[[Any], Hook], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        _captured(make)
    assert "test_step_hooks.py" in str(caught.value) and "port-agent exec" in str(caught.value)


def test_what_no_list_of_hiding_places_has_may_still_be_another_operator() -> None:
    hidden = io.StringIO()

    def counts(model: nn.Module) -> Hook:
        def hook(*_: Any) -> None:
            hidden.write("x")
            if hidden.tell() == 2:
                _first(model).data.mul_(0.5)

        return hook

    with pytest.raises(
        CaptureError, match=r"behaves differently when it runs again: test_step_hooks\.py:\d+: aten::mul_"
    ):
        _captured(counts)

"""What a capture takes up, what it refuses by name, and what it leaves as it was."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import workload
from port_planner.base.errors import CaptureError
from port_planner.capture.step import capture_evaluation, capture_step
from port_planner.ir.allowed_operators import GUARD, OperatorError
from port_planner.ir.graph import Phase, Role, verify_graph
from tests.planner.small_classifier import batch, classify, net, sgd

ROOT = Path(__file__).resolve().parents[3]


# -- nothing is disturbed


def test_model_optimizer_generator_and_buffers_are_untouched() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    identities = [id(p) for p in model.parameters()]
    torch.manual_seed(17)
    generator = torch.get_rng_state()
    capture_step(model, classify, optimizer, batch())
    capture_evaluation(model, classify, batch())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def test_a_loss_function_that_fails_leaves_everything_as_it_was() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()

    def broken(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyError("no such column")

    with pytest.raises(KeyError):
        capture_evaluation(model, broken, batch())
    assert model.training
    with pytest.raises(KeyError):
        capture_step(model, broken, sgd(model), batch())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_the_graph_names_roles_and_phases() -> None:
    model = net()
    capture = capture_step(model, classify, sgd(model, momentum=0.9), batch())
    graph = capture.graphs["step"]
    verify_graph(graph)
    names = {(s.role, s.name) for s in graph.storages}
    assert {(Role.PARAMETER, n) for n, _ in model.named_parameters()} <= names
    assert {(Role.STATE, f"{n}/momentum_buffer") for n, _ in model.named_parameters()} <= names
    assert {op.phase for op in graph.ops} == set(Phase)
    assert all(s.key in capture.tensors for s in graph.storages if s.persistent)


def test_evaluation_draws_and_updates_nothing() -> None:
    graph = capture_evaluation(net(), classify, batch()).graphs["eval"]
    assert not any(op.random or op.writes for op in graph.ops)


# -- refusals


class MyOptimizer(torch.optim.SGD):
    """Not the class whose update is known."""


def _refused_optimizers() -> dict[str, Any]:
    o = torch.optim
    return {
        "LBFGS": lambda p: o.LBFGS(p),
        "MyOptimizer": lambda p: MyOptimizer(p, lr=0.1, momentum=0.9),
        "fused SGD with momentum=0": lambda p: o.SGD(p, lr=0.1, fused=True),
        "capturable=True": lambda p: o.AdamW(p, capturable=True),
        "differentiable=True": lambda p: o.SGD(p, lr=0.1, differentiable=True),
        "dampening=0.5": lambda p: o.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    }


@pytest.mark.parametrize("what", _refused_optimizers())
def test_optimizers_that_cannot_be_planned_are_named(what: str) -> None:
    model = net()
    with pytest.raises(CaptureError, match=what):
        capture_step(model, classify, _refused_optimizers()[what](model.parameters()), batch())


def test_reading_a_float_in_the_model_is_refused_with_its_line() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        return loss * 2 if loss.item() > 1e9 else loss

    with pytest.raises(CaptureError, match=r"test_step\.py:\d+ reads the value"):
        capture_step(net(), loss_fn, sgd(net()), batch())


@pytest.mark.slow
def test_gradients_that_are_recorded_by_another_formula_are_named_with_their_line() -> None:
    def by_determinant(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(model(x).t() @ model(x) + torch.eye(model(x).shape[1])) * model(x).sigmoid().prod()

    model = net()
    assert capture_step(model, classify, sgd(model), batch()).other_formulas == frozenset()
    (named,) = capture_step(model, by_determinant, sgd(model), batch()).other_formulas
    assert named.startswith("aten::_linalg_det at test_step.py:")


def test_a_loss_that_changes_the_optimizers_numbers_is_refused_by_name() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(m: nn.Module, *columns: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return classify(m, *columns)

    with pytest.raises(
        CaptureError,
        match=r"test_step\.py:\d+: the loss changes lr of group 0 of the optimizer from 0\.1 to 0\.05.*`scheduler`",
    ):
        capture_step(model, loss, optimizer, batch())


def _sparse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return classify(model, x, y) + (x.to_sparse() * 2).to_dense().sum()


_LINES: dict[str, tuple[Callable[..., Any], str]] = {
    "no scalar": (lambda m, x, y: m(x), r"test_step\.py:\d+: loss_fn\(model, \*batch\) must return a scalar tensor"),
    "no parameter": (lambda m, x, y: classify(m, x, y).detach(), r"test_step\.py:\d+: the loss does not depend .*detach\(\)"),
    "sparse": (_sparse, r"test_step\.py:\d+: the step uses a torch.sparse_coo tensor .*`port-agent exec`"),
}  # fmt: skip


@pytest.mark.parametrize("what", _LINES)
def test_what_cannot_be_recorded_is_refused_with_its_line_and_a_remedy(what: str) -> None:
    loss, message = _LINES[what]
    model = net()
    with pytest.raises(CaptureError, match=message):
        capture_step(model, loss, sgd(model), batch())


def test_a_generator_of_the_programs_own_is_refused_with_its_line() -> None:
    own = torch.Generator()

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return classify(m, x + torch.randn(x.shape, generator=own), y)

    model = net()
    with pytest.raises(CaptureError, match=r"test_step\.py:\d+ draws random numbers from its own generator"):
        capture_step(model, loss, sgd(model), batch())


def test_buffers_that_the_first_step_resizes_are_named_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model.register_buffer("seen", torch.zeros(0))

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.get_buffer("seen").resize_(4).fill_(1.0)
        return classify(m, x, y)

    with pytest.raises(CaptureError, match=r"gives seen of the model another shape.*run the model once on a batch"):
        capture_step(model, loss, sgd(model), (torch.randn(8, 6), torch.randint(0, 3, (8,))))
    assert model.get_buffer("seen").shape == (0,)


def test_a_branch_on_data_becomes_a_guard() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return functional.cross_entropy(out if x.sum() > 0 else -out, y)

    model = net()
    capture = capture_step(model, loss_fn, sgd(model), batch())
    guards = [op for op in capture.graphs["step"].ops if op.name == GUARD]
    assert len(guards) == 1 and isinstance(guards[0].args[1], bool)
    assert str(guards[0].args[2]).startswith("test_step.py:"), "the line is told where it is another"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: loss.expand(3), r"shape \[3\]"),
        (lambda loss: float(3), "float"),
        (lambda loss: None, "NoneType"),
        (lambda loss: torch.zeros(()), "does not depend on any parameter"),
    ],
)
def test_losses_that_are_none(result: Any, message: str) -> None:
    model = net()
    with pytest.raises(CaptureError, match=message):
        capture_step(model, lambda m, x, y: result(classify(m, x, y)), sgd(model), batch())


def test_sparse_tensors_are_refused() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(CaptureError, match="sparse"):
        capture_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.arange(3),))


def test_other_devices_are_refused() -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(CaptureError, match="meta"):
        capture_step(model, lambda m, x: m(x).sum(), sgd(model), (torch.zeros(2, 4, device="meta"),))


def test_parameters_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet"):
        capture_step(model, lambda m, x: m(x).sum(), sgd(model), (torch.zeros(2, 4),))


def test_a_batch_that_requires_a_gradient_or_shares_memory_is_refused() -> None:
    model = net()
    x, y = batch()
    with pytest.raises(CaptureError, match="detach"):
        capture_step(model, classify, sgd(model), (x.requires_grad_(), y))
    x = x.detach()
    with pytest.raises(CaptureError, match="clone"):
        capture_step(model, lambda m, a, b: (m(a) - m(b)).sum(), sgd(model), (x, x))


def test_custom_operators_are_refused_by_name() -> None:
    with torch.library._scoped_library("port_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.from_numpy(2 * x.numpy()), "CPU")
        model = nn.Linear(8, 4)

        def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = torch.ops.port_tests.twice(x.detach())
            return functional.cross_entropy(model(x), y)

        with pytest.raises(OperatorError, match=r"test_step\.py:\d+: .*port_tests::twice.*port-agent exec"):
            capture_step(model, loss_fn, sgd(model), batch())


@pytest.mark.slow
def test_llama_takes_the_branch_of_plain_pytorch() -> None:
    """Under tracing, transformers takes another attention branch; a recorded step must be
    the one that runs for real.
    """
    w = workload("llama", small=True)
    calls: list[str] = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_scaled_dot_product" in str(func) or "bmm" in str(func):
                calls.append(str(func).removesuffix(".default").replace(".", "::"))
            return func(*args, **(kwargs or {}))

    with Names():
        w.loss_fn(w.model, *w.batch(0))
    capture = capture_step(w.model, w.loss_fn, sgd(w.model), w.batch(0))
    forward = [op.name for op in capture.graphs["step"].ops if op.phase is Phase.FORWARD]
    recorded = [n for n in forward if "_scaled_dot_product" in n or "bmm" in n]
    assert calls and recorded == calls

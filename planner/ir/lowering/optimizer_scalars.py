"""Optimizers as data.

Which ones are supported, how their update is recorded, and its numbers for each step.

What changes from step to step (learning rate, Adam's bias corrections) are numbers among the operators' arguments. They
are found by running the same torch optimizer on one single element per parameter group and reading them off.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.adadelta import _single_tensor_adadelta
from torch.optim.adagrad import _fused_adagrad, _single_tensor_adagrad
from torch.optim.adam import _fused_adam, _single_tensor_adam
from torch.optim.adamax import _single_tensor_adamax
from torch.optim.rmsprop import _single_tensor_rmsprop
from torch.optim.sgd import _fused_sgd, _single_tensor_sgd
from torch.utils._python_dispatch import TorchDispatchMode

from planner.ir.errors import CaptureError
from planner.ir.operators import OPTIMIZERS

SUPPORTED: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, name) for name in OPTIMIZERS}

_REFUSED = ("capturable", "differentiable")
_DROPPED = ("params", "foreach", "param_names", "initial_lr")


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer without its tensors: class name and the hyperparameters of each parameter group."""

    name: str
    groups: tuple[Mapping[str, Any], ...]


def describe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of a torch optimizer.

    Raises CaptureError where its update cannot be planned.
    """
    name = type(optimizer).__name__
    if SUPPORTED.get(name) is not type(optimizer):
        raise CaptureError(f"the optimizer {name} is not supported; use one of {', '.join(SUPPORTED)} from torch.optim")
    for group in optimizer.param_groups:
        for flag in _REFUSED:
            if group.get(flag):
                raise CaptureError(
                    f"the optimizer was made with {flag}=True, which computes other numbers than the plain update; "
                    f"make it with {flag}=False"
                )
        if name == "SGD" and group.get("fused") and (group["dampening"] or not group["momentum"]):
            raise CaptureError(
                f"fused SGD with momentum={group['momentum']} and dampening={group['dampening']} cannot be planned; make the "
                "optimizer with fused=False"
            )
    return OptimizerSpec(name, tuple(hyperparameters(g) for g in optimizer.param_groups))


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, ready for msgpack.

    Tensors (a learning rate as tensor) become floats.
    """
    plain = {}
    for key, value in group.items():
        if key not in _DROPPED and (key != "fused" or value):
            plain[key] = float(value) if isinstance(value, torch.Tensor) else value
    return plain


def build_optimizer(spec: OptimizerSpec, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """Return a torch optimizer of this spec over `parameters`, one list per group, with its plain or its fused update.

    Raises CaptureError for an optimizer that is not supported.
    """
    cls = SUPPORTED.get(spec.name)
    if cls is None:
        raise CaptureError(f"the optimizer {spec.name!r} is not supported; use one of {', '.join(SUPPORTED)}")
    groups = [{"params": list(p), **_restored(g)} for p, g in zip(parameters, spec.groups, strict=True)]
    lr = spec.groups[0]["lr"]
    return cls(groups, lr=lr, foreach=False)  # type: ignore[call-arg]


def _restored(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}


def initial_fill(name: str, group: Mapping[str, Any]) -> float:
    """Return the value that fills the state tensor `name` before the first step.

    Momentum starts at minus zero: torch's first step copies the gradient, and -0.0 * momentum + g is g to the bit,
    for g = +0.0 and g = -0.0 too.
    """
    if name == "momentum_buffer":
        return -0.0
    return float(group.get("initial_accumulator_value", 0.0)) if name == "sum" else 0.0


class StepScalars:
    """Gives the scalars of every parameter group, step after step, exactly as torch does.

    Runs torch's own update functions on one element per group. Not the Optimizer classes: their first step imports
    torch's compiler, which costs a worker 70 MiB.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        if spec.name not in _UPDATES:
            raise CaptureError(f"the optimizer {spec.name!r} is not supported; use one of {', '.join(SUPPORTED)}")
        self._update = _UPDATES[spec.name]
        self._groups = [_restored(g) for g in spec.groups]
        self.steps_done = 0
        """Updates made so far."""

    def set_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Take over the present hyperparameters (a scheduler may have changed them)."""
        for mine, theirs in zip(self._groups, groups, strict=True):
            mine.update(_restored(hyperparameters(theirs)))

    def advance(self) -> list[float | int]:
        """Return the scalars of the next update, all groups' one after the other, and count it.

        Raises CaptureError for a scalar that is NaN or a hyperparameter that is wrong.
        """
        with torch.no_grad(), _NumberReader() as reader:
            for group in self._groups:
                try:
                    begin = len(reader.numbers)
                    self._update_cell(reader, group)
                    if group.get("dampening") and not self.steps_done:
                        self._undampened(reader, group, begin)
                except (KeyError, TypeError, ValueError) as error:
                    raise CaptureError(
                        f"the optimizer's hyperparameters are wrong or incomplete ({error!r})"
                    ) from error
        self.steps_done += 1
        numbers: list[float | int] = reader.numbers
        for number in numbers:
            if isinstance(number, float) and math.isnan(number):
                raise CaptureError(
                    f"the optimizer's scalar is NaN at update {self.steps_done}; check the learning rate"
                )
        return numbers

    def _update_cell(self, reader: "_NumberReader", group: Mapping[str, Any]) -> None:
        reader.quiet = True
        cell = _Cell(float(self.steps_done))
        reader.quiet = False
        self._update(cell, group)

    def _undampened(self, reader: "_NumberReader", group: Mapping[str, Any], begin: int) -> None:
        """Let the first update take the whole gradient for its momentum, as torch does: no factor of dampening.

        Which number that is shows by asking for the same update with another dampening.
        """
        numbers = reader.numbers[begin:]
        self._update_cell(reader, {**group, "dampening": group["dampening"] / 2})
        others = reader.numbers[begin + len(numbers) :]
        reader.numbers[begin:] = [1.0 if a != b else a for a, b in zip(numbers, others, strict=True)]


class _Cell:
    """One element with everything an update may want beside it."""

    def __init__(self, steps: float) -> None:
        self.parameter, self.grad, self.first, self.second, self.third = (torch.zeros(1) for _ in range(5))
        self.step = torch.tensor(steps)


def _sgd(cell: _Cell, g: Mapping[str, Any]) -> None:
    buffer = cell.first if g["momentum"] else None
    if g.get("fused"):
        _fused_sgd(
            [cell.parameter], [cell.grad], [buffer], None, None, weight_decay=g["weight_decay"], momentum=g["momentum"],
            lr=g["lr"], dampening=g["dampening"], nesterov=g["nesterov"], maximize=g["maximize"], has_sparse_grad=False,
        )  # fmt: skip
        return
    _single_tensor_sgd(
        [cell.parameter], [cell.grad], [buffer], None, None, weight_decay=g["weight_decay"], momentum=g["momentum"],
        lr=g["lr"], dampening=g["dampening"], nesterov=g["nesterov"], maximize=g["maximize"], has_sparse_grad=False,
    )  # fmt: skip


def _adam(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    update = _fused_adam if g.get("fused") else _single_tensor_adam
    update(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.third] if g["amsgrad"] else [], [cell.step],
        None, None, amsgrad=g["amsgrad"], has_complex=False, beta1=beta1, beta2=beta2, lr=g["lr"],
        weight_decay=g["weight_decay"], eps=g["eps"], maximize=g["maximize"], capturable=False, differentiable=False,
        decoupled_weight_decay=g["decoupled_weight_decay"],
    )  # fmt: skip


def _rmsprop(cell: _Cell, g: Mapping[str, Any]) -> None:
    _single_tensor_rmsprop(
        [cell.parameter], [cell.grad], [cell.first], [cell.second] if g["centered"] else [],
        [cell.third] if g["momentum"] > 0 else [], [cell.step], lr=g["lr"], alpha=g["alpha"], eps=g["eps"],
        weight_decay=g["weight_decay"], momentum=g["momentum"], centered=g["centered"], maximize=g["maximize"],
        differentiable=False, capturable=False, has_complex=False,
    )  # fmt: skip


def _adagrad(cell: _Cell, g: Mapping[str, Any]) -> None:
    update = _fused_adagrad if g.get("fused") else _single_tensor_adagrad
    update(
        [cell.parameter], [cell.grad], [cell.first], [cell.step], None, None, lr=g["lr"],
        weight_decay=g["weight_decay"], lr_decay=g["lr_decay"], eps=g["eps"], has_sparse_grad=False,
        maximize=g["maximize"], differentiable=False, has_complex=False,
    )  # fmt: skip


def _adadelta(cell: _Cell, g: Mapping[str, Any]) -> None:
    _single_tensor_adadelta(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.step], lr=g["lr"], rho=g["rho"], eps=g["eps"],
        weight_decay=g["weight_decay"], maximize=g["maximize"], differentiable=False, capturable=False, has_complex=False,
    )  # fmt: skip


def _adamax(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    _single_tensor_adamax(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.step], lr=g["lr"], beta1=beta1, beta2=beta2,
        eps=g["eps"], weight_decay=g["weight_decay"], maximize=g["maximize"], differentiable=False, capturable=False,
        has_complex=False,
    )  # fmt: skip


_UPDATES: dict[str, Callable[[_Cell, Mapping[str, Any]], None]] = {
    "SGD": _sgd, "Adam": _adam, "AdamW": _adam, "RMSprop": _rmsprop, "Adagrad": _adagrad,
    "Adadelta": _adadelta, "Adamax": _adamax,
}  # fmt: skip


class _NumberReader(TorchDispatchMode):
    """Collects the numbers among the arguments of each operator that computes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping means importing torch's compiler, 70 MiB

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.numbers: list[float | int] = []
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.quiet and (isinstance(result, torch.Tensor) or result is None) and not _is_view(func):
            self.numbers += _numbers((*args, *kwargs.values()))
        return result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _numbers(arguments: Iterable[Any]) -> list[float | int]:
    """Return the plain numbers among (nested) arguments, in order."""
    leaves = pytree.tree_leaves(list(arguments))
    return [a for a in leaves if isinstance(a, int | float) and not isinstance(a, bool)]

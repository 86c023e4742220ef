"""Descriptions of optimizers as data: which ones are supported, how their update is recorded, and
its numbers for each step.

Numbers among the operators' arguments change from step to step (learning rate, Adam's bias corrections). They are found
by running the same torch optimizer on one element per parameter group.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from port_planner.base.errors import CaptureError
from port_planner.ir.allowed_operators import OPTIMIZERS
from port_planner.ir.known_steps import KnownSteps
from port_planner.ir.plateau import PlateauRule, PlateauState
from port_planner.torch_compat.modes import OperatorMode, pytree

SUPPORTED: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, name) for name in OPTIMIZERS}

_REFUSED = ("capturable", "differentiable")
_APART_IN_LISTS = ("NAdam", "RAdam")
"""Optimizers whose update with foreach=True rounds differently from the per-parameter update, which bundles use."""
_HALVES_APART_IN_LISTS = ("SGD", "RMSprop", "Adagrad", "Adadelta")
"""The same for 16-bit parameters, for which one uses a single operator and the other uses two.

SGD without momentum is an exception.
"""
_HALF_BYTES = 2

_HYPER_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Data types of hyperparameters that are tensors."""
_DROPPED = ("params", "foreach", "param_names", "initial_lr")


Schedule = Sequence[Sequence[Mapping[str, Any]]]
"""Changes that a scheduler makes to each group, for each update."""

SETTLED_STEP = 1e6
"""Step count from which RAdam rectifies its rate, if its beta2 ever allows it; from there on it uses more operators."""


@dataclass(frozen=True, slots=True)
class RecordedNumbers:
    """The scalars of an optimizer whose code the worker does not have.

    `numbers`: for each scalar, a constant or one number per update, of which the last stays valid. `updates`: number of
    updates for which they are known; None: all.
    """

    numbers: tuple[float | tuple[float, ...], ...]
    updates: int | None


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer without its tensors: class name and the hyperparameters of each parameter group.

    `recorded`: its scalars, if its class is not among `SUPPORTED`.
    """

    name: str
    groups: tuple[Mapping[str, Any], ...]
    recorded: RecordedNumbers | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "OptimizerSpec":
        """Return the spec in a bundle's manifest."""
        recorded = data.get("recorded")
        if recorded is None:
            return cls(data["name"], tuple(data["groups"]))
        numbers = tuple(tuple(n) if isinstance(n, list) else n for n in recorded["numbers"])
        return cls(data["name"], tuple(data["groups"]), RecordedNumbers(numbers, recorded["updates"]))

    def as_data(self) -> dict[str, Any]:
        """Return the spec in the form of a bundle's manifest."""
        data: dict[str, Any] = {"name": self.name, "groups": [dict(g) for g in self.groups]}
        if self.recorded is not None:
            data["recorded"] = {"numbers": self.recorded.numbers, "updates": self.recorded.updates}
        return data


def is_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is a torch class whose scalars a worker can compute."""
    return SUPPORTED.get(type(optimizer).__name__) is type(optimizer)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of a torch optimizer.

    Raises CaptureError if its update cannot be planned.
    """
    name = type(optimizer).__name__
    if not is_supported(optimizer):
        raise CaptureError(f"the optimizer {name} is not supported; use one of {', '.join(SUPPORTED)} from torch.optim")
    for group in optimizer.param_groups:
        for flag in _REFUSED:
            if group.get(flag):
                raise CaptureError(
                    f"the optimizer was made with {flag}=True, which gives different numbers from the plain update; "
                    f"make it with {flag}=False"
                )
        if group.get("foreach") and _rounds_apart_in_lists(name, group):
            raise CaptureError(
                f"the optimizer {name} was made with foreach=True, which rounds differently from the per-parameter "
                "update that a bundle has; make it with foreach=False, or train with `port-agent exec`"
            )
        if name == "SGD" and group.get("fused") and (group["dampening"] or not group["momentum"]):
            raise CaptureError(
                f"fused SGD with momentum={group['momentum']} and dampening={group['dampening']} cannot be planned; "
                "make the optimizer with fused=False"
            )
    if name == "NAdam" and torch.get_default_dtype() == torch.float64:
        raise CaptureError(
            "NAdam under torch.set_default_dtype(torch.float64) keeps its product of momenta in float64, a bundle in "
            "float32; train with `port-agent exec`"
        )
    _check_not_begun(optimizer)
    return OptimizerSpec(name, tuple(hyperparameters(g) for g in optimizer.param_groups))


def _rounds_apart_in_lists(name: str, group: Mapping[str, Any]) -> bool:
    """Return whether a group's update with foreach=True gives different numbers than without."""
    of_halves = any(p.dtype.itemsize == _HALF_BYTES for p in group["params"])
    one_operator = name == "SGD" and not group["momentum"]
    return name in _APART_IN_LISTS or (of_halves and name in _HALVES_APART_IN_LISTS and not one_operator)


def _check_not_begun(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError if the optimizer has already counted steps, or if its first step differs from later ones."""
    name = type(optimizer).__name__
    done = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    dampened = any(group.get("dampening") for group in optimizer.param_groups) and bool(optimizer.state)
    if done or dampened:
        raise CaptureError(
            f"the optimizer {name} has made {done or 'some'} steps, but a bundle counts from its own first step: "
            "create a new one, or train with `port-agent exec`"
        )


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, ready for msgpack.

    A tensor, such as a learning rate, becomes its number and the type in which torch computes with it.
    """
    plain = {}
    for key, value in group.items():
        if key not in _DROPPED and (key != "fused" or value):
            plain[key] = (
                {"number": float(value), "dtype": str(value.dtype).removeprefix("torch.")}
                if isinstance(value, torch.Tensor)
                else value
            )
    return plain


def build_optimizer(spec: OptimizerSpec, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """Return a torch optimizer of this spec over `parameters`, one list per group, with its plain or fused update.

    Raises CaptureError for an optimizer that is not supported.
    """
    cls = SUPPORTED.get(spec.name)
    if cls is None:
        raise CaptureError(f"the optimizer {spec.name!r} is not supported; use one of {', '.join(SUPPORTED)}")
    groups = [{"params": list(p), **_as_numbers(restored(g))} for p, g in zip(parameters, spec.groups, strict=True)]
    return cls(groups, lr=groups[0]["lr"], foreach=False)  # type: ignore[call-arg]


def restored(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters in the form of a torch optimizer, from the output of `hyperparameters`.

    Raises CaptureError for an invalid one.
    """
    return {
        k: _tensor_of(v) if isinstance(v, Mapping) else tuple(v) if isinstance(v, list) else v for k, v in group.items()
    }


def _tensor_of(described: Mapping[str, Any]) -> torch.Tensor:
    kind = _HYPER_DTYPES.get(str(described.get("dtype")))
    if kind is None or not isinstance(described.get("number"), float):
        raise CaptureError(
            f"a hyperparameter of the optimizer is {dict(described)!r}, which is not a valid number; plan the job again"
        )
    return torch.tensor(described["number"], dtype=kind)


def _as_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}


def initial_fill(name: str, group: Mapping[str, Any]) -> float:
    """Return the value that fills the state tensor `name` before the first step.

    Momentum starts at minus zero: torch's first step copies the gradient, and -0.0 * momentum + g equals g to the bit,
    also for g = +0.0 and g = -0.0.
    """
    if name == "momentum_buffer":
        return -0.0
    if name == "mu_product":
        return 1.0
    return float(group.get("initial_accumulator_value", 0.0)) if name == "sum" else 0.0


class StepScalars:
    """Computes the scalars of every parameter group, step after step, exactly as torch does.

    It runs torch's own update functions on one element per group. It does not use the Optimizer classes, because their
    first step imports torch's compiler, which costs a worker 70 MiB. `schedule`: for each known update, a scheduler's
    changes to each group. `known`: the numbers of batches, if the program's steps have any. `plateau`: how the learning
    rates follow the losses, which must then be given to the state of that name.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        schedule: Schedule = (),
        known: KnownSteps | None = None,
        plateau: PlateauRule | None = None,
    ) -> None:
        if spec.recorded is None and spec.name not in _UPDATES:
            raise CaptureError(f"the optimizer {spec.name!r} is not supported; use one of {', '.join(SUPPORTED)}")
        self._name, self._recorded, self._known = spec.name, spec.recorded, known
        self._first_groups, self._schedule = [restored(g) for g in spec.groups], schedule
        self._products = _Products(0, ())
        rates = [float(group["lr"]) for group in self._first_groups] if plateau is not None else []
        self.plateau = None if plateau is None else PlateauState(plateau, rates)
        self.steps_done = 0
        """Number of updates so far."""

    def _groups(self, update: int) -> list[dict[str, Any]]:
        """Return the hyperparameters of every group at an update, counted from 0."""
        if self.plateau is not None:
            return [{**g, "lr": rate} for g, rate in zip(self._first_groups, self.plateau.rates, strict=True)]
        if not self._schedule:
            return self._first_groups
        return [
            {**g, **restored(changed)} for g, changed in zip(self._first_groups, self._schedule[update], strict=True)
        ]

    def of_batch(self, place: int, accumulate: int) -> list[float | int]:
        """Return the numbers of a batch at this `place` among the `accumulate` batches of the next update; the
        last one counts that update.

        Raises CaptureError as `advance` does.
        """
        self._require_known(self.steps_done)
        batch = self.steps_done * accumulate + place
        own = () if self._known is None else self._known.numbers_of(batch)
        return [*own, *(self.advance() if place == accumulate - 1 else ())]

    def advance(self) -> list[float | int]:
        """Count the next update and return its scalars, group after group.

        Raises CaptureError for a scalar that is NaN, an invalid hyperparameter, or an update beyond the recorded ones.
        """
        self._require_known(self.steps_done)
        numbers = self._computed() if self._recorded is None else self._looked_up(self._recorded)
        self.steps_done += 1
        for number in numbers:
            if isinstance(number, float) and math.isnan(number):
                raise CaptureError(
                    f"the optimizer's scalar is NaN at update {self.steps_done}; check the learning rate"
                )
        return numbers

    def _require_known(self, update: int) -> None:
        """Raise CaptureError unless the scalars of the update, counted from 0, are known."""
        steps = self._known and self._known.updates
        for known in (self._recorded and self._recorded.updates, len(self._schedule), steps):
            if known and update >= known:
                raise CaptureError(
                    f"the numbers of the optimizer {self._name} are known for {known} updates, but this is update "
                    f"{update + 1}; plan the job again with more --epochs"
                )

    def _looked_up(self, recorded: RecordedNumbers) -> list[float | int]:
        return [
            number[min(self.steps_done, len(number) - 1)] if isinstance(number, tuple) else number
            for number in recorded.numbers
        ]

    def _computed(self) -> list[float | int]:
        groups = self._groups(self.steps_done)
        products = self._momentum_products() if self._name == "NAdam" else [1.0] * len(groups)
        with torch.no_grad(), _NumberReader() as reader:
            for group, product in zip(groups, products, strict=True):
                try:
                    begin = len(reader.numbers)
                    self._update_cell(reader, group, product)
                    if self._name == "RAdam":
                        reader.numbers[begin:] = _rectified(reader.numbers[begin:], self.steps_done + 1, group)
                    if group.get("dampening") and not self.steps_done:
                        self._undampened(reader, group, begin)
                except (KeyError, TypeError, ValueError) as error:
                    raise CaptureError(
                        f"the optimizer's hyperparameters are wrong or incomplete ({error!r})"
                    ) from error
        numbers: list[float | int] = reader.numbers
        return numbers

    def _momentum_products(self) -> list[float]:
        """Return the product of NAdam's momenta before the next update, for each group, rounded as torch's state is.

        They depend on all earlier updates, so they are kept from one to the next, and recomputed after a resume.
        """
        if self._products.updates > self.steps_done:
            self._products = _Products(0, ())
        products = self._products.of_groups or tuple(torch.ones((), dtype=torch.float32) for _ in self._first_groups)
        for update in range(self._products.updates, self.steps_done):
            for product, group in zip(products, self._groups(update), strict=True):
                product.mul_(_nadam_momentum(group, float(update + 1)))
            if not any(product.item() for product in products):
                break  # 0.0 is constant: a constant that exists stays
        self._products = _Products(self.steps_done, products)
        return [product.item() for product in products]

    def _update_cell(self, reader: "_NumberReader", group: Mapping[str, Any], product: float = 1.0) -> None:
        reader.quiet = True
        cell = _Cell(float(self.steps_done), product)
        reader.hyperparameters = [v for v in group.values() if isinstance(v, torch.Tensor)]
        reader.quiet = False
        _UPDATES[self._name](cell, group)

    def _undampened(self, reader: "_NumberReader", group: Mapping[str, Any], begin: int) -> None:
        """Make the first update use the whole gradient as momentum, without dampening, as torch does.

        Comparing the same update with a different dampening shows which number that is.
        """
        numbers = reader.numbers[begin:]
        self._update_cell(reader, {**group, "dampening": group["dampening"] / 2})
        others = reader.numbers[begin + len(numbers) :]
        reader.numbers[begin:] = [1.0 if a != b else a for a, b in zip(numbers, others, strict=True)]


@dataclass(frozen=True, slots=True)
class _Products:
    """NAdam's products of momenta after a number of updates, one per group."""

    updates: int
    of_groups: tuple[torch.Tensor, ...]


class _Cell:
    """One element with everything else that an update may need."""

    def __init__(self, steps: float, product: float) -> None:
        self.parameter, self.grad, self.first, self.second, self.third = (torch.zeros(1) for _ in range(5))
        self.step, self.product = torch.tensor(steps), torch.tensor(product)


def _sgd(cell: _Cell, g: Mapping[str, Any]) -> None:
    sgd(
        [cell.parameter], [cell.grad], [cell.first if g["momentum"] else None], foreach=False, fused=bool(g.get("fused")),
        weight_decay=g["weight_decay"], momentum=g["momentum"], lr=g["lr"], dampening=g["dampening"],
        nesterov=g["nesterov"], maximize=g["maximize"],
    )  # fmt: skip


def _adam(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    adam(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.third] if g["amsgrad"] else [], [cell.step],
        foreach=False, fused=bool(g.get("fused")), amsgrad=g["amsgrad"], beta1=beta1, beta2=beta2, lr=g["lr"],
        weight_decay=g["weight_decay"], eps=g["eps"], maximize=g["maximize"],
        decoupled_weight_decay=g["decoupled_weight_decay"],
    )  # fmt: skip


def _rmsprop(cell: _Cell, g: Mapping[str, Any]) -> None:
    rmsprop(
        [cell.parameter], [cell.grad], [cell.first], [cell.second] if g["centered"] else [],
        [cell.third] if g["momentum"] > 0 else [], [cell.step], lr=g["lr"], alpha=g["alpha"], eps=g["eps"],
        weight_decay=g["weight_decay"], momentum=g["momentum"], centered=g["centered"], maximize=g["maximize"],
        foreach=False,
    )  # fmt: skip


def _adagrad(cell: _Cell, g: Mapping[str, Any]) -> None:
    adagrad(
        [cell.parameter], [cell.grad], [cell.first], [cell.step], foreach=False, fused=bool(g.get("fused")), lr=g["lr"],
        weight_decay=g["weight_decay"], lr_decay=g["lr_decay"], eps=g["eps"], maximize=g["maximize"],
    )  # fmt: skip


def _adadelta(cell: _Cell, g: Mapping[str, Any]) -> None:
    adadelta(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.step], lr=g["lr"], rho=g["rho"], eps=g["eps"],
        weight_decay=g["weight_decay"], maximize=g["maximize"], foreach=False,
    )  # fmt: skip


def _adamax(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    adamax(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.step], lr=g["lr"], beta1=beta1, beta2=beta2,
        eps=g["eps"], weight_decay=g["weight_decay"], maximize=g["maximize"], foreach=False,
    )  # fmt: skip


def _nadam(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    nadam(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.product], [cell.step], beta1=beta1,
        beta2=beta2, lr=g["lr"], weight_decay=g["weight_decay"], momentum_decay=g["momentum_decay"], eps=g["eps"],
        decoupled_weight_decay=g["decoupled_weight_decay"], maximize=g["maximize"], foreach=False,
    )  # fmt: skip


def _nadam_momentum(g: Mapping[str, Any], step: float) -> float:
    momentum: float = g["betas"][0] * (1.0 - 0.5 * (0.96 ** (step * g["momentum_decay"])))
    return momentum


def rectifies(g: Mapping[str, Any], step: float) -> bool:
    """Return whether RAdam's update of this count divides by the square root of its second
    moment, as torch computes it.
    """
    beta2 = g["betas"][1]
    rho = 2 / (1 - beta2) - 1 - 2 * step * (beta2**step) / (1 - beta2**step)
    return bool(rho > 5.0)


def _rectified(numbers: Sequence[float | int], step: int, g: Mapping[str, Any]) -> list[float | int]:
    """Return the numbers of the operators with which RAdam is recorded, including `clamp_`
    (`port_planner.capture.step`).

    That operator passes the divisor of an update unchanged; for the first updates, which do not divide, it gives 1.0.
    """
    if not rectifies(g, SETTLED_STEP):
        return [*numbers]
    if rectifies(g, float(step)):
        return [*numbers[:-2], -math.inf, math.inf, *numbers[-2:]]
    return [*numbers[:-1], g["eps"], 1.0, 1.0, 1.0, 1.0, numbers[-1]]


def _radam(cell: _Cell, g: Mapping[str, Any]) -> None:
    beta1, beta2 = g["betas"]
    radam(
        [cell.parameter], [cell.grad], [cell.first], [cell.second], [cell.step], beta1=beta1, beta2=beta2, lr=g["lr"],
        weight_decay=g["weight_decay"], eps=g["eps"], decoupled_weight_decay=g["decoupled_weight_decay"],
        maximize=g["maximize"], foreach=False,
    )  # fmt: skip


_UPDATES: dict[str, Callable[[_Cell, Mapping[str, Any]], None]] = {
    "SGD": _sgd, "Adam": _adam, "AdamW": _adam, "RMSprop": _rmsprop, "Adagrad": _adagrad,
    "Adadelta": _adadelta, "Adamax": _adamax, "NAdam": _nadam, "RAdam": _radam,
}  # fmt: skip


class _NumberReader(OperatorMode):
    """Collects the numbers among the arguments of each operator that computes."""

    def __init__(self) -> None:
        OperatorMode.__init__(self)  # type: ignore[no-untyped-call]
        self.numbers: list[float | int] = []
        self.quiet = False
        self.hyperparameters: list[torch.Tensor] = []
        """Hyperparameters that are tensors, and values computed only from them, which an operator on a
        parameter takes as numbers.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.quiet:
            return result
        tensors = [a for a in pytree.tree_leaves([args, kwargs]) if isinstance(a, torch.Tensor)]
        if tensors and all(map(self._is_hyperparameter, tensors)):
            self.hyperparameters += [r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        elif (isinstance(result, torch.Tensor) or result is None) and not _is_view(func):
            self.numbers += _numbers((*args, *kwargs.values()), self._is_hyperparameter)
        return result

    def _is_hyperparameter(self, tensor: torch.Tensor) -> bool:
        return any(tensor is one for one in self.hyperparameters)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _numbers(arguments: Iterable[Any], is_number: Callable[[torch.Tensor], bool]) -> list[float | int]:
    """Return the plain numbers among (nested) arguments, in order, including tensors treated as numbers."""
    found: list[float | int] = []
    for leaf in pytree.tree_leaves(list(arguments)):
        if isinstance(leaf, torch.Tensor) and is_number(leaf):
            found.append(float(leaf))
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            found.append(leaf)
    return found

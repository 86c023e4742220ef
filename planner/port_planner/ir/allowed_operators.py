"""The aten operators that a step may contain. With these, a bundle can compute.

It cannot run code, open files or import.

They are listed in `port_planner.operators.table` by base name; every overload with tensors and plain arguments is
accepted. Other operators are rejected by name when a step is captured, and when a bundle is loaded.
"""

from port_planner.base.errors import ExitCode, PortError
from port_planner.operators import operator_of, overload_name

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")
"""Optimizers of torch that a bundle may name: elementwise updates with the same operators in every step.

Their scalars are computed in `port_planner.ir.lowering.optimizer_scalars`.
"""

GUARD = "port::guard"
"""A pseudo-operator: its operand must have the same value as when the step was recorded."""

MAXIMUM_OUT = "aten::maximum.out"
"""The only allowed operator with an `out` argument, with which Adam's amsgrad and Adamax keep their running maximum."""


ADD_SCALED = "aten::add_.Tensor"
"""The only operator whose factor `alpha` may be a tensor's value; Adafactor computes it from norms."""


class OperatorError(PortError):
    """An operator is not on the list."""

    exit_code = ExitCode.IMPOSSIBLE


def check_operator(name: str) -> None:
    """Raise OperatorError unless `name` ("aten::addmm", "aten::add.Tensor") is allowed."""
    if name.startswith("aten::") and operator_of(name).allowed and not overload_name(name).endswith(("out", "out_")):
        return
    if name in (GUARD, MAXIMUM_OUT):
        return
    instead = operator_of(name).instead if name.startswith("aten::") else ""
    raise OperatorError(
        f"the step uses the operator {name}, which is not supported; "
        f"{instead or 'replace it in the model by standard torch operations'}, or train with `port-agent exec`"
    )


def only_checks(name: str) -> bool:
    """Return whether an operator creates nothing and only raises an error if a condition is violated."""
    return name == GUARD or operator_of(name).checks_only


def draws_by_shape(name: str) -> bool:
    """Return whether an operator draws the same number of random numbers for all values of its operands."""
    return overload_name(name) in operator_of(name).draws_by_shape

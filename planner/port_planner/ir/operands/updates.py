"""The operands of fused updates of optimizers."""

from port_planner.ir.graph import Value
from port_planner.ir.operands.call import Fits, GraphCall
from port_planner.operators.row import ArgumentCheck

_STATES = ("grads", "exp_avgs", "exp_avg_sqs", "state_sums", "momentum_buffer_list")
"""Operator names for arguments of the same size as a parameter."""


def _fused_update(call: GraphCall) -> bool:
    """Check a fused update: one parameter, its gradient and states have the same size and layout, and a step
    count is a single number.
    """
    (parameter,) = call.listed("self")
    wanted = [name for name in _STATES if name in call.parameters]
    wanted += ["max_exp_avg_sqs"] if call.arguments.get("amsgrad") is True else []
    alike = [value for name in wanted for value in call.listed(name, 1)]
    counts = call.listed("state_steps", 1) if "state_steps" in call.parameters else []
    return (
        _dense(parameter)
        and all(_lies_as(value, parameter) for value in alike)
        and all(count.shape == () and count.dtype == "float32" for count in counts)
        and (call.arguments.get("amsgrad") is True or not call.arguments.get("max_exp_avg_sqs"))
        and call.arguments.get("grad_scale") is None
        and call.arguments.get("found_inf") is None
    )


def _lies_as(one: Value, other: Value) -> bool:
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)


def _dense(value: Value) -> bool:
    """Return whether a tensor fills a block of memory, with each element once, in any order."""
    size = 1
    for stride, n in sorted(zip(value.stride, value.shape, strict=True)):
        if n != 1 and stride != size:
            return False
        size *= n
    return size > 0


RULES: dict[ArgumentCheck, Fits] = {ArgumentCheck.FUSED_UPDATE: _fused_update}

"""What fused updates of optimizers are called with."""

from port_planner.ir.graph import Value
from port_planner.ir.operands.call import Fits, GraphCall, Rule


def _fused_update(states: str) -> Fits:
    """One parameter, its gradient and states, which are as large and lie the same way; a count of steps is one number."""

    def fits(call: GraphCall) -> bool:
        (parameter,) = call.listed("self")
        wanted = ["grads", *states.split(), *(["max_exp_avg_sqs"] if call.arguments.get("amsgrad") is True else [])]
        alike = [value for name in wanted for value in call.listed(name, 1)]
        counts = [] if "momentum_buffer_list" in wanted else call.listed("state_steps", 1)
        return (
            _dense(parameter) and all(_lies_as(value, parameter) for value in alike)
            and all(count.shape == () and count.dtype == "float32" for count in counts)
            and (call.arguments.get("amsgrad") is True or not call.arguments.get("max_exp_avg_sqs"))
            and call.arguments.get("grad_scale") is None and call.arguments.get("found_inf") is None
        )  # fmt: skip

    return fits


def _lies_as(one: Value, other: Value) -> bool:
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)


def _dense(value: Value) -> bool:
    """Say whether a tensor fills a piece of memory, each element once, in whatever order."""
    size = 1
    for stride, n in sorted(zip(value.stride, value.shape, strict=True)):
        if n != 1 and stride != size:
            return False
        size *= n
    return size > 0


_ADAM = "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"

RULES: dict[str, Rule] = {
    "_fused_adam_": (_ADAM, _fused_update("exp_avgs exp_avg_sqs")),
    "_fused_adamw_": (_ADAM, _fused_update("exp_avgs exp_avg_sqs")),
    "_fused_adagrad_": ("self grads state_sums state_steps", _fused_update("state_sums")),
    "_fused_sgd_": ("self grads momentum_buffer_list", _fused_update("momentum_buffer_list")),
}  # fmt: skip

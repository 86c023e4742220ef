"""The backward pass of convolutions for which frozen parameters need only some gradients.

Autograd computes the three gradients by one operator, so it saves the input even if only the gradients of input or bias
are requested, which need only its shape. Here that operand becomes a stand-in of the same shape, all of whose elements
are the weight's first one. So the activation need not live from forward to backward. torch's CPU kernels compute bias
and weight gradients together and return both, regardless of the mask. The mask is set to match, and nothing uses the
surplus weight gradient: the bias gradient is bit-identical.
"""

from dataclasses import replace

from port_planner.capture.recorder import RecordedOp, Tape
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Ref, Value

BACKWARD = "aten::convolution_backward"
INPUT, WEIGHT, MASK = 1, 2, 10
"""Positions among the operator's arguments."""


def as_kernels_compute(tape: Tape) -> None:
    """Make convolutions' backward operators declare what the kernels return, and hold no input that is not read."""
    for i, op in enumerate(tape.ops):
        if op.name == BACKWARD and isinstance(mask := op.args[MASK], tuple) and mask[1] is False and _on_cpu(tape, op):
            tape.ops[i] = _without_input(tape, op, bool(mask[0]), bool(mask[2]))


def _on_cpu(tape: Tape, op: RecordedOp) -> bool:
    """Return whether the CPU's kernels compute it; other devices treat the mask differently,
    and are recorded unchanged.
    """
    source = op.args[INPUT]
    return isinstance(source, Ref) and tape.storages[tape.values[source.value].storage].device == CPU


def is_plain(value: Value) -> bool:
    """Return whether a value is contiguous in its storage.

    For other layouts the kernels use the strides.
    """
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def _without_input(tape: Tape, op: RecordedOp, wants_input: bool, wants_bias: bool) -> RecordedOp:
    args, outputs = list(op.args), op.outputs
    if len(outputs) > wants_input + wants_bias:
        args[MASK] = (wants_input, True, wants_bias)
        outputs = (*outputs[:-2], None, outputs[-1])
    source, weight = args[INPUT], args[WEIGHT]
    if isinstance(source, Ref) and isinstance(weight, Ref):
        value, lender = tape.values[source.value], tape.values[weight.value]
        if is_plain(value) and value.dtype == lender.dtype:
            args[INPUT] = Ref(len(tape.values))
            tape.values.append(Value(lender.storage, value.dtype, value.shape, (0,) * len(value.shape), lender.offset))
    return replace(op, args=tuple(args), outputs=outputs)

"""Check what operators do not check themselves.

Torch trusts autograd to call them with tensors that fit each other.

A bundle may call them with anything, and these read or write out of bounds then. What they are called with is checked
here, by the layouts that the graph declares; indices whose values nobody checks must be those that the operator's own
forward pass made or took, or a copy of them. The list is what `tests/attack/operators.py` found in torch 2.13.
"""

from port_planner.ir.graph import GraphError, Ref, StepGraph
from port_planner.ir.operands import images, layers, losses, recurrent, tables, updates
from port_planner.ir.operands.call import UnfitError, Writers, call_of
from port_planner.operators import operator_of, overload_name

_RULES = {**layers.RULES, **images.RULES, **losses.RULES, **tables.RULES, **recurrent.RULES, **updates.RULES}

_CHECKED_OVERLOAD = "aten::_ctc_loss_backward.Tensor"
"""The only overload with a suffix whose arguments are checked; other overloads that need checks are rejected."""


def verify_operands(graph: StepGraph) -> None:
    """Raise GraphError if an operator would be called with operands that do not fit.

    Those that it does not check itself.

    `graph` is in the order in which it is run.
    """
    writers = Writers(graph)
    for i, op in enumerate(graph.ops):
        check = operator_of(op.name).check
        if check is not None:
            try:
                fits = (not overload_name(op.name) or op.name == _CHECKED_OVERLOAD) and _RULES[check](
                    call_of(writers, i)
                )
            except (
                UnfitError,
                IndexError,
                TypeError,
                ValueError,
            ):  # too few dimensions, or not a number where one belongs
                fits = False
            if not fits:
                shapes = ", ".join(
                    str(list(graph.values[a.value].shape))
                    for a in (*op.args, *(a for _, a in op.kwargs))
                    if isinstance(a, Ref)
                )
                raise GraphError(
                    f"op {i} ({op.name}) takes tensors of shapes {shapes} that do not fit each other, or indices "
                    "that nothing checked. In a bundle, this means damage or an attack; plan the job again. While "
                    "recording a job, something intervenes between forward and backward pass, such as "
                    "saved_tensors_hooks; leave it out, or run the program with `port-agent exec`"
                )

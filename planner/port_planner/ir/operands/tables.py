"""The operands of lookups in tables."""

from port_planner.ir.graph import Ref, Value
from port_planner.ir.operands.call import Fits, GraphCall, whole
from port_planner.operators.row import ArgumentCheck

_COUNTED = "aten::arange.start_step"


def _embedding(call: GraphCall) -> bool:
    """Check an embedding.

    The forward pass checks every index, or two operators have bounded each; the backward pass checks none.
    """
    rows = call.size("num_weights")
    checked = [f for f in call.taken_by("indices", "embedding") if f.shape("weight")[:1] == (rows,)]
    return (bool(checked) or _within(call, "indices", rows)) and call.shape("grad_output")[:-1] == call.shape("indices")


def _within(call: GraphCall, name: str, rows: int) -> bool:
    """Return whether each of these numbers is at least 0 and less than `rows`, according to the two
    operators that created them.
    """
    upper = _bounded(call, call.value(name), "aten::clamp_max")
    lower = None if upper is None else _bounded(call, upper[0], "aten::clamp_min")
    return upper is not None and lower is not None and lower[1] == 0 <= upper[1] < rows


def _bounded(call: GraphCall, value: Value | None, name: str) -> tuple[Value, int] | None:
    """Return the input and the integer from which this operator created a value; None if it did not.

    Nothing else writes the value.
    """
    op = call.maker(value)
    if op is None or op.name != name or op.kwargs or len(op.args) != 2:
        return None
    source, number = op.args
    return (call.graph.graph.values[source.value], whole(number)) if isinstance(source, Ref) else None


def _embedding_bag(call: GraphCall) -> bool:
    """Check an embedding bag.

    The kernel does not check where bags begin, so all must have equal length, as `arange` counts for indices in rows.
    """
    (count,), op = call.shape("indices"), call.maker(call.value("offsets"))
    if op is None or op.name != _COUNTED:
        return False
    first, end, length = map(whole, op.args)
    return first == 0 < length and 0 < end <= count and call.all_of("per_sample_weights", (count,))


def _embedding_bag_backward(call: GraphCall) -> bool:
    """Check a bag's backward pass.

    The forward pass checks indices and offsets and returns the bag of each index; the backward pass uses its results.
    """
    made = call.made_by("offset2bag", "_embedding_bag", 1)
    weight, mode = made.shape("weight"), call.size("mode")
    taken = all(
        made.index in [c.index for c in call.taken_by(name, "_embedding_bag")] for name in ("indices", "offsets")
    )
    if "num_weights" in call.arguments:
        outputs = {"bag_size": 2, "maximum_indices": 3}
        counted = all(call.made_by(name, "_embedding_bag", o).index == made.index for name, o in outputs.items())
        taken = taken and counted and call.size("num_weights") == weight[0] and call.arguments.get("sparse") is False
    padding = [c.arguments.get("padding_idx", -1) for c in (call, made)]
    same = mode == made.arguments.get("mode", 0) and padding[0] == padding[1]
    result = call.graph.graph.ops[made.index].outputs[0]
    bags = None if result is None else call.graph.graph.values[result].shape
    return (
        taken
        and same
        and call.shape("grad") == bags
        and call.all_of("weight", weight)
        and call.all_of("per_sample_weights", made.shape("indices"))
    )


RULES: dict[ArgumentCheck, Fits] = {
    ArgumentCheck.EMBEDDING: _embedding,
    ArgumentCheck.EMBEDDING_BAG: _embedding_bag,
    ArgumentCheck.EMBEDDING_BAG_BACKWARD: _embedding_bag_backward,
}

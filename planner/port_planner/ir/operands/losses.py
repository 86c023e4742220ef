"""The operands of losses and distances."""

import math
from itertools import zip_longest

from port_planner.ir.graph import Ref, Value
from port_planner.ir.operands.call import Fits, GraphCall, Shape, Writers, call_of
from port_planner.operators.row import ArgumentCheck


def _nll_loss(call: GraphCall) -> bool:
    """Check a loss over classes. The forward pass checks every label, but the backward pass none."""
    plain, forward = ("ignore_index", "reduction"), call.name.replace("backward", "forward")
    checked = [
        f
        for f in call.taken_by("target", forward)
        if f.shape("self") == call.shape("self") and all(f.arguments.get(n) == call.arguments.get(n) for n in plain)
    ]
    classes, rows = call.shape("self")[-1 if forward == "nll_loss_forward" else 1], call.shape("target")
    grad = rows if call.arguments.get("reduction") == 0 else ()
    seen = bool(checked) or (forward == "nll_loss_forward" and _labels_seen_in_tiles(call))
    return (
        seen
        and call.all_of("weight", (classes,))
        and call.shape("grad_output") == grad
        and math.prod(call.shape("total_weight")) == 1
    )


def _labels_seen_in_tiles(call: GraphCall) -> bool:
    """Return whether these labels, which are a tile of all, were checked as `port_planner.tiling.tiles` requires.

    `gather` with the non-negative labels raises an error if one is not a column. A one-class loss with the negative
    labels raises an error if one is not the ignored label.
    """
    wanted, classes = call.value("target"), call.shape("self")
    if wanted is None or len(wanted.shape) != 1 or wanted.stride != (1,):
        return False
    begin = max(call.graph.touching[wanted.storage], default=-1) + 1
    gathered, ignored = list[Value](), False
    for i in range(begin, call.index):
        taken = _outcome(call.graph, i, "aten::clamp_min")
        if taken is not None and _gathers(call, i, taken[1], (*taken[0].shape, *classes[1:])):
            gathered.append(taken[0])
        taken = _outcome(call.graph, i, "aten::clamp_max")
        ignored = ignored or (taken is not None and _lies_in(wanted, taken[0]) and _ignores(call, i, taken[1]))
    return ignored and _covered(wanted, gathered)


def _covered(wanted: Value, tiles: list[Value]) -> bool:
    """Return whether tiles of one row of elements together cover all of another."""
    reached, end = wanted.offset, wanted.offset + wanted.shape[0]
    alike = [p for p in tiles if (p.storage, p.dtype, p.stride) == (wanted.storage, wanted.dtype, wanted.stride)]
    for tile in sorted(alike, key=lambda p: p.offset):
        if tile.offset <= reached:
            reached = max(reached, tile.offset + tile.shape[0])
    return reached >= end


def _outcome(graph: Writers, i: int, name: str) -> tuple[Value, Value] | None:
    """Return the value that op `i` bounds by 0, and its result, if it is this operator and
    nothing else writes the result.
    """
    op, values = graph.graph.ops[i], graph.graph.values
    if op.name != name or op.kwargs or len(op.args) != 2 or op.args[1] != 0 or isinstance(op.args[1], bool):
        return None
    source, result = op.args[0], op.outputs[0]
    if not isinstance(source, Ref) or result is None or graph.touching[values[result].storage] != [i]:
        return None
    return values[source.value], values[result]


def _gathers(call: GraphCall, after: int, index: Value, table: Shape) -> bool:
    column = Value(index.storage, index.dtype, (*index.shape, 1), (1, 1), 0)
    values = call.graph.graph.values
    return index.offset == 0 and any(
        op.name == "aten::gather"
        and op.args[1] == 1
        and [values[a.value] for a in op.args if isinstance(a, Ref)][1:] == [column]
        and isinstance(op.args[0], Ref)
        and values[op.args[0].value].shape == table
        for op in call.graph.graph.ops[after : call.index]
    )


def _ignores(call: GraphCall, after: int, target: Value) -> bool:
    for i in range(after, call.index):
        if call.graph.graph.ops[i].name == "aten::nll_loss_forward":
            loss = call_of(call.graph, i)
            rows = loss.shape("self")
            alike = all(loss.arguments.get(n) == call.arguments.get(n) for n in ("ignore_index", "reduction"))
            if loss.value("target") == target and alike and rows == (*target.shape, 1):
                return True
    return False


def _lies_in(tile: Value, whole: Value) -> bool:
    """Return whether a row of elements is part of another."""
    alike = (tile.storage, tile.dtype, tile.stride) == (whole.storage, whole.dtype, whole.stride)
    return alike and whole.offset <= tile.offset and tile.offset + tile.shape[0] <= whole.offset + whole.shape[0]


def _margin_loss(call: GraphCall) -> bool:
    """Check a margin loss. A loss for every row has a gradient for each row, others have one gradient."""
    every = call.arguments.get("reduction", 1) == 0
    return math.prod(call.shape("grad_output")) == (math.prod(call.shape("self")[:-1]) if every else 1)


def _distances(call: GraphCall) -> bool:
    one, other, grad = call.shape("x1"), call.shape("x2"), call.shape("grad")
    batch = [*zip_longest(one[-3::-1], other[-3::-1], fillvalue=1)]
    alike = min(len(one), len(other)) > 1 and one[-1] == other[-1] and call.shape("cdist") == grad
    wanted = tuple(max(pair) if 0 not in pair else 0 for pair in batch)[::-1]
    broadcasts = all(a == b or 1 in (a, b) for a, b in batch)
    return alike and broadcasts and grad == (*wanted, one[-2], other[-2])


def _distances_of_pairs(call: GraphCall) -> bool:
    rows, _ = call.shape("self")
    return rows > 0 and call.shape("grad") == call.shape("pdist") == (rows * (rows - 1) // 2,)


def _ctc_loss(call: GraphCall) -> bool:
    """Check a CTC loss.

    The forward pass checks lengths, after the labels were checked; the backward pass uses the checked values.
    """
    made, likelihood = call.made_by("log_alpha", "_ctc_loss", 1), call.made_by("neg_log_likelihood", "_ctc_loss", 0)
    lengths = ("input_lengths", "target_lengths")
    given = [call.taken_by(name, "_ctc_loss") for name in ("targets", *lengths) if call.value(name) is not None]
    listed = [(call.arguments.get(name), made.arguments.get(name)) for name in lengths if call.value(name) is None]
    return (
        likelihood.index == made.index
        and all(made.index in [c.index for c in taken] for taken in given)
        and all(mine == its for mine, its in listed)
        and call.arguments.get("blank") == made.arguments.get("blank", 0)
        and call.shape("log_probs") == made.shape("log_probs")
        and call.shape("grad") == call.shape("neg_log_likelihood")
    )


RULES: dict[ArgumentCheck, Fits] = {
    ArgumentCheck.NLL_LOSS: _nll_loss,
    ArgumentCheck.MARGIN_LOSS: _margin_loss,
    ArgumentCheck.CTC_LOSS: _ctc_loss,
    ArgumentCheck.PAIRS: lambda call: len(call.shape("self")) == 2,
    ArgumentCheck.DISTANCES_OF_PAIRS: _distances_of_pairs,
    ArgumentCheck.DISTANCES: _distances,
}

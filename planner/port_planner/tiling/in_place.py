"""Pointwise operators that overwrite an operand that is no longer needed.

While such an operator runs, one tensor exists instead of two. Only operands that no other operator reads qualify, so
that everything remains recomputable.
"""

from dataclasses import replace

from port_planner.ir.graph import ITEM_BYTES, Argument, Phase, Ref, Role, StepGraph, Value, operands
from port_planner.operators import base_name, operator_of, overload_name
from port_planner.tiling.rewriting import GraphBuilder, Replacement, RewrittenGraph, lying


def write_in_place(graph: StepGraph, without: frozenset[int] = frozenset()) -> RewrittenGraph:
    """Return the graph with every pointwise operator in place where that is possible, except the ops in `without`."""
    builder = GraphBuilder(graph)
    moved: dict[int, int] = {}
    replacements = list[Replacement]()

    for i, op in enumerate(graph.ops):
        place = None if i in without else _overwritten(graph, i)
        if place is None:
            builder.add(lying(builder, graph, op, moved))
            continue
        swapped = (op.args[place], *op.args[:place], *op.args[place + 1 :])
        taken, (result,) = _value(graph, op.args[place]), op.outputs
        if taken is None or result is None:
            continue
        target = moved.get(taken.storage, taken.storage)
        moved[graph.values[result].storage] = target
        name, dot, overload = op.name.partition(".")
        builder.add(
            replace(
                lying(builder, graph, replace(op, args=swapped), moved),
                name=f"{name}_{dot}{overload}",
                writes=(target,),
            )
        )
        replacements.append(Replacement((i,), (len(builder.ops) - 1,), f"{base_name(op.name)} in place"))
    return RewrittenGraph(builder.graph(), tuple(replacements), moved=moved)


def _value(graph: StepGraph, argument: Argument) -> Value | None:
    return graph.values[argument.value] if isinstance(argument, Ref) else None


def _overwritten(graph: StepGraph, i: int) -> int | None:
    """Return the index of the argument of op `i` that its result can overwrite, or None."""
    op = graph.ops[i]
    known = operator_of(op.name)
    if not known.in_place or op.writes or op.phase is Phase.UPDATE or len(op.outputs) != 1:
        return None
    (v,) = op.outputs
    if v is None or graph.values[v].storage not in graph.creates[i] or graph.values[v].storage in graph.kept:
        return None
    either = overload_name(op.name) in known.commutes and not op.kwargs and len(op.args) == len(("self", "other"))
    for place in (0, 1) if either else (0,):
        taken = _value(graph, op.args[place])
        if taken is not None and is_last_reader(graph, i, taken.storage) and lies_as(graph, taken, graph.values[v]):
            return place
    return None


def is_last_reader(graph: StepGraph, i: int, s: int) -> bool:
    """Return whether op `i` reads a temporary storage once, and is the only reader that does not also change it."""
    storage, op = graph.storages[s], graph.ops[i]
    once = sum(graph.values[v].storage == s for v in operands(op)) == 1
    others = set(graph.uses[s]) - set(graph.writers[s])
    return storage.role is Role.TEMPORARY and s not in graph.kept and once and others == {i} and graph.uses[s][-1] == i


def lies_as(graph: StepGraph, one: Value, other: Value) -> bool:
    """Return whether two tensors fill their storages, of one size, in the same way."""
    alike = (one.dtype, one.shape, one.stride, one.offset) == (other.dtype, other.shape, other.stride, other.offset)
    sizes = {graph.storages[one.storage].nbytes, graph.storages[other.storage].nbytes}
    count = ITEM_BYTES[one.dtype]
    for n in one.shape:
        count *= n
    return alike and sizes == {count}

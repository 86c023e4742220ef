"""Operators that sum over the dimension along which they may be cut; used only if different last digits are allowed.

Gradients of weights, of biases and of a layer norm's factors are sums over rows or samples. Cut there, each tile's sum
is added to the previous ones, in another order than the whole's. Tensors that only such a sum reads whole then never
need to exist whole.
"""

from collections.abc import Mapping

from port_planner.ir.graph import Op, Ref, StepGraph
from port_planner.operators import base_name, operator_of
from port_planner.operators.row import TileRule
from port_planner.tiling.algebra import all_leading, has_two_tiles, leading, tile_dimensions
from port_planner.tiling.rewriting import row_major

ADDED = ("float32", "float64")
"""Types in which partial sums are added: narrower ones would lose the precision of the whole's kernel."""

CLOSE = 1e-4
"""Largest difference of sums in different orders, as a share of the largest number: far more than rounding,
far less than a missing row.
"""


def dimensions(graph: StepGraph, op: Op, *, sums: bool) -> dict[int, int] | None:
    """Return the cut dimension of each value that is cut when the op runs in tiles, or None if it cannot.

    With `sums`, outputs not listed are sums over the tiles, if the op cannot be cut exactly.
    """
    exact = tile_dimensions(graph, op)
    return exact if exact is not None or not sums else _summed(graph, op)


def sums_of(op: Op, dims: Mapping[int, int]) -> list[int]:
    """Return the outputs of an op that are sums over the dimension cut according to `dims`."""
    return [v for v in op.outputs if v is not None and v not in dims]


def rule_of(op: Op, dims: Mapping[int, int]) -> TileRule:
    """Return the rule by which an op is cut according to `dims`; raise ValueError if there is none."""
    known = operator_of(op.name)
    rule = known.cut_of_sum if sums_of(op, dims) else known.cut
    if rule is None:
        raise ValueError(f"{op.name} is not cut")
    return rule


def _summed(graph: StepGraph, op: Op) -> dict[int, int] | None:
    rule = operator_of(op.name).cut_of_sum
    if rule is None or op.kwargs or op.random or op.writes:
        return None
    chosen = [a.value for k in rule.cut if k < len(op.args) and isinstance(a := op.args[k], Ref)]
    found = all_leading(graph, chosen) if len(chosen) == len(rule.cut) else None
    if found is None or not _sums_along(graph, op, found, chosen):
        return None
    parts = [graph.values[v] for v in sums_of(op, found)]
    alone = all(v.dtype in ADDED and v.stride == row_major(v.shape) and v.offset == 0 for v in parts)
    return found if parts and alone and has_two_tiles(graph, rule, found) else None


def _sums_along(graph: StepGraph, op: Op, found: dict[int, int], chosen: list[int]) -> bool:
    """Return whether the op sums over the outermost dimension of the `chosen` values; adds equally long results to
    `found`.
    """
    dims, rank = [found[v] for v in chosen], len(graph.values[chosen[0]].shape)
    match base_name(op.name):
        case "mm":
            return dims == [1, 0]
        case "sum":
            axes = op.args[1] if len(op.args) > 1 else None
            return isinstance(axes, tuple) and dims[0] in {a % rank for a in axes if isinstance(a, int)}
        case "convolution_backward":
            wanted = op.args[-1]
            return set(dims) == {0} and isinstance(wanted, tuple) and wanted[0] is False
        case _:
            over, by_input = op.args[2], op.outputs[0]
            d = None if by_input is None else leading(graph, by_input)
            if by_input is None or d is None or not isinstance(over, tuple):
                return False
            found[by_input] = d
            return all(k < rank - len(over) for k in (d, *dims))

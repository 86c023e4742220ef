"""Find which operators must run again to rematerialize a storage, and in which form.

The form ensures that no side effect occurs twice.
"""

from collections.abc import Iterable

from port_planner.ir.graph import Argument, Op, Role, StepGraph, references
from port_planner.operators import operator_of

_TRAINING = 5
"""The index of batch norm's argument that enables updates of running statistics."""


def pure_arguments(op: Op) -> tuple[Argument, ...]:
    """Return the positional arguments with which `op` gives the same outputs without its side effect.

    In training mode, batch norm normalises with the batch's own statistics and only updates the running ones, so
    without these it computes the same outputs. (torch.utils.checkpoint runs it unchanged and updates them twice.)
    """
    if operator_of(op.name).hidden_writes and op.args[_TRAINING] is True:
        return (*op.args[:3], None, None, *op.args[5:])
    return op.args


def effective_operands(graph: StepGraph, index: int) -> tuple[int, ...]:
    """Return the distinct storages that a rerun of op `index` reads."""
    return graph.once(_effective_operands)[index]


def _effective_operands(graph: StepGraph) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted({graph.values[v].storage for a in _effective_arguments(op) for v in references(a)}))
        for op in graph.ops
    )


def _effective_arguments(op: Op) -> tuple[Argument, ...]:
    return (*pure_arguments(op), *(a for _, a in op.kwargs))


def rematerialization_ops(graph: StepGraph, wanted: Iterable[tuple[int, int]]) -> list[int]:
    """Return the ops, ascending, that write each wanted (storage, after) up to and including op `after`."""
    return sorted({w for s, after in wanted for w in graph.writers[s] if w <= after})


def rematerializable(graph: StepGraph, storage: int, after: int) -> bool:
    """Return whether `storage`, with its contents after op `after`, can be rematerialized at
    all (if the inputs permit).

    Only temporaries can. Each of their writers may change only temporaries that it writes, its own storage, or running
    statistics that `pure_arguments` leaves out.
    """
    if graph.storages[storage].role is not Role.TEMPORARY:
        return False
    writers = [w for w in graph.writers[storage] if w <= after]
    return bool(writers) and all(_side_effects(graph, w) <= {storage} for w in writers)


def _side_effects(graph: StepGraph, index: int) -> set[int]:
    op = graph.ops[index]
    kept = set(effective_operands(graph, index))
    return {s for s in op.writes if s in kept}

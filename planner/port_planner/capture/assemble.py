"""Assemble a recorded tape into a step graph.

Updates are as early as possible, dead ops are removed, and ops are numbered from zero.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from port_planner.capture.masked_gradients import as_kernels_compute
from port_planner.capture.recomputed import lay_into, merge_recomputed
from port_planner.capture.recorder import RecordedOp, Tape
from port_planner.ir.allowed_operators import only_checks
from port_planner.ir.graph import (
    ITEM_BYTES,
    PERSISTENT,
    Argument,
    Op,
    Phase,
    Ref,
    Role,
    Scalar,
    StepGraph,
    Storage,
    Value,
    operands,
    with_operands,
)


@dataclass(frozen=True, slots=True)
class UpdateOps:
    """The operators after the gradients; keys and values of the maps are value indices of the tape.

    `gradients`: parameter -> its gradient. `accumulators`: parameter -> the buffer that sums gradients of
    micro-batches. `updates`: parameter -> its optimizer's ops. `clipping`: ops of the global-norm clip. `scalars`: how
    many per-step scalars the updates use. `after`: ops that follow all updates.
    """

    gradients: Mapping[int, int]
    accumulators: Mapping[int, int]
    updates: Mapping[int, tuple[RecordedOp, ...]]
    clipping: tuple[RecordedOp, ...]
    scalars: int
    after: tuple[RecordedOp, ...] = ()

    def after_numbers(self, count: int) -> "UpdateOps":
        """Return the same with the slots of its scalars moved behind `count` others."""
        moved = {p: tuple(_with_later_slots(op, count) for op in ops) for p, ops in self.updates.items()}
        return replace(self, updates=moved) if count else self


def _with_later_slots(op: RecordedOp, count: int) -> RecordedOp:
    def later(argument: Argument) -> Argument:
        if isinstance(argument, Scalar):
            return Scalar(argument.index + count)
        return tuple(map(later, argument)) if isinstance(argument, tuple) else argument

    return replace(op, args=tuple(map(later, op.args)), kwargs=tuple((name, later(a)) for name, a in op.kwargs))


def assemble(
    tape: Tape,
    batch: tuple[int, ...],
    loss: int,
    aux: tuple[int, ...],
    update_ops: UpdateOps | None,
    kind: str,
    numbers: int = 0,
) -> tuple[StepGraph, dict[str, torch.Tensor]]:
    """Return the graph of `kind` and the contents of its constants.

    `kind`: "step", "first", "next", "last" or "eval"; `numbers`: how many per-step scalars the tape uses itself.
    """
    ops = [replace(op) for op in tape.ops if op.phase is not Phase.UPDATE]
    tape = Tape(list(tape.storages), list(tape.values), ops, tape.draws_from)
    _copy_changed_constants(tape)
    kept = {tape.values[v].storage for v in (loss, *aux)}
    gradients = set() if update_ops is None else {tape.values[g].storage for g in update_ops.gradients.values()}
    merge_recomputed(tape, kept | gradients)
    as_kernels_compute(tape)
    merged = _accumulate_in_place(tape, kept, gradients)
    update_ops = None if update_ops is None else _following(update_ops, merged)
    ops = tape.ops if update_ops is None else _with_updates(tape, update_ops, kind)
    ops = _alive(tape, ops, kept)
    scalars = update_ops.scalars if update_ops and kind in ("step", "last") else 0
    return _renumber(tape, ops, batch, loss, aux, numbers + scalars)


def _copy_changed_constants(tape: Tape) -> None:
    """Make the step change a copy of each constant that it recreates every time; the copy begins with the
    same contents in each step.
    """
    changed = {s for op in tape.ops for s in op.writes if tape.storages[s].role is Role.CONSTANT}
    for s in sorted(changed):
        constant, storage = len(tape.storages), tape.storages[s]
        tape.storages.append(replace(storage, name=f"constant{constant}"))
        tape.storages[s] = replace(storage, role=Role.TEMPORARY, name="", data=None)
        like = next(value for value in tape.values if value.storage == s)
        items = storage.nbytes // ITEM_BYTES[like.dtype]
        source, copy = len(tape.values), len(tape.values) + 1
        tape.values += [Value(at, like.dtype, (items,), (1,), 0) for at in (constant, s)]
        first = next(i for i, op in enumerate(tape.ops) if s in _touched(tape, op))
        phase = tape.ops[first].phase
        tape.ops.insert(first, RecordedOp("aten::clone", (Ref(source),), (), (copy,), (), phase, False))


def _touched(tape: Tape, op: RecordedOp) -> set[int]:
    values = [*operands(op), *(v for v in op.outputs if v is not None)]
    return {tape.values[v].storage for v in values}


def _last_touch(tape: Tape) -> dict[int, int]:
    return {s: i for i, op in enumerate(tape.ops) for s in _touched(tape, op)}


# -- a + b where a is no longer needed: a += b


def _accumulate_in_place(tape: Tape, kept: set[int], gradients: set[int]) -> dict[int, int]:
    """Make sums of gradients overwrite a summand whose lifetime ends there.

    Autograd does the same when it is not recorded.

    Addition is commutative to the bit, so either summand may be the one to be overwritten. Returns, for each storage
    that disappeared, the one that replaced it.
    """
    merged: dict[int, int] = {}
    last = _last_touch(tape)
    first = {s: i for i, op in reversed(list(enumerate(tape.ops))) for s in _touched(tape, op)}
    for i, op in enumerate(tape.ops):
        if op.phase is not Phase.BACKWARD or op.name != "aten::add.Tensor" or len(op.args) != 2 or op.kwargs:
            continue
        left, right = op.args
        if not isinstance(left, Ref) or not isinstance(right, Ref) or op.outputs[0] is None:
            continue
        pair = [(left, right), (right, left)]
        pair.sort(key=lambda p: -first[tape.values[p[0].value].storage])  # the younger one: the older may be on flash
        for target, other in pair:
            t, out = tape.values[target.value], tape.values[op.outputs[0]]
            mine = tape.storages[t.storage]
            same = replace(out, storage=t.storage) == t and mine.nbytes == tape.storages[out.storage].nbytes
            free = mine.role is Role.TEMPORARY and last[t.storage] == i and t.storage not in kept | gradients
            if same and free and tape.values[other.value].storage != t.storage:
                tape.ops[i] = RecordedOp(
                    "aten::add_.Tensor", (target, other), (), op.outputs, (t.storage,), op.phase, False
                )
                lay_into(tape, out.storage, t.storage)
                merged = {gone: t.storage if into == out.storage else into for gone, into in merged.items()}
                merged[out.storage] = t.storage
                last[t.storage] = last[out.storage]
                break
    return merged


def _following(update_ops: UpdateOps, merged: Mapping[int, int]) -> UpdateOps:
    """Return the update ops with their operators writing to the merged gradients' storages (tied weights, clipping)."""

    def follow(op: RecordedOp) -> RecordedOp:
        return replace(op, writes=tuple(sorted({merged.get(s, s) for s in op.writes})))

    updates = {parameter: tuple(map(follow, ops)) for parameter, ops in update_ops.updates.items()}
    return replace(update_ops, updates=updates, clipping=tuple(map(follow, update_ops.clipping)))


# -- updates


def _with_updates(tape: Tape, update_ops: UpdateOps, kind: str) -> list[RecordedOp]:
    """Return the tape's ops with each parameter's update as soon as nothing needs its old value any more."""
    last = _last_touch(tape)
    after: dict[int, list[RecordedOp]] = defaultdict(list)
    tail: list[RecordedOp] = []
    updating = kind in ("step", "last")
    clipping = update_ops.clipping if updating else ()
    scaling = {next(operands(op)): op for op in clipping if op.writes}
    on_storage = Counter(tape.values[gradient].storage for gradient in update_ops.gradients.values())
    moved: set[int] = set()
    touching: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(tape.ops):
        for s in _touched(tape, op):
            touching[s].append(i)
    for parameter, gradient in update_ops.gradients.items():
        storage = tape.values[gradient].storage
        final = max(last.get(storage, 0), 0)
        source = gradient
        if update_ops.accumulators:
            source = update_ops.accumulators[parameter]
            after[final].append(_add_into(tape, source, gradient, first=kind == "first"))
        if not updating:
            continue
        after[final] += [op for op in clipping if not op.writes and source in operands(op)]
        update = list(update_ops.updates[parameter])
        if clipping:
            tail += [scaling[source], *update]
            continue
        ready = max(final, last.get(tape.values[parameter].storage, 0))
        alone = source is gradient and on_storage[storage] == 1
        summed = _summing_op(tape, storage, touching, moved) if alone else None
        if summed is not None:
            moved.add(summed)
            update.insert(0, replace(tape.ops[summed], phase=Phase.UPDATE))
        after[ready] += update
    whole = [op for op in clipping if not op.writes and not _reads_gradient(tape, op, update_ops)]
    ops: list[RecordedOp] = []
    for i, op in enumerate(tape.ops):
        if i not in moved:
            ops.append(op)
        ops += after.get(i, [])
    return [*ops, *whole, *tail, *(update_ops.after if updating else ())]


def _reads_gradient(tape: Tape, op: RecordedOp, update_ops: UpdateOps) -> bool:
    sources = update_ops.accumulators or update_ops.gradients
    return bool({tape.values[v].storage for v in sources.values()} & _touched(tape, op))


def _add_into(tape: Tape, buffer: int, gradient: int, *, first: bool) -> RecordedOp:
    name = "aten::copy_" if first else "aten::add_.Tensor"
    storage = tape.values[buffer].storage
    return RecordedOp(name, (Ref(buffer), Ref(gradient)), (), (buffer,), (storage,), Phase.BACKWARD, False)


def _summing_op(tape: Tape, gradient: int, touching: Mapping[int, list[int]], moved: set[int]) -> int | None:
    """Return the op that creates a gradient as the sum of two, if no later op touches it.

    `touching`: the indices of the ops that touch each storage, ascending.
    """
    last = touching[gradient][-1]
    op = tape.ops[last]
    sums = op.name.replace("add_", "add") == "aten::add.Tensor" and op.phase is Phase.BACKWARD
    produces = any(v is not None and tape.values[v].storage == gradient for v in op.outputs)
    others = _touched(tape, op) - {gradient}
    later = any(touching[s][-1] > last for s in others)
    return last if sums and produces and last not in moved and not later else None


# -- what remains


def _alive(tape: Tape, ops: list[RecordedOp], kept: set[int]) -> list[RecordedOp]:
    """Drop ops whose results nothing reads.

    Ops that change persistent contents, draw random numbers or check something stay.
    """
    needed = set(kept)
    result = []
    for op in reversed(ops):
        made = {tape.values[v].storage for v in op.outputs if v is not None} | set(op.writes)
        lasting = any(tape.storages[s].role in PERSISTENT for s in op.writes)
        if made & needed or lasting or op.random or only_checks(op.name):
            needed |= _touched(tape, op)
            result.append(op)
    return result[::-1]


def _renumber(
    tape: Tape, ops: list[RecordedOp], batch: tuple[int, ...], loss: int, aux: tuple[int, ...], scalars: int
) -> tuple[StepGraph, dict[str, torch.Tensor]]:
    used = dict.fromkeys(batch)
    for op in ops:
        used.update(dict.fromkeys(operands(op)))
    read = set(used) | {loss, *aux}
    values: dict[int, int] = {}
    storages: dict[int, int] = {}

    def value(old: int) -> int:
        if old not in values:
            storages.setdefault(tape.values[old].storage, len(storages))
            values[old] = len(values)
        return values[old]

    for v in batch:
        value(v)
    new_ops = []
    alive = {tape.values[r].storage for r in read}
    for op in ops:
        renumbered = with_operands(op, value)
        outputs = tuple(
            value(v) if v is not None and (v in read or tape.values[v].storage in alive) else None for v in op.outputs
        )
        if not any(o is not None for o in outputs) and op.outputs and op.outputs[0] is not None:
            outputs = (value(op.outputs[0]), *outputs[1:])
        writes = tuple(sorted(storages[s] for s in op.writes))
        new_ops.append(Op(op.name, renumbered.args, renumbered.kwargs, outputs, writes, op.phase, op.random))
    loss, aux = value(loss), tuple(value(v) for v in aux)
    old_storages = sorted(storages, key=lambda s: storages[s])
    graph = StepGraph(
        storages=tuple(Storage(t.nbytes, t.role, t.name, t.device) for t in (tape.storages[s] for s in old_storages)),
        values=tuple(
            Value(storages[v.storage], v.dtype, v.shape, v.stride, v.offset)
            for v in (tape.values[old] for old in sorted(values, key=lambda v: values[v]))
        ),
        ops=tuple(new_ops),
        batch=tuple(value(v) for v in batch),
        loss=loss,
        aux=aux,
        scalars=scalars,
    )
    constants = {}
    for s in old_storages:
        data = tape.storages[s].data
        if data is not None:
            constants[f"constant/{tape.storages[s].name}"] = data
    return graph, constants

"""Capture a training step as step graphs, and the tensors with which they start.

It is recorded from a model, a loss function, an optimizer and one batch.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from port_planner.base.errors import CaptureError, place_of_function
from port_planner.capture.assemble import UpdateOps, assemble
from port_planner.capture.changed_line import line_of_change
from port_planner.capture.cross_step_state import StepResults
from port_planner.capture.numbers import put_slots
from port_planner.capture.own_optimizer import record_update, with_slots
from port_planner.capture.plain_formulas import plain_formulas
from port_planner.capture.python_state import StateOfCode, changed, python_state
from port_planner.capture.reads import watch_reads
from port_planner.capture.recorder import RecordedOp, StepRecorder, Tape
from port_planner.capture.rerecord_check import (
    constants_of,
    other_generators_untouched,
    require_same,
    require_same_but_for_sums,
)
from port_planner.capture.step_hooks import of_one_parameter, record_hooks_after_steps
from port_planner.ir.allowed_operators import OperatorError, check_operator
from port_planner.ir.bundle.manifest import TensorLayout
from port_planner.ir.graph import PERSISTENT, Phase, Ref, Role, StepGraph, storage_key, verify_graph
from port_planner.ir.known_steps import KnownShape
from port_planner.ir.lowering import optimizer_scalars
from port_planner.ir.lowering.optimizer_scalars import OptimizerSpec, Schedule, hyperparameters
from port_planner.ir.torch_device import generator_states, kinds_of, restore_generators
from port_planner.torch_compat.autograd import NODES_THAT_ASK_FOR_MODES
from port_planner.torch_compat.contentless import without_contents
from port_planner.torch_compat.modes import pytree, without_modes
from port_planner.torch_compat.optimizers import hooks_after_steps, skip_fused_check
from port_planner.torch_compat.tensors import set_buffer

LossFunction = Callable[..., Any]
"""`loss_fn(model, *batch)` returns a scalar tensor, or a pair of it and any structure of tensors."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Contents of a tensor that need not be stored, because one value is everywhere."""

    value: float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Capture:
    """A captured step.

    `graphs`: "step", or "first"/"next"/"last" where gradients are accumulated over micro-batches, or "eval". Persistent
    storages have the same (role, name) in all of them. `tensors`: initial contents of each persistent storage and
    constant, by key "role/name"; `layouts`: their layouts. `loss`: the loss on this batch. `constants`: tensors that
    the step reads and that belong neither to the model nor to the batch, in words. `tape`: the recording, if
    `record_again` must compare it with others. `other_formulas`: as in `Tape`.
    """

    graphs: Mapping[str, StepGraph]
    tensors: Mapping[str, torch.Tensor | Fill]
    optimizer: OptimizerSpec | None
    layouts: Mapping[str, TensorLayout]
    loss: float
    constants: tuple[str, ...]
    tape: Tape | None = None
    other_formulas: frozenset[str] = frozenset()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Repetition:
    """How to check that a step is the same each time.

    `batches`: on which the step is recorded again with different random numbers and must be the same. `later`:
    leave them to `record_again` if possible, which excludes steps that change Python variables or keep tensors.
    `results`: results of steps recorded earlier. `known`: the program's steps until the end of training, which then
    need not prove it themselves.
    """

    batches: Sequence[tuple[Any, ...]] = ()
    later: bool = False
    results: StepResults | None = None
    known: KnownShape | None = None


_NONE = Repetition()


def capture_step(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    repetition: Repetition = _NONE,
    schedule: Schedule = (),
) -> Capture:
    """Record one training step of `model` on `batch`; model, optimizer and generators stay unchanged.

    `clip_grad_norm`: clip the global norm as torch.nn.utils.clip_grad_norm_ does. `accumulate`: micro-batches whose
    gradients are summed before an update. `schedule`: the changes of the optimizer's groups before each future
    update, for an optimizer outside torch. Raises CaptureError if the step cannot be recorded faithfully.
    """
    if accumulate < 1:
        raise CaptureError(f"accumulate={accumulate}; it must be 1 or more")
    spec = _described(optimizer)
    known, is_known = repetition.known, repetition.known is not None
    session = _Session(model, batch, repetition.results, is_known=is_known)
    with _undisturbed(session) as kept, _accumulations_counted(model) as accumulated:
        loss = session.forward(loss_fn)
        grads = session.backward(loss, _trained(optimizer))
        session.hooked = record_hooks_after_steps(session.recorder, model, optimizer, schedule, may_count=is_known)
        kept |= session.end()
        value = loss.item()
        del loss
    _require_unchanged(spec, optimizer, session)
    tape = session.recorder.tape
    leaves_state = bool(tape.changing) or tape.results.kept()  # by which a later step may be another
    later = repetition.later and tape.as_run and known is None and not leaves_state
    session.numbers = 0 if known is None else put_slots(tape, known)
    for seed, other in enumerate(() if later else repetition.batches):
        again = _Session(model, other, tape.results, is_known=is_known)
        with _undisturbed(again, seed) as kept, _gradients_dropped(accumulated):
            again.backward(again.forward(loss_fn), _trained(optimizer))
            kept |= again.end()
        if known is not None:
            put_slots(again.recorder.tape, known)
        require_same(tape, again.recorder.tape)
    constants = constants_of(replace(tape, ops=[*tape.ops, *session.hooked]))
    alone = replace(
        tape, storages=[*tape.storages], values=[*tape.values], ops=[*tape.ops]
    )  # the update is not part of it
    with without_modes():
        update_ops, spec = session.update(optimizer, spec, grads, clip_grad_norm, schedule, accumulating=accumulate > 1)
    kinds = ("step",) if accumulate == 1 else ("first", "last") if accumulate == 2 else ("first", "next", "last")
    graphs = {}
    tensors: dict[str, torch.Tensor | Fill] = {}
    for kind in kinds:
        graph, data = assemble(tape, session.batch_values, session.loss, session.aux, update_ops, kind, session.numbers)
        graphs[kind] = _verified(graph, [*tape.ops, *session.hooked])
        tensors |= data
    tensors |= {k: t for k, t in session.persistent.items() if k not in tensors}
    return Capture(
        graphs, tensors, spec, session.layouts(), value, constants, alone if later else None, tape.other_formulas
    )


def capture_evaluation(
    model: torch.nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], repetition: Repetition = _NONE
) -> Capture:
    """Record a forward pass without gradients, the model in evaluation mode."""
    session = _Session(model, batch, repetition.results)
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with _undisturbed(session) as kept, torch.no_grad():
            loss = session.forward(loss_fn)
            kept |= session.end()
        for seed, other in enumerate(repetition.batches):
            again = _Session(model, other, session.recorder.tape.results)
            with _undisturbed(again, seed) as kept, torch.no_grad():
                again.forward(loss_fn)
                kept |= again.end()
            require_same(session.recorder.tape, again.recorder.tape)
    finally:
        for module, mode in training.items():
            module.training = mode
    graph, constants = assemble(session.recorder.tape, session.batch_values, session.loss, session.aux, None, "eval")
    tensors: dict[str, torch.Tensor | Fill] = dict(constants)
    tensors |= {k: t for k, t in session.persistent.items() if k not in tensors}
    return Capture(
        {"eval": _verified(graph, session.recorder.tape.ops)},
        tensors,
        None,
        session.layouts(),
        loss.item(),
        constants_of(session.recorder.tape),
    )


def record_again(
    tape: Tape, model: torch.nn.Module, loss_fn: LossFunction, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]
) -> torch.Tensor:
    """Run forward and backward pass as the program does, keep gradients and all side effects, and return the loss.

    Adds to existing gradients of what `optimizer` trains; other gradients, which nothing uses, are dropped. Raises
    CaptureError if the step differs from that of `tape`, apart from these sums.
    """
    session, trained = _Session(model, batch, tape.results), _trained(optimizer)
    for parameter in set(model.parameters()).difference(*trained):
        parameter.grad = None
    summed = session.meet_gradients(trained)
    with other_generators_untouched(code=session.code):
        loss = session.forward(loss_fn)
        session.backward(loss, trained)
        session.end()
    (require_same_but_for_sums if summed else require_same)(tape, session.recorder.tape)
    return loss.detach()


def record_without_contents(
    model: torch.nn.Module, loss_fn: LossFunction, batch: tuple[Any, ...], results: StepResults
) -> Tape:
    """Record forward and backward pass on tensors without contents, with all side effects on the program."""
    with without_contents() as mode:
        session = _Session(model, batch, results, is_known=True)
        session.recorder.without_contents = mode
        session.backward(session.forward(loss_fn), [])
        session.end()
    return session.recorder.tape


def record_hooks_without_contents(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, results: StepResults
) -> Tape:
    """Record the hooks after the optimizer's step as `record_without_contents` does the step."""
    with without_contents() as mode:
        session = _Session(model, (), results, is_known=True)
        session.recorder.without_contents = mode
        with session.recorder:
            for hook in hooks_after_steps(optimizer):
                hook(optimizer, (), {})
        session.recorder.leave_results()
    return session.recorder.tape


def _verified(graph: StepGraph, recorded: Sequence[RecordedOp]) -> StepGraph:
    """Return a consistent graph.

    Raises OperatorError for one that no bundle may call, with the line of the program if it was `recorded`.
    """
    verify_graph(graph)
    lines = {op.name: op.line for op in reversed(recorded)}
    for op in graph.ops:
        try:
            check_operator(op.name)
        except OperatorError as error:
            raise OperatorError(f"{lines[op.name]}: {error}" if lines.get(op.name) else str(error)) from None
    return graph


def _trained(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    return [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]


@contextlib.contextmanager
def _undisturbed(session: "_Session", seed: int | None = None) -> Iterator[set[str]]:
    """Restore what a recorded step changes: gradients, buffers (running statistics), parameters that it writes to and
    the default generator.

    Yields a set that collects the names of buffers whose replacement is recorded. `seed`: seed of torch's random
    numbers meanwhile. Raises CaptureError if a recording would miss something: draws from other generators, or
    parameters or buffers that are replaced by other tensors.
    """
    model, kept = session.model, set[str]()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    before = [(b, b.detach().clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    tensors = _named_tensors(model)
    generators = generator_states(kinds_of(tensors.values()))
    if seed is not None:
        torch.manual_seed(seed)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with other_generators_untouched(code=session.code):
            yield kept
        if resized := [
            name for name, b in buffers.items() if any(b is old and b.shape != v.shape for old, v in before)
        ]:
            raise CaptureError(
                f"the step gives {', '.join(resized[:3])} of the model another shape, as many first steps do: run the model once on a batch "
                "before port_job() returns it, or train with `port-agent exec`"
            )
        now = _named_tensors(model)
        replaced = {name for name in tensors.keys() | now.keys() if tensors.get(name) is not now.get(name)}
        if replaced - kept:
            line = line_of_change(session.run_again, lambda: {name: id(t) for name, t in _named_tensors(model).items()})
            raise CaptureError(
                f"{line}{': ' * bool(line)}the step replaces {', '.join(sorted(replaced - kept))} of the model by other tensors, which a bundle would not "
                "keep: change them in place (copy_, add_), or train with `port-agent exec`"
            )
    finally:
        bind_buffers(model, buffers)
        restore_generators(generators)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in (*before, *session.recorder.before_writes):
                if tensor.shape != value.shape:
                    tensor.resize_(value.shape)
                tensor.copy_(value)


def bind_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Rebind buffers to these tensors, by name."""
    for name, tensor in buffers.items():
        owner, _, own_name = name.rpartition(".")
        set_buffer(model.get_submodule(owner), own_name, tensor)


@contextlib.contextmanager
def _accumulations_counted(model: torch.nn.Module) -> Iterator[Counter[torch.Tensor]]:
    """Count how often the block adds to the gradient of each parameter."""
    counts: Counter[torch.Tensor] = Counter()
    hooks = [
        p.register_post_accumulate_grad_hook(lambda parameter: counts.update((parameter,)))
        for p in model.parameters()
        if p.requires_grad and p.is_leaf
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _gradients_dropped(counts: Mapping[torch.Tensor, int]) -> Iterator[None]:
    """Free gradients as soon as they are complete, for parameters whose gradient is computed in one piece, because
    nothing reads them later.
    """

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p, count in counts.items() if count == 1]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _alone(item: Any) -> Any:
    """Return a batch tensor that fills its storage; rows cut from a data set share the storage of the whole set."""
    if isinstance(item, torch.Tensor) and item.numel() * item.element_size() < item.untyped_storage().nbytes():
        return item.detach().clone(memory_format=torch.contiguous_format)
    return item


class _Session:
    """One recording: the model's tensors are registered, then come forward, backward and update."""

    def __init__(
        self, model: torch.nn.Module, batch: tuple[Any, ...], results: StepResults | None, *, is_known: bool = False
    ) -> None:
        """`is_known`: whether the steps until the end of training are known, regardless of what the
        program counts and keeps.
        """
        self.model, self._is_known = model, is_known
        self.batch = batch = pytree.tree_map(_alone, batch)
        self.recorder = StepRecorder(results)
        self.persistent: dict[str, torch.Tensor | Fill] = {}
        self.names: dict[torch.Tensor, str] = {}
        for name, parameter in model.named_parameters():
            self._add(parameter, Role.PARAMETER, name)
        self.buffers = dict(model.named_buffers())
        for name, buffer in self.buffers.items():
            self._add(buffer, Role.BUFFER, name)
        leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
        for i, t in enumerate(leaves):
            if t.requires_grad:
                raise CaptureError(f"tensor {i} of the batch requires a gradient; detach it")
            if self.recorder.known(t):
                raise CaptureError(f"tensor {i} of the batch shares memory with another input; pass a copy (.clone())")
            self.recorder.add(t, Role.BATCH, f"batch{i}")
        self.batch_values = tuple(self.recorder.value_of(t) for t in leaves)
        self.loss = 0
        self.aux: tuple[int, ...] = ()
        self.loss_fn: LossFunction | None = None
        self.before: dict[str, Any] = {}
        """Python's variables when the step began."""
        self.code = StateOfCode()
        self.numbers = 0
        """Number of slots of the step's own numbers, which precede those of the optimizer."""
        self.hooked: tuple[RecordedOp, ...] = ()
        """Operators of hooks that run after the optimizer's step."""

    def _add(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet: run the model once on a batch before you create its optimizer"
            )
        if not self.recorder.known(tensor):
            self.persistent[storage_key(role, name)] = tensor
        self.names[tensor] = name
        self.recorder.add(tensor, role, name)

    def meet_gradients(self, groups: list[list[torch.Tensor]]) -> bool:
        """Register gradients that exist before the step, and return whether there are any."""
        there = {p: p.grad for group in groups for p in group if p.grad is not None}
        for parameter, gradient in there.items():
            self.recorder.add(gradient, Role.GRADIENT, self.names[parameter])
        return bool(there)

    def forward(self, loss_fn: LossFunction) -> torch.Tensor:
        if not self._is_known:
            self.recorder.require_nothing_gathered()
            self.before = python_state(self.model, loss_fn)
        self.recorder.tape.draws_from = self.recorder.generators()
        self.loss_fn = loss_fn
        with self._recorded():
            result = loss_fn(self.model, *self.batch)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(
                f"{place_of_function(loss_fn)}: loss_fn(model, *batch) must return a scalar tensor or (loss, aux), not {what}"
            )
        self.loss = self.recorder.value_of(loss)
        leaves = [t for t in pytree.tree_leaves(aux) if isinstance(t, torch.Tensor)]
        self.aux = tuple(self.recorder.value_of(t) for t in leaves)
        return loss

    def run_again(self) -> None:
        """Run forward and backward pass once more, unrecorded."""
        if self.loss_fn is None:
            return
        result = self.loss_fn(self.model, *self.batch)
        loss = result[0] if isinstance(result, tuple) else result
        if loss.requires_grad:
            loss.backward()

    def backward(self, loss: torch.Tensor, groups: list[list[torch.Tensor]]) -> dict[torch.Tensor, int]:
        """Return the gradients of the parameters in `groups`, by their values on the tape."""
        if not loss.requires_grad:
            raise CaptureError(
                f"{place_of_function(self.loss_fn)}: the loss does not depend on any parameter that requires a gradient, so nothing is trained: "
                "look for requires_grad_(False), detach() or torch.no_grad() between the parameters and the loss"
            )
        recorder = self.recorder
        recorder.phase = Phase.BACKWARD
        with self._recorded():
            loss.backward()
        found = {p: recorder.value_of(p.grad) for group in groups for p in group if p.grad is not None}
        recorder.tape.gradients = frozenset(recorder.tape.values[v].storage for v in found.values())
        return found

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what the program does in the block."""
        recorder = self.recorder
        watched = contextlib.nullcontext() if self._is_known else self.code.watched()
        with recorder, watch_reads(recorder.read, recorder.exchanged), watched, plain_formulas() as others:
            yield
        names = {NODES_THAT_ASK_FOR_MODES[node] for node in others}
        lines = (f"{op.name}{' at ' * bool(op.line)}{op.line}" for op in recorder.tape.ops if op.name in names)
        recorder.tape.other_formulas |= frozenset(lines)

    def end(self) -> set[str]:
        """Record what the step leaves behind, and return the names of buffers that it replaced by other tensors."""
        kept = self._keep_rebound()
        self.recorder.require_kept(self.names)
        if not self._is_known:
            placed = self.code.changed()
            others = changed(self.before, python_state(self.model, self.loss_fn))
            known = {name.partition(" (in ")[0] for name in placed}
            self.recorder.tape.changing = placed | (others - known)
        self.recorder.leave_results()
        return kept

    def _keep_rebound(self) -> set[str]:
        """Record that buffers receive the contents of the tensors that replaced them; return their names.

        The step created these tensors. Each replaces one buffer that shares its memory with no other, has the same
        layout in memory, and has no history.
        """
        recorder, now = self.recorder, dict(self.model.named_buffers())
        exchanged = {
            name: new for name, old in self.buffers.items() if (new := now.get(name)) is not None and new is not old
        }
        places = Counter(id(t.untyped_storage()) for t in (*self.names, *exchanged.values()))
        kept = set()
        for name, new in exchanged.items():
            old = self.buffers[name]
            alone = all(places[id(t.untyped_storage())] == 1 for t in (old, new))
            if not alone or new.requires_grad or not recorder.known(new):
                continue
            target, source = recorder.value_of(old), recorder.value_of(new)
            values, storages = recorder.tape.values, recorder.tape.storages
            made_here = storages[values[source].storage].role is Role.TEMPORARY
            if made_here and replace(values[source], storage=0, offset=0) == replace(
                values[target], storage=0, offset=0
            ):
                recorder.copy(target, source)
                kept.add(name)
        return kept

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        gradient: dict[torch.Tensor, int],
        clip: float | None,
        schedule: Schedule,
        accumulating: bool,
    ) -> tuple[UpdateOps, OptimizerSpec]:
        """Record the operators after the gradients: clipping, and the optimizer's operators for each parameter."""
        recorder = self.recorder
        recorder.phase = Phase.UPDATE
        accumulators = self._accumulators(gradient) if accumulating else {}
        stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        with without_modes():
            for p in gradient:
                stand_ins[p] = recorder.stand_in(recorder.value_of(p))
                source = accumulators.get(p, gradient[p])
                stand_ins[p].grad = recorder.stand_in(source)
        start = len(recorder.tape.ops)
        if clip is not None:
            clipped = [stand_ins[p] for p in self.model.parameters() if p in stand_ins]  # norms are added in this order
            with recorder, torch.no_grad():
                torch.nn.utils.clip_grad_norm_(clipped, clip, foreach=False)
        clipping = recorder.tape.ops[start:]
        if optimizer_scalars.is_supported(optimizer):
            groups = [[p for p in g if p in gradient] for g in _trained(optimizer)]
            updates, scalars = self._optimizer_ops(optimizer, spec, groups, stand_ins)
        else:
            updates, spec = self._own_ops(optimizer, spec, stand_ins, schedule)
            scalars = len(spec.recorded.numbers) if spec.recorded is not None else 0
        storages = Counter(recorder.tape.values[v].storage for v in updates)
        places = {s: v for v in updates if storages[s := recorder.tape.values[v].storage] == 1}
        following, after = of_one_parameter(recorder.tape, self.hooked, places.keys())
        updates |= {places[s]: (*updates[places[s]], *ops) for s, ops in following.items()}
        update_ops = UpdateOps(
            {recorder.value_of(p): g for p, g in gradient.items()},
            {recorder.value_of(p): a for p, a in accumulators.items()},
            updates,
            tuple(clipping),
            scalars,
            tuple(after),
        )
        return update_ops.after_numbers(self.numbers), spec

    def _accumulators(self, gradient: dict[torch.Tensor, int]) -> dict[torch.Tensor, int]:
        recorder = self.recorder
        result = {}
        for p in gradient:
            with without_modes():
                buffer = recorder.stand_in(recorder.value_of(p)).new_empty(p.shape)
            result[p] = recorder.add(buffer, Role.GRADIENT, self.names[p])
            key = storage_key(Role.GRADIENT, self.names[p])
            self.persistent[key] = Fill(0.0, _dtype_name(p), tuple(p.shape))
        return result

    def _optimizer_ops(
        self,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        groups: list[list[torch.Tensor]],
        stand_ins: dict[torch.Tensor, torch.Tensor],
    ) -> tuple[dict[int, tuple[RecordedOp, ...]], int]:
        recorder = self.recorder
        with recorder:
            recorder.recording = False
            shadow = _started(spec, [[stand_ins[p] for p in g] for g in groups])
            recorder.recording = True
        for g, parameters in enumerate(groups):
            for p in parameters:
                self._register_state(optimizer, spec.groups[g], p, shadow.state[stand_ins[p]])
        gradients = {p: stand_in.grad for p, stand_in in stand_ins.items()}
        for stand_in in stand_ins.values():
            stand_in.grad = None
        updates: dict[int, tuple[RecordedOp, ...]] = {}
        scalars = 0
        for group, parameters in zip(shadow.param_groups, groups, strict=True):
            shapes = set()
            for p in parameters:
                stand_ins[p].grad = gradients[p]
                group["params"] = [stand_ins[p]]  # a step looks at every parameter of its groups
                ops = self._one_update(shadow)
                if spec.name == "RAdam":
                    ops = self._with_clamp(ops)
                stand_ins[p].grad = None
                ops, used = with_slots(ops, scalars)
                shapes.add((tuple(op.name for op in ops), used))
                updates[recorder.value_of(p)] = ops
            if len(shapes) > 1:
                raise CaptureError(
                    "parameters of one optimizer group are updated by different operators; put them into groups of their "
                    "own, or train with `port-agent exec`"
                )
            used = next(iter(shapes))[1] if shapes else 0
            scalars += used
        return updates, scalars

    def _own_ops(
        self,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        stand_ins: dict[torch.Tensor, torch.Tensor],
        schedule: Schedule,
    ) -> tuple[dict[int, tuple[RecordedOp, ...]], OptimizerSpec]:
        self.recorder.reads_numbers = True
        recorded = record_update(self.recorder, optimizer, stand_ins, self.names, schedule)
        for state in recorded.states:
            key = storage_key(Role.STATE, f"{self.names[state.parameter]}/{state.name}")
            if state.fill is None and any(written is state.parameter for written, _ in self.recorder.before_writes):
                raise CaptureError(
                    f"the optimizer keeps {state.name!r} as a copy of {self.names[state.parameter]}, which the "
                    "forward or backward pass changes before it is created: train with `port-agent exec`, which "
                    "supports this"
                )
            if state.fill is None:
                self.persistent[key] = _alone(state.parameter)
            else:
                self.persistent[key] = Fill(state.fill, _dtype_name(state.tensor), tuple(state.tensor.shape))
        updates = {self.recorder.value_of(p): ops for p, ops in recorded.updates.items()}
        return updates, replace(spec, recorded=recorded.numbers)

    def _one_update(self, shadow: torch.optim.Optimizer) -> tuple[RecordedOp, ...]:
        """Record the shadow's step on the one parameter that has a gradient."""
        recorder = self.recorder
        start = len(recorder.tape.ops)
        with recorder, torch.no_grad():
            shadow.step()
        ops = tuple(recorder.tape.ops[start:])
        del recorder.tape.ops[start:]
        return ops

    def _with_clamp(self, ops: tuple[RecordedOp, ...]) -> tuple[RecordedOp, ...]:
        """Clamp RAdam's divisor, which leaves it unchanged or makes it 1.0: its first updates do not divide."""
        found: list[RecordedOp] = []
        for op in ops:
            found.append(op)
            divided = len(found) > 1 and found[-2].name == "aten::reciprocal"
            if divided and (output := op.outputs[0]) is not None:
                storage = self.recorder.tape.values[output].storage
                bounds = (-math.inf, math.inf)
                found.append(
                    RecordedOp("aten::clamp_", (Ref(output), *bounds), (), (output,), (storage,), Phase.UPDATE, False)
                )
        return tuple(found)

    def _register_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.Tensor, shadow: Mapping[str, Any]
    ) -> None:
        present = optimizer.state.get(p, {})
        for name, stand_in in shadow.items():
            if not isinstance(stand_in, torch.Tensor):
                continue
            full_name = f"{self.names[p]}/{name}"
            self.recorder.add(stand_in, Role.STATE, full_name)
            real = present.get(name)
            fill = Fill(optimizer_scalars.initial_fill(name, group), _dtype_name(stand_in), tuple(stand_in.shape))
            self.persistent[storage_key(Role.STATE, full_name)] = fill if real is None else real

    def layouts(self) -> dict[str, TensorLayout]:
        """Return the layout of each persistent storage's tensor; if two tensors share one, that of the first."""
        tape = self.recorder.tape
        found: dict[str, TensorLayout] = {}
        for value in tape.values:
            storage = tape.storages[value.storage]
            key = storage_key(storage.role, storage.name)
            if storage.role in PERSISTENT and key not in found:
                found[key] = TensorLayout(value.dtype, value.shape, value.stride, value.offset)
        return found


def _described(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    if optimizer_scalars.is_supported(optimizer):
        return optimizer_scalars.describe_optimizer(optimizer)
    groups = tuple(
        {k: v for k, v in hyperparameters(g).items() if isinstance(v, int | float | str)}
        for g in optimizer.param_groups
    )
    return OptimizerSpec(type(optimizer).__name__, groups)


def _require_unchanged(before: OptimizerSpec, optimizer: torch.optim.Optimizer, session: "_Session") -> None:
    """Raise CaptureError if forward and backward pass, whose `session` it was, changed a number of the optimizer's groups."""
    after = _described(optimizer)
    for i, (old, new) in enumerate(zip(before.groups, after.groups, strict=True)):
        for name in old:
            if old[name] != new[name]:
                optimizer.param_groups[i][name] = old[name]
                with _undisturbed(session):
                    line = line_of_change(session.run_again, lambda: _described(optimizer))
                raise CaptureError(
                    f"{line}{': ' * bool(line)}the loss changes {name} of group {i} of the optimizer from {old[name]} to {new[name]}, which a "
                    "bundle does not repeat: give the job a `scheduler` that does it, or train with `port-agent "
                    "exec`, which supports such changes"
                )


def _started(spec: OptimizerSpec, parameters: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """Return an optimizer of this spec after its first step: it has state, and fused updates
    apply from the next step on.

    Fused updates check the device when they create their state, and do not accept the meta device.
    """
    plain = replace(spec, groups=tuple({k: v for k, v in g.items() if k != "fused"} for g in spec.groups))
    optimizer = optimizer_scalars.build_optimizer(plain, parameters)
    optimizer.step()
    skip_fused_check(optimizer)
    for group, described in zip(optimizer.param_groups, spec.groups, strict=True):
        group.update({k: v for k, v in described.items() if k == "fused"})
    return optimizer

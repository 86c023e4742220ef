"""Compile-time autodiff: the training step as a list, and the passes that make it small.

    differentiate -> prune -> fuse_updates -> alias

Each pass takes a Program and returns another; `verify_program` states what a legal one is and holds after every pass.
This is arXiv 2206.15472 section 3.1 (compile-time differentiation), 3.2 (pruning: a gradient nobody reads is never
computed) and 3.3 (reordering: a weight is updated as soon as its gradient exists, so the gradient needs no memory).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from port_planner.base.errors import PortError
from port_planner.mcu.ir import PRODUCTS, UNDIVIDED, WEIGHTED, Clamp, Graph, KernelCall, McuCompileError, OpKind


class StepKind(IntEnum):
    """What one step does.

    Values 0 to 9 are those of `enum port_step_kind`. The others exist only before `fuse_updates`, pages only in tables.
    """

    FORWARD = 0
    LOSS = 1
    MASK = 2
    INPUT = 3
    WEIGHT = 4
    BIAS = 5
    COPY = 6
    PAGE_OUT = 7
    PAGE_IN = 8
    PAGE_WAIT = 9
    WEIGHT_GRADIENT = 10
    BIAS_GRADIENT = 11
    WEIGHT_UPDATE = 12
    BIAS_UPDATE = 13


PAGE_KINDS = frozenset({StepKind.PAGE_OUT, StepKind.PAGE_IN, StepKind.PAGE_WAIT})


@dataclass(frozen=True, slots=True)
class LayerUpdate:
    """The part of one layer that is trained: its bias, and the weights of output channels [0, rows).

    `q88`: these weights have low bytes, which the Q8.8 update rule needs. Without them, that
    rule rounds stochastically.
    """

    bias: bool = False
    rows: int = 0
    q88: bool = False


@dataclass(frozen=True, slots=True)
class SparseScheme:
    """Which parameters a model trains, layer by layer; layers not named are frozen.

    `chosen`: the share of each layer's trained channels whose weights a step updates: those with the largest gradients,
    in groups of four (dynamic partial updates, Deutel et al., arXiv 2407.10734). None: all of them.
    """

    updates: Mapping[str, LayerUpdate]
    chosen: float | None = None

    def __post_init__(self) -> None:
        if self.chosen is not None and not 0 < self.chosen <= 1:
            raise McuCompileError("dynamic update", f"{self.chosen} of the channels", "give a share above 0, up to 1")

    @property
    def chosen_parts(self) -> int:
        """The share in 1/256, as the firmware expects it."""
        return 256 if self.chosen is None else max(1, round(256 * self.chosen))

    def of(self, op: str) -> LayerUpdate:
        """Return the update of a layer, empty when it is frozen."""
        return self.updates.get(op, LayerUpdate())

    @property
    def q88(self) -> bool:
        """Whether any weights have low bytes."""
        return any(update.q88 for update in self.updates.values())

    def with_low_bytes(self, without: Collection[str] = ()) -> SparseScheme:
        """Return the scheme with low bytes for all trained weights except those of the layers in `without`."""
        updates = {
            name: replace(update, q88=update.rows > 0 and name not in without) for name, update in self.updates.items()
        }
        return replace(self, updates=updates)

    def describe(self) -> str:
        """Return the scheme in one line, such as `conv3: bias, 8 channels; fc: bias, 10 channels`."""
        parts = []
        for name, update in self.updates.items():
            words = ["bias"] * update.bias + [f"{update.rows} channels"] * (update.rows > 0)
            if words:
                parts.append(f"{name}: {', '.join(words)}")
        dynamic = [] if self.chosen is None else [f"of the channels the {self.chosen:.0%} with the largest gradients"]
        return "; ".join(parts + dynamic * bool(parts)) or "nothing is trained"


def full_scheme(graph: Graph) -> SparseScheme:
    """Return the scheme that trains everything that the module itself trains."""
    return last_layers(graph, len(graph.weighted()))


def last_layers(graph: Graph, count: int, ratio: float = 1.0, biases: int | None = None) -> SparseScheme:
    """Return the scheme that trains the last `count` layers' weights and the last `biases` layers' biases.

    Only those that the module itself trains are included.
    """
    biases = count if biases is None else biases
    updates = {}
    for rank, op in enumerate(reversed(graph.weighted())):
        rows = rows_at(op, ratio) if rank < count and op.trains_weight else 0
        update = LayerUpdate(rank < biases and op.trains_bias, rows)
        if update != LayerUpdate():
            updates[op.name] = update
    return SparseScheme(dict(reversed(updates.items())))


def rows_at(op: KernelCall, ratio: float) -> int:
    """Return the number of output channels that a ratio stands for.

    A depthwise layer and a recurrent one are trained as a whole or not at all.
    """
    return op.rows if op.kind in UNDIVIDED else min(op.rows, max(1, round(op.rows * ratio)))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the program.

    Buffers are named: an activation by its op, a gradient as `d:<activation>`.

    `gradient`: the gradient of the op's output. `target`: what the step writes. `accumulate`: it adds to the target.
    `second`: the target belongs to the op's second input.
    """

    kind: StepKind
    op: str
    gradient: str = ""
    target: str = ""
    accumulate: bool = False
    second: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """The tensor line at which each operand's buffer begins: 0 unless in bands."""

    source: int = 0
    output: int = 0
    gradient: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True)
class TableRow:
    """One kernel call. Operands are residencies; "" where the kind has no such operand.

    `again`: the operator already ran in this sample. `span`: the lines it computes; None: all. `part`: it belongs to a
    group of operators that run in bands. `resumes`, `suspends`: the sums in `scratch` continue earlier ones, or are
    left for a later row. `parameters`: where the operator's trained parameters lie, if they are paged in. `page`: what
    a page row moves between the medium and `source` (out) or `output` (in). `training`: inference leaves this row out.
    `carried`: its operand may still be there from the training sample before.
    """

    kind: StepKind
    op: str
    source: str = ""
    other: str = ""
    output: str = ""
    scratch: str = ""
    gradient: str = ""
    target: str = ""
    accumulate: bool = False
    second: bool = False
    again: bool = False
    span: tuple[int, int] | None = None
    part: bool = False
    resumes: bool = False
    suspends: bool = False
    lines: Lines = Lines()
    parameters: str = ""
    page: str = ""
    training: bool = False
    carried: bool = False

    @property
    def chooses(self) -> bool:
        """Whether it updates only the channels with the largest gradients; `other` is scratch to find them."""
        return self.kind is StepKind.WEIGHT and bool(self.other)

    @property
    def touched(self) -> tuple[str, ...]:
        """The residencies that must lie in the arena while this row runs."""
        names = (
            self.source,
            self.other,
            self.output,
            self.scratch,
            self.gradient,
            self.target,
            self.parameters,
        )
        return tuple(name for name in names if name)


@dataclass(frozen=True, slots=True)
class SampleProgram:
    """Forward and backward steps of one sample, in order."""

    graph: Graph
    steps: tuple[Step, ...]

    @property
    def backward(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.kind is not StepKind.FORWARD)


class ProgramError(PortError):
    """Raised when a pass produced an illegal program, a defect of the compiler; carries the step where it shows."""

    def __init__(self, index: int, step: Step, problem: str) -> None:
        super().__init__(f"step {index} ({step.kind.name} {step.op}): {problem}; report this, the compiler is wrong")
        self.index = index
        self.step = step


def gradient_of(tensor: str) -> str:
    """Return the name of a tensor's gradient buffer."""
    return f"d:{tensor}"


def reads(graph: Graph, step: Step) -> tuple[str, ...]:
    """Return the buffers that a step reads."""
    op = graph.op(step.op)
    match step.kind:
        case StepKind.FORWARD:
            return op.inputs
        case StepKind.LOSS:
            return (op.name,)
        case StepKind.WEIGHT_UPDATE | StepKind.BIAS_UPDATE:
            return (step.gradient,)
    inputs = tuple(op.inputs[position] for position in stored_inputs(op, step))
    output = (op.name,) if reads_output(op, step) else ()
    extra = (step.target,) if step.accumulate else ()
    if op.kind is OpKind.GRU and step.kind is not StepKind.INPUT:
        extra = (gradient_of(op.inputs[0]),)
    return (step.gradient, *inputs, *output, *extra)


def stored_inputs(op: KernelCall, step: Step) -> tuple[int, ...]:
    """Return the positions of the op's inputs whose values a backward step reads."""
    if step.kind in (StepKind.WEIGHT, StepKind.WEIGHT_GRADIENT):
        return () if op.kind is OpKind.GRU else (0,)
    if step.kind is not StepKind.INPUT:
        return ()
    if op.kind in PRODUCTS:
        return (0 if step.second else 1,)
    return (0,) if op.kind in (OpKind.MAX_POOL, OpKind.TABLE, OpKind.GRU) else ()


def reads_output(op: KernelCall, step: Step) -> bool:
    """Return whether a backward step reads the values of the op's output: a mask, or the
    states of a recurrent layer.
    """
    recurrent = (StepKind.INPUT, StepKind.WEIGHT, StepKind.WEIGHT_GRADIENT)
    return step.kind is StepKind.MASK or (op.kind is OpKind.GRU and step.kind in recurrent)


def writes(graph: Graph, step: Step) -> tuple[str, ...]:
    """Return the buffers that a step writes."""
    if step.kind is StepKind.FORWARD:
        return (step.op,)
    if step.kind is StepKind.MASK:
        return (step.gradient,)
    if step.kind in (StepKind.WEIGHT, StepKind.BIAS):
        return ()
    through_time = step.kind is StepKind.INPUT and graph.op(step.op).kind is OpKind.GRU
    return (*((step.gradient,) if through_time else ()), *((step.target,) if step.target else ()))


def forward_program(graph: Graph) -> SampleProgram:
    """Return the program of inference."""
    return SampleProgram(graph, tuple(Step(StepKind.FORWARD, op.name) for op in graph.ops))


def differentiate(graph: Graph) -> SampleProgram:
    """Return the whole training step: every gradient, then every update, as a framework would order them."""
    steps = list(forward_program(graph).steps)
    classifier = graph.ops[-1].name
    steps.append(Step(StepKind.LOSS, classifier, classifier, gradient_of(classifier)))
    updates: list[Step] = []
    for op in reversed(graph.ops):
        steps += _gradients(graph, op)
        if op.kind in WEIGHTED:
            updates.append(Step(StepKind.WEIGHT_UPDATE, op.name, f"dw:{op.name}"))
            updates.append(Step(StepKind.BIAS_UPDATE, op.name, f"db:{op.name}"))
    return SampleProgram(graph, _mark_accumulation(tuple(steps + updates)))


def _gradients(graph: Graph, op: KernelCall) -> list[Step]:
    dy = gradient_of(op.name)
    steps = []
    saturates = op.kind in (WEIGHTED | PRODUCTS | {OpKind.ADD}) - {OpKind.GRU} and not op.fixed
    if op.kind is not OpKind.CLASSIFIER and (saturates or op.clamp is not Clamp.NONE):
        steps.append(Step(StepKind.MASK, op.name, dy))
    kind = StepKind.COPY if op.kind is OpKind.ADD else StepKind.INPUT
    steps += [
        Step(kind, op.name, dy, gradient_of(name), second=kind is StepKind.INPUT and position > 0)
        for position, name in enumerate(op.inputs)
        if name != graph.input_name
    ]
    if op.kind in WEIGHTED:
        steps.append(Step(StepKind.WEIGHT_GRADIENT, op.name, dy, f"dw:{op.name}"))
        steps.append(Step(StepKind.BIAS_GRADIENT, op.name, dy, f"db:{op.name}"))
    return steps


def _mark_accumulation(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Mark steps that add to a gradient: the first contribution overwrites, later ones add."""
    written: set[str] = set()
    marked = []
    for step in steps:
        if step.kind in (StepKind.INPUT, StepKind.COPY):
            step = replace(step, accumulate=step.target in written)
            written.add(step.target)
        marked.append(step)
    return tuple(marked)


def prune(program: SampleProgram, scheme: SparseScheme) -> SampleProgram:
    """Return the program without the updates that the scheme omits, and without the steps that only these need."""
    _check_scheme(program.graph, scheme)
    needed: set[str] = set()
    kept: list[Step] = []
    for step in reversed(program.steps):
        update = scheme.of(step.op)
        if step.kind is StepKind.WEIGHT_UPDATE:
            keep = update.rows > 0
        elif step.kind is StepKind.BIAS_UPDATE:
            keep = update.bias
        elif step.kind is StepKind.FORWARD:
            keep = True
        else:
            keep = bool(needed.intersection(writes(program.graph, step)))
        if keep:
            kept.append(step)
            needed.update(reads(program.graph, step))
    return SampleProgram(program.graph, _mark_accumulation(tuple(reversed(kept))))


def _check_scheme(graph: Graph, scheme: SparseScheme) -> None:
    layers = {op.name: op for op in graph.weighted()}
    for op in layers.values():
        if op.shares and any(scheme.of(name) != LayerUpdate() for name in (op.name, op.shares)):
            raise McuCompileError(
                op.name,
                f"the module uses the weights of {op.shares} here as well; on a board the two copies would be trained "
                "separately",
                "leave both out of the scheme, or give the module a layer for each use",
            )
    if graph.classes < 2 and not graph.targets and any(update != LayerUpdate() for update in scheme.updates.values()):
        raise McuCompileError(
            graph.ops[-1].name,
            "one output cannot be trained: the cross entropy of a single class is always 0",
            "give it two outputs, one for each answer; if it is to learn numbers, compile it with loss=Loss.MSE; or "
            "compile it for inference only (an empty scheme)",
        )
    for name, update in scheme.updates.items():
        if name not in layers:
            raise McuCompileError(
                name, "the scheme trains a layer that the model does not have", f"choose from {', '.join(layers)}"
            )
        _refuse_untrained(layers[name], update)
        channels = layers[name].rows
        legal = (0, channels) if layers[name].kind in UNDIVIDED else range(channels + 1)
        if update.rows not in legal:
            raise McuCompileError(
                name,
                f"cannot train {update.rows} of {channels} channels",
                "use 0 to all (depthwise and recurrent: 0 or all)",
            )
        if layers[name].kind is OpKind.GRU and update.rows and scheme.chosen is not None:
            raise McuCompileError(
                name, "a dynamic update chooses channels, and a recurrent layer has gates", "leave its weights out"
            )


def _refuse_untrained(op: KernelCall, update: LayerUpdate) -> None:
    """Raise McuCompileError if a scheme trains what the module does not: it is missing there, or frozen."""
    for wanted, trains, what in ((update.rows, op.trains_weight, "weight"), (update.bias, op.trains_bias, "bias")):
        if wanted and not trains:
            raise McuCompileError(
                op.name,
                f"the scheme trains its {what}, but the module does not: it has none, or no gradient reaches it",
                "leave it out of the scheme, or have the module train it (requires_grad, bias=True)",
            )


def fuse_updates(program: SampleProgram) -> SampleProgram:
    """Return the program with every update fused into its gradient, which then needs no buffer.

    The update follows the INPUT step of its layer, so that the input gradient still sees the old weights.
    """
    fused = {StepKind.WEIGHT_GRADIENT: StepKind.WEIGHT, StepKind.BIAS_GRADIENT: StepKind.BIAS}
    steps = []
    for step in program.steps:
        if step.kind in (StepKind.WEIGHT_UPDATE, StepKind.BIAS_UPDATE):
            continue
        kind, op = fused.get(step.kind), program.graph.op(step.op)
        through_time = gradient_of(op.inputs[0]) if op.kind is OpKind.GRU else ""
        steps.append(step if kind is None else Step(kind, step.op, step.gradient, through_time))
    return SampleProgram(program.graph, tuple(steps))


def alias(program: SampleProgram) -> SampleProgram:
    """Return the program without the copies of residual adds whose source is not read again.

    The gradient of an add is the gradient of both its inputs. The first COPY creates a second buffer. The last one may
    reuse the first buffer under a new name, if it starts that gradient.
    """
    steps = list(program.steps)
    for index in reversed(range(len(steps))):
        step = steps[index]
        later = steps[index + 1 :]
        if step.kind is not StepKind.COPY or step.accumulate:
            continue
        if any(step.gradient in (*reads(program.graph, other), *writes(program.graph, other)) for other in later):
            continue
        if any(step.target in (*reads(program.graph, other), *writes(program.graph, other)) for other in steps[:index]):
            continue
        renamed = {step.target: step.gradient}
        steps[index:] = [
            replace(
                other,
                gradient=renamed.get(other.gradient, other.gradient),
                target=renamed.get(other.target, other.target),
            )
            for other in later
        ]
    return SampleProgram(program.graph, tuple(steps))


def training_program(graph: Graph, scheme: SparseScheme) -> SampleProgram:
    """Return the program the firmware runs: differentiated, pruned, reordered, aliased, verified."""
    program = differentiate(graph)
    verify_program(program)
    for step in (lambda p: prune(p, scheme), fuse_updates, alias):
        program = step(program)
        verify_program(program)
    return program


def verify_program(program: SampleProgram) -> None:
    """Raise ProgramError if a buffer is read before it is written, or a weight is read after its update."""
    written = {program.graph.input_name}
    updated: set[str] = set()
    for index, step in enumerate(program.steps):
        for name in reads(program.graph, step):
            if name not in written:
                raise ProgramError(index, step, f"reads {name} before it is written")
        if step.kind is StepKind.INPUT and step.op in updated:
            raise ProgramError(index, step, "reads weights after their update")
        if step.kind in (StepKind.INPUT, StepKind.COPY) and not step.accumulate and step.target in written:
            raise ProgramError(index, step, f"overwrites {step.target}")
        if step.kind in (StepKind.WEIGHT, StepKind.WEIGHT_UPDATE):
            updated.add(step.op)
        written.update(writes(program.graph, step))

"""Run a Program: one compute thread here; behind it one page thread, and one for updates that run in slices."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agent.train.buffers import block, view
from agent.train.checkpoint import StateStore
from agent.train.pager import CorruptPageError, PageError, PageFile, Pager, PagerStats, Slot, Transfer, padded
from agent.train.update_stream import SlicedUpdate, UpdateThread
from planner.ir.errors import PortError
from planner.ir.graph import Argument, Op, Phase, Ref, Role, Scalar, Value
from planner.ir.lowering.rematerialize import pure_arguments
from planner.ir.operators import GUARD
from planner.ir.program import Code, Program
from planner.ir.torch_operators import literal, resolve

_PATIENCE_S = 0.02
"""So often a wait for an update looks whether the step is to pause."""


class GraphChangedError(PortError):
    """The step does not do what was recorded: another branch, another shape."""

    exit_code = 2


@dataclass(slots=True)
class StepReport:
    """What one step did: seconds by phase, and what was moved to and from flash meanwhile."""

    loss: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    phases_s: dict[str, float] = field(default_factory=dict)
    paging: PagerStats = field(default_factory=PagerStats)


Gate = Callable[[], None]
"""Called between two instructions when something waits: blocks for a pause, raises Interrupted to leave."""


class Executor:
    """Executes the programs of one graph family over one set of persistent storages.

    `resident` maps keys of persistent storages to tensors that stay in RAM and are used in place; the others live in
    `store`. One instance per program; several may share pager, store and residents.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[str, torch.Tensor],
        resident: dict[str, torch.Tensor],
        store: StateStore | None,
        pager: Pager,
        scratch: "Scratch",
    ) -> None:
        self.program, self.graph = program, program.graph
        self.resident, self.store, self.pager, self.scratch = resident, store, pager, scratch
        graph = self.graph
        self.values = graph.values
        self.env: list[torch.Tensor | None] = [None] * len(graph.values)
        self.base: list[torch.Tensor | None] = [None] * len(graph.storages)
        self.scalars: Sequence[float | int] = ()
        self.interrupted = False
        self.changed = False
        """Whether the present or last step has begun to change persistent storages."""
        self.gate: Gate = _no_gate
        self.keys = [s.key for s in graph.storages]
        self._values_of: list[list[int]] = [[] for _ in graph.storages]
        for v, value in enumerate(graph.values):
            self._values_of[value.storage].append(v)
        self._constants = constants
        self._residents = [
            s for s, storage in enumerate(graph.storages)
            if storage.persistent and graph.uses[s] and s not in program.starts_on_flash
        ]  # fmt: skip
        self._reads: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._writes: dict[int, Transfer] = {}
        self._updates = UpdateThread()
        self._rng: dict[int, torch.Tensor] = {}
        self._phase = ""
        self._phase_began = 0.0
        self._phases: dict[str, float] = {}
        self.written = frozenset(s for op in graph.ops for s in op.writes if graph.storages[s].persistent)
        self._checked = False
        self._code = self._compile()
        self._reserve()

    def _reserve(self) -> None:
        """Take the page file's space now: a full disk shows before the first step, not in the middle of one."""
        for s in sorted({i.index for i in self.program.instructions if i.code is Code.WRITE}):
            if not self.graph.storages[s].persistent:
                self.scratch.slot(s, self.graph.storages[s].nbytes)

    # -- running

    def run(self, batch: Sequence[torch.Tensor], scalars: Sequence[float | int] = ()) -> StepReport:
        """Run one step on a batch; raise Interrupted, PageError or GraphChangedError, after which nothing is kept."""
        if len(scalars) != self.graph.scalars:
            raise GraphChangedError(
                f"the optimizer gives {len(scalars)} numbers for this step, {self.graph.scalars} were recorded; a "
                "hyperparameter such as weight_decay was switched on or off: plan the job again"
            )
        self.scalars = scalars
        self.changed = False
        before = replace(self.pager.stats)
        self._phases = {}
        self._enter("")
        self._updates = UpdateThread()
        try:
            with torch.no_grad():
                self._take_writes()
                self._load_inputs(batch)
                for instruction in self._code:
                    if self.interrupted:
                        self._hold()
                    instruction()
                self._enter("")
                loss = self._value(self.graph.loss).clone()
                aux = tuple(self._value(v).clone() for v in self.graph.aux)
            for s in self._residents:
                self.resident[self.keys[s]] = self._base(s)
            self._leave_writes()
        except CorruptPageError as error:
            raise self._failed_write() or error from None
        finally:
            self._updates.close()
            self._drop_everything()
        self._checked = True
        paging = self.pager.stats.since(before)
        self._phases.pop("", None)
        self._phases["stall"] = paging.stall_seconds
        return StepReport(loss, aux, dict(self._phases), paging)

    def _hold(self) -> None:
        """Pass the gate; while it is closed no slice of an update starts either."""
        self._updates.hold()
        self.gate()
        self._updates.go_on()

    def _load_inputs(self, batch: Sequence[torch.Tensor]) -> None:
        graph = self.graph
        for v, tensor in zip(graph.batch, batch, strict=True):
            value = graph.values[v]
            if tuple(tensor.shape) != value.shape or str(tensor.dtype) != f"torch.{value.dtype}":
                raise GraphChangedError(
                    f"a batch tensor has shape {list(tensor.shape)} {tensor.dtype}, the plan was made for "
                    f"{list(value.shape)} {value.dtype}; plan for this shape too or drop the last short batch"
                )
            if tuple(tensor.stride()) != value.stride or tensor.storage_offset() != value.offset:
                flat = torch.empty(graph.storages[value.storage].nbytes, dtype=torch.uint8)
                tensor = view(flat, value).copy_(tensor)
            self._bind(v, tensor)
        for s, storage in enumerate(graph.storages):
            if storage.role is Role.CONSTANT:
                self.base[s] = self._constants[self.keys[s]]
        for s in self._residents:
            self.base[s] = self.resident[self.keys[s]]

    def _take_writes(self) -> None:
        """Take over the writes that the step before left under way: this program waits for them."""
        if self.store is not None:
            keys = {self.keys[s]: s for s in self.program.carried}
            under_way = self.store.under_way
            self._writes |= {keys[k]: under_way.pop(k) for k in keys.keys() & under_way.keys()}

    def _leave_writes(self) -> None:
        """Leave the writes that the step does not wait for to the next one, or to the next commit."""
        if self._writes:
            self._store().under_way |= {self.keys[s]: t for s, t in self._writes.items()}
            self._writes.clear()

    def _failed_write(self) -> PageError | None:
        """Return why a write failed, if one did: then what was read after it is not corrupt but was never written."""
        for transfer in self._writes.values():
            transfer.finished.wait()
        return next((t.error for t in self._writes.values() if t.error is not None), None)

    def _drop_everything(self) -> None:
        """Let go of every tensor; residents live on in `resident`."""
        for transfer in (*self._writes.values(), *(t for t, _ in self._reads.values())):
            transfer.finished.wait()
        if any(t.error is not None and self.graph.storages[s].persistent for s, t in self._writes.items()):
            self.changed = True
        self._writes.clear()
        self._reads.clear()
        self._rng.clear()
        for s in range(len(self.graph.storages)):
            self._clear(s)

    # -- values and storages

    def _value(self, v: int) -> torch.Tensor:
        tensor = self.env[v]
        if tensor is None:
            value = self.values[v]
            tensor = self.env[v] = view(self._base(value.storage), value)
        return tensor

    def _base(self, s: int) -> torch.Tensor:
        base = self.base[s]
        if base is None:
            raise PortError(f"storage {s} is not resident; the program is wrong, report this")
        return base

    def _bind(self, v: int, tensor: torch.Tensor) -> None:
        s = self.values[v].storage
        self.env[v] = tensor
        if self.base[s] is None:
            self.base[s] = tensor

    def _free(self, s: int) -> None:
        self._clear(s)
        self.resident.pop(self.keys[s], None)

    def _clear(self, s: int) -> None:
        self.base[s] = None
        env = self.env
        for v in self._values_of[s]:
            env[v] = None

    # -- compiling instructions to closures

    def _compile(self) -> list[Callable[[], None]]:
        code: list[Callable[[], None]] = []
        phase = None
        changing = False
        for instruction in self.program.instructions:
            i = instruction.index
            if not changing and self._changes(instruction.code, i):
                changing = True
                code.append(self._note_change)
            wanted = self._phase_of(instruction.code, i)
            if wanted is not None and wanted != phase:
                phase = wanted
                code.append(_call(self._enter, wanted))
            match instruction.code:
                case Code.RUN:
                    code.append(self._run_op(i))
                case Code.RERUN:
                    code.append(self._rerun_op(i))
                case Code.FREE:
                    code.append(_call(self._free, i))
                case Code.WRITE:
                    code.append(_call(self._write, i))
                case Code.READ:
                    code.append(_call(self._read, i))
                case Code.WAIT_READ:
                    code.append(_call(self._land, i))
                case Code.WAIT_WRITE:
                    code.append(_call(self._written, i))
                case Code.SLICED:
                    code.append(_call(self._start_update, SlicedUpdate(self, i)))
                case Code.WAIT_SLICED:
                    code.append(_call(self._finish_update, i))
        return code

    def _changes(self, code: Code, index: int) -> bool:
        return code is Code.SLICED or (code is Code.RUN and not self.written.isdisjoint(self.graph.ops[index].writes))

    def _note_change(self) -> None:
        self.changed = True

    def _phase_of(self, code: Code, index: int) -> str | None:
        if code is Code.RUN:
            return self.graph.ops[index].phase.name.lower()
        return "recompute" if code is Code.RERUN else None

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase, self._phase_began = phase, now

    def _run_op(self, index: int) -> Callable[[], None]:
        op = self.graph.ops[index]
        if op.name == GUARD:
            return self._guard(op)
        call = self.caller(op, op.args)
        outputs = op.outputs
        in_place = len(outputs) == 1 and outputs[0] is not None and self.values[outputs[0]].storage in op.writes

        def run() -> None:
            result = call()
            if not in_place:
                self._bind_outputs(op, outputs, result)

        if index not in self.program.replayed:
            return run

        def run_remembering() -> None:
            self._rng[index] = torch.get_rng_state()
            run()

        return run_remembering

    def _rerun_op(self, index: int) -> Callable[[], None]:
        op = self.graph.ops[index]
        call = self.caller(op, pure_arguments(op))
        outputs = op.outputs

        def rerun() -> None:
            if op.random:
                present = torch.get_rng_state()
                torch.set_rng_state(self._rng[index])
                result = call()
                torch.set_rng_state(present)
            else:
                result = call()
            for v, tensor in zip(outputs, _tensors(result), strict=True):
                if v is not None and self.base[self.values[v].storage] is None:
                    self._bind(v, tensor)

        return rerun

    def _bind_outputs(self, op: Op, outputs: tuple[int | None, ...], result: Any) -> None:
        tensors = _tensors(result)
        if len(tensors) != len(outputs):
            raise GraphChangedError(f"{op.name} returned {len(tensors)} tensors, {len(outputs)} were recorded")
        for v, tensor in zip(outputs, tensors, strict=True):
            if v is not None:
                if not self._checked:
                    _check_layout(op, self.values[v], tensor)
                self._bind(v, tensor)

    def caller(self, op: Op, args: tuple[Argument, ...]) -> Callable[[], Any]:
        """Return a function that calls the operator on the present values."""
        function = resolve(op.name)
        positional = [self._fetcher(a) for a in args]
        keywords = [(k, self._fetcher(a)) for k, a in op.kwargs]
        if not keywords:
            return lambda: function(*[fetch() for fetch in positional])
        return lambda: function(*[fetch() for fetch in positional], **{k: fetch() for k, fetch in keywords})

    def _fetcher(self, argument: Argument) -> Callable[[], Any]:
        if isinstance(argument, Ref):
            env, value, v = self.env, self._value, argument.value

            def fetch() -> torch.Tensor:
                tensor = env[v]
                return value(v) if tensor is None else tensor

            return fetch
        if isinstance(argument, Scalar):
            index = argument.index
            return lambda: self.scalars[index]
        if isinstance(argument, tuple) and any(isinstance(a, Ref | Scalar | tuple) for a in argument):
            parts = [self._fetcher(a) for a in argument]
            return lambda: [fetch() for fetch in parts]
        constant = literal(argument)
        return lambda: constant

    def _guard(self, op: Op) -> Callable[[], None]:
        fetch, expected = self._fetcher(op.args[0]), op.args[1]

        def check() -> None:
            value = fetch().item()
            if value != expected:
                raise GraphChangedError(
                    f"the model takes a branch on a tensor whose value was {expected} when the step was recorded and is "
                    f"{value} now; a plan holds for one branch: make the branch independent of the data"
                )

        return check

    # -- paging

    def slot(self, s: int) -> Slot:
        """Return where a storage's present contents lie on flash."""
        if self.graph.storages[s].persistent:
            return self._store().slot(self.keys[s])
        return self.scratch.slot(s, self.graph.storages[s].nbytes)

    def target(self, s: int) -> Slot:
        """Return where a storage's new contents go."""
        if self.graph.storages[s].persistent:
            return self._store().working_slot(self.keys[s])
        return self.scratch.slot(s, self.graph.storages[s].nbytes)

    def _store(self) -> StateStore:
        if self.store is None:
            raise PortError("this plan keeps weights on flash, but no state directory was given; pass --page-dir")
        return self.store

    def _write(self, s: int) -> None:
        storage = self._base(s).untyped_storage()
        if storage.nbytes() < self.graph.storages[s].nbytes:
            raise GraphChangedError(
                f"storage {s} ({self.graph.storages[s].name}) has {storage.nbytes()} bytes, recorded were "
                f"{self.graph.storages[s].nbytes}; plan the job again on this version of torch"
            )
        self._writes[s] = self.pager.write(self.target(s), storage.data_ptr(), storage)
        self._free(s)

    def _written(self, s: int) -> None:
        if s in self._writes:  # else there was no step before, or someone waited meanwhile
            self.pager.wait(self._writes[s])
            del self._writes[s]

    def _start_update(self, update: SlicedUpdate) -> None:
        self._updates.start(update)

    def _finish_update(self, group: int) -> None:
        begin = time.perf_counter()
        while (computed_s := self._updates.result(group, _PATIENCE_S)) is None:
            if self.interrupted:
                self._hold()
        self.pager.stats.stall_seconds += time.perf_counter() - begin
        update = Phase.UPDATE.name.lower()
        self._phases[update] = self._phases.get(update, 0.0) + computed_s

    def _read(self, s: int) -> None:
        target = block(self.graph.storages[s].nbytes)
        self._reads[s] = self.pager.read(self.slot(s), target.data_ptr(), target), target

    def _land(self, s: int) -> None:
        transfer, target = self._reads.pop(s)
        self.pager.wait(transfer)
        self.base[s] = target


class Scratch:
    """The page file of a step's temporaries; a slot per storage, reused on every step."""

    def __init__(self, path: Path) -> None:
        self.file = PageFile(path)
        self._slots: dict[int, Slot] = {}
        self._end = 0

    def slot(self, s: int, nbytes: int) -> Slot:
        if s not in self._slots:
            self._slots[s] = Slot(self.file, self._end, nbytes)
            self._end += padded(nbytes)
            self.file.reserve(self._end)
        return self._slots[s]

    def close(self) -> None:
        self.file.close()
        self.file.path.unlink(missing_ok=True)


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return (result,)
    found: list[torch.Tensor] = []
    for item in result:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += _tensors(item)
    return found


def _check_layout(op: Op, value: Value, tensor: torch.Tensor) -> None:
    actual = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
    if actual != (f"torch.{value.dtype}", value.shape, value.stride, value.offset):
        raise GraphChangedError(
            f"{op.name} gave a tensor {actual}, recorded was {value.dtype} {value.shape} {value.stride} {value.offset}; "
            "plan the job again on this version of torch"
        )


def _call(function: Callable[[Any], None], argument: Any) -> Callable[[], None]:
    return lambda: function(argument)


def _no_gate() -> None:
    """Nothing waits."""

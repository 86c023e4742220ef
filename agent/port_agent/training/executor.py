"""Run a program on one compute thread, supported by a page thread and a thread for sliced updates."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.cpu import DONE, CpuBackend
from port_agent.backend.raw_bytes import whole_bytes
from port_agent.backend.team_threads import CpuTeams
from port_agent.backend.transfer_ring import TransferRing
from port_agent.malloc import active
from port_agent.paging.pager import CorruptPageError, Pager, PagerStats
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.step_packing import PackingStats, StepPacking
from port_agent.training.step_paging import Scratch, StepPaging
from port_agent.training.step_transfers import StepTransfers, TransferWaits
from port_agent.training.step_values import GraphChangedError, StepValues, check_layout
from port_agent.training.update_stream import SlicedUpdate, UpdateThread
from port_planner.base.errors import PortError
from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.graph import Op, Phase, Role
from port_planner.ir.lowering.packables import PackedReading, packed_reading
from port_planner.ir.lowering.rematerialize import pure_arguments
from port_planner.ir.program import Code, Instruction, Program
from port_planner.ir.run_op import flatten
from port_planner.ir.torch_operators import shaped_by_contents

KEPT_BYTES = 1 << 20
"""Largest number of bytes changed in place by forward and backward (running statistics) that are copied for `undo`;
ResNet-50 has 0.4 MB."""

_PHASES = {Code.RERUN: "recompute", Code.PACK: "pack", Code.UNPACK: "unpack"}
"""Phases of instructions that are not operators of the recorded step, by the names of step events."""

_AHEAD = 16
"""Half of the largest number of operators that a device has queued when a step is paused.

They take less than a tenth of a second unless one takes three milliseconds.
"""

_PATIENCE_S = 0.02
"""Seconds between checks whether the step must pause, while it waits for an update."""


@dataclass(slots=True)
class StepReport:
    """The results of one step: seconds by phase, and what was moved to and from flash meanwhile."""

    loss: torch.Tensor
    aux: tuple[torch.Tensor, ...]
    phases_s: dict[str, float] = field(default_factory=dict)
    paging: PagerStats = field(default_factory=PagerStats)
    packing: PackingStats = field(default_factory=PackingStats)


@dataclass(slots=True)
class _CompiledSoFar:
    """State that compiled instructions pass to the following ones.

    `unchanged`: storages that were not copied for `undo` yet. `come_back`: entries of packings that are unpacked again;
    the others stay packed, and are in `staying` by storage. `whole_again`: those of them that also exist unpacked,
    recomputed for other operators.
    """

    unchanged: set[int]
    come_back: set[int]
    staying: dict[int, int] = field(default_factory=dict)
    whole_again: set[int] = field(default_factory=set)
    waits: TransferWaits = field(default_factory=TransferWaits)
    phase: str | None = None
    changing: bool = False
    launched: int = 0


_NO_WATCHERS: Mapping[int, Callable[[StepValues], None]] = MappingProxyType({})

Gate = Callable[[], None]
"""Called between two instructions when something waits; blocks for a pause, and raises Interrupted to leave."""


@dataclass(frozen=True, slots=True)
class StepContents:
    """Storages that outlive a step, by key.

    `resident`: tensors that stay in RAM and are used in place; the other persistent storages are in `store`. `newer`:
    keys of resident tensors of which the store has older contents; None: it may be any of them.
    """

    constants: Mapping[str, torch.Tensor]
    resident: dict[str, torch.Tensor]
    store: StateStore | None
    newer: set[str] | None = None


class Executor:
    """Executes the programs of one graph family over one set of persistent storages.

    One instance per program; several may share pager and contents.
    """

    def __init__(
        self,
        program: Program,
        contents: StepContents,
        pager: Pager,
        scratch: Sequence[Scratch],
        backend: Backend | None = None,
        watchers: Mapping[int, Callable[[StepValues], None]] = _NO_WATCHERS,
        teams: CpuTeams | None = None,
        ring: TransferRing | None = None,
    ) -> None:
        """`backend`: device that computes the step; None for the CPU. `watchers`: called after
        these operators have run.

        `teams`: for operators that only some threads compute; the caller closes them. `ring`: for transfers between the
        host's memory and the device's. Raises PortError for a step of another device.
        """
        self.program, self.graph = program, program.graph
        self.resident, self.pager = contents.resident, pager
        graph = self.graph
        self.backend = CpuBackend() if backend is None else backend
        if graph.device not in (CPU, self.backend.kind):
            raise PortError(
                f"this step is for the device {graph.device!r} but runs on {self.backend.kind!r}; plan the job again "
                "there"
            )
        self.values = StepValues(graph, self.backend)
        self.paging = StepPaging(program, self.values, contents.store, pager, scratch, contents.newer)
        self.packing = StepPacking(program.packings, self.values, self.paging)
        self.transfers = StepTransfers(self.values, self.backend, ring)
        self.interrupted = False
        self.changed = False
        """Whether the current or last step has begun to change persistent storages in a way that `undo` cannot undo."""
        self.gate: Gate = no_gate
        self.keys = [s.key for s in graph.storages]
        self._constants, self._watchers = contents.constants, watchers
        self._residents = [
            s
            for s, storage in enumerate(graph.storages)
            if storage.persistent and graph.uses[s] and s not in program.starts_away
        ]
        self._updates = UpdateThread()
        self._teams = teams or CpuTeams(torch.get_num_threads())
        self._rng: dict[int, torch.Tensor] = {}
        self._phase = ""
        self._phase_began = 0.0
        self._phases: dict[str, float] = {}
        self.written = frozenset(s for op in graph.ops for s in op.writes if graph.storages[s].persistent)
        self._undoable = self._small_outside_updates()
        self._kept: dict[int, torch.Tensor] = {}
        self._checked = False
        self._pace: Event = DONE
        self._code = self._compile()

    # -- running

    def run(self, batch: Sequence[torch.Tensor], scalars: Sequence[float | int] = ()) -> StepReport:
        """Run one step on a batch.

        Raises Interrupted, PageError or GraphChangedError, after which nothing is kept.
        """
        if len(scalars) != self.graph.scalars:
            raise GraphChangedError(
                f"the optimizer gives {len(scalars)} numbers for this step, but {self.graph.scalars} were recorded; a "
                "hyperparameter such as weight_decay was switched on or off: plan the job again"
            )
        self.values.scalars = scalars
        self.changed = False
        self._kept.clear()
        before = replace(self.pager.stats)
        self.packing.begin()
        self._phases = {}
        self._enter("")
        self._updates = UpdateThread()
        try:
            with torch.no_grad():
                self.paging.take_writes()
                self._load_inputs(batch)
                for instruction in self._code:
                    if self.interrupted:
                        self._hold()
                    instruction()
                    if not self._checked:
                        _close_code()
                self.transfers.drop()
                self._enter("")
                loss = self.values.value(self.graph.loss).clone()
                aux = tuple(self.values.value(v).clone() for v in self.graph.aux)
            for s in self._residents:
                self.resident[self.keys[s]] = self.values.resident(s)
            self.paging.leave_writes()
            self._kept.clear()
        except CorruptPageError as error:
            raise self.paging.failed_write() or self.packing.failed_write() or error from None
        finally:
            self._updates.close()
            self._drop_everything()
        self._checked = True
        paging = self.pager.stats.since(before)
        self._phases.pop("", None)
        self._phases["stall"] = paging.stall_seconds
        return StepReport(loss, aux, dict(self._phases), paging, self.packing.stats)

    def undo(self) -> None:
        """Restore what an abandoned step changed before its update.

        Must not be called once `changed` is set.
        """
        for s, content in self._kept.items():
            key = self.keys[s]
            if key in self.resident:
                whole_bytes(self.resident[key]).copy_(content)
            elif (copy := self.paging.host_copy(s)) is not None:
                copy.copy_(content[: copy.numel()])
            elif self.paging.store is not None:
                self.paging.store.write(key, content)
        self._kept.clear()

    def _small_outside_updates(self) -> frozenset[int]:
        """Return the persistent storages that only forward and backward write: the smallest, up to `KEPT_BYTES` in
        total.
        """
        by_updates = {s for op in self.graph.ops if op.phase is Phase.UPDATE for s in op.writes}
        chosen, total = set(), 0
        for s in sorted(self.written - by_updates, key=lambda s: self.graph.storages[s].nbytes):
            total += self.graph.storages[s].nbytes
            if total <= KEPT_BYTES:
                chosen.add(s)
        return frozenset(chosen)

    def _keep(self, s: int) -> None:
        self._kept[s] = whole_bytes(self.values.resident(s)).clone()

    def _hold(self) -> None:
        """Pass the gate. While it is closed, no slice of an update starts either, and the device is idle."""
        self._updates.hold()
        self.transfers.land()
        self.backend.synchronize()
        self.gate()
        self._updates.go_on()

    def _keep_pace(self) -> None:
        """Wait until the device has reached the operator that the host reached `_AHEAD` operators ago."""
        before, self._pace = self._pace, self.backend.reached()
        before.synchronize()

    def _load_inputs(self, batch: Sequence[torch.Tensor]) -> None:
        self.values.load_batch(batch)
        for s, storage in enumerate(self.graph.storages):
            if storage.role is Role.CONSTANT:
                self.values.base[s] = self._constants[self.keys[s]]
        for s in self._residents:
            self.values.base[s] = self.resident[self.keys[s]]

    def _drop_everything(self) -> None:
        """Release every tensor; resident tensors stay in `resident`."""
        if self.paging.drop():
            self.changed = True
        self.packing.drop()
        self.transfers.drop()
        self._rng.clear()
        for s in range(len(self.graph.storages)):
            self.values.clear(s)

    def _free(self, s: int) -> None:
        self.values.clear(s)
        self.resident.pop(self.keys[s], None)

    def _write(self, s: int, target: int) -> None:
        self.paging.write(s, target)
        self._free(s)

    def _pack(self, entry: int, stays: bool) -> None:
        storage = self.program.packings[entry].storage
        self.packing.pack(entry, stays=stays)
        self._free(storage)
        if stays:
            self.values.stand_in(storage)

    # -- compiling instructions to closures

    def _compile(self) -> list[Callable[[], None]]:
        so_far = _CompiledSoFar(
            set(self._undoable), {x.index for x in self.program.instructions if x.code is Code.UNPACK}
        )
        code: list[Callable[[], None]] = []
        for instruction in self.program.instructions:
            code += self._ahead_of(instruction, so_far)
            code += self._code_of(instruction, so_far)
        return code

    def _ahead_of(self, instruction: Instruction, so_far: "_CompiledSoFar") -> list[Callable[[], None]]:
        """Return the code that runs before an instruction: waits for transfers and the device, copies for `undo`,
        records of phase and change.
        """
        i, runs = instruction.index, instruction.code in (Code.RUN, Code.RERUN)
        code: list[Callable[[], None]] = [
            _call(self.transfers.wait, target, touched)
            for target, touched in so_far.waits.before(self._touched(instruction, so_far.waits))
        ]
        if runs and (moved := transfer_of(self.graph, self.graph.ops[i])):
            so_far.waits.begins(moved)
        if runs and self.graph.device != CPU:
            so_far.launched += 1
            if so_far.launched % _AHEAD == 0:
                code.append(self._keep_pace)
        if instruction.code is Code.RUN:
            code += [_call(self._keep, s) for s in so_far.unchanged.intersection(self.graph.ops[i].writes)]
            so_far.unchanged.difference_update(self.graph.ops[i].writes)
        if not so_far.changing and self._changes(instruction.code, i):
            so_far.changing = True
            code.append(self._note_change)
        phase = self._phase_of(instruction.code, i)
        if phase is not None and phase != so_far.phase:
            so_far.phase = phase
            code.append(_call(self._enter, phase))
        return code

    def _code_of(self, instruction: Instruction, so_far: "_CompiledSoFar") -> list[Callable[[], None]]:
        """Return the code of the instruction itself."""
        i = instruction.index
        match instruction.code:
            case Code.RUN:
                watched = [_call(self._watchers[i], self.values)] if i in self._watchers else []
                return [self._in_team(i, self._run_packed(i, so_far.staying) or self._run_op(i)), *watched]
            case Code.RERUN:
                made = so_far.staying.keys() & self.graph.creates[i]
                so_far.whole_again |= made
                cleared = [_call(self.values.clear, s) for s in made]  # no stand-in is used for it
                return [*cleared, self._in_team(i, self._rerun_op(i))]
            case Code.FREE:
                return [_call(self._free, i), *self._freed(i, so_far)]
            case Code.WRITE:
                return [_call(self._write, i, instruction.target)]
            case Code.READ:
                return [_call(self.paging.read, i)]
            case Code.WAIT_READ:
                return [_call(self.paging.land, i)]
            case Code.WAIT_WRITE:
                return [_call(self.paging.finish_write, i)]
            case Code.PACK:
                stays = i not in so_far.come_back
                if stays:
                    so_far.staying[self.program.packings[i].storage] = i
                return [_call(self._pack, i, stays)]
            case Code.UNPACK:
                return [_call(self.packing.unpack, i)]
            case Code.WRITE_PACKED:
                return [_call(self.packing.write, i, instruction.target)]
            case Code.WAIT_WRITE_PACKED:
                return [_call(self.packing.finish_write, i)]
            case Code.READ_PACKED:
                return [_call(self.packing.read, i)]
            case Code.WAIT_READ_PACKED:
                return [_call(self.packing.land, i)]
            case Code.SLICED:
                return [_call(self._start_update, self._sliced(i))]
            case Code.WAIT_SLICED:
                return [_call(self._finish_update, i)]

    def _freed(self, s: int, so_far: "_CompiledSoFar") -> list[Callable[[], None]]:
        """Return the code that runs when a storage that stays packed is freed: it frees the unpacked form, leaving the
        packed one, or the packed form.
        """
        if s in so_far.whole_again:
            so_far.whole_again.discard(s)
            return [_call(self.values.stand_in, s)]
        return [_call(self.packing.forget, so_far.staying.pop(s))] if s in so_far.staying else []

    def _touched(self, instruction: Instruction, waits: TransferWaits) -> set[int]:
        """Return the storages that an instruction needs after their transfers, or changes, or frees."""
        graph, i = self.graph, instruction.index
        match instruction.code:
            case Code.RUN | Code.RERUN:
                return waits.into(graph.reads[i]) | {*graph.ops[i].writes}
            case Code.SLICED:
                group = self.program.groups[i]
                inside = range(group.first, group.last + 1)
                return {s for k in inside for s in (*graph.reads[k], *graph.ops[k].writes)}
            case Code.PACK | Code.UNPACK:
                return {self.program.packings[i].storage}
            case Code.FREE | Code.WRITE:
                return {i}
            case _:
                return set()

    def _changes(self, code: Code, index: int) -> bool:
        lasting = self.written - self._undoable
        return code is Code.SLICED or (code is Code.RUN and not lasting.isdisjoint(self.graph.ops[index].writes))

    def _note_change(self) -> None:
        self.changed = True

    def _phase_of(self, code: Code, index: int) -> str | None:
        if code is Code.RUN:
            return self.graph.ops[index].phase.name.lower()
        return _PHASES.get(code)

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase, self._phase_began = phase, now

    def _in_team(self, index: int, run: Callable[[], None]) -> Callable[[], None]:
        return self._teams.runs(self.graph.ops[index].team, run)

    def _run_op(self, index: int) -> Callable[[], None]:
        op = self.graph.ops[index]
        if op.name == GUARD:
            return self._guard(op)
        if (moved := transfer_of(self.graph, op)) is not None:
            return _call(self.transfers.begin, moved)
        call = self.values.caller(op, op.args)
        outputs, by_contents = op.outputs, shaped_by_contents(op)
        in_place = len(outputs) == 1 and outputs[0] is not None and self.graph.values[outputs[0]].storage in op.writes

        def run() -> None:
            result = call()
            if not in_place:
                self._bind_outputs(op, outputs, result, check=by_contents)

        if op.random and self.graph.draws:
            return self._run_drawing(index, run)
        if index not in self.program.replayed:
            return run

        generator = self._drawn_from(op)

        def run_remembering() -> None:
            self._rng[index] = generator.generator_state()
            run()

        return run_remembering

    def _run_packed(self, index: int, staying: Mapping[int, int]) -> Callable[[], None] | None:
        """Return a function that runs an operator on a packed form; None for one that needs its operands
        unpacked, or only their shapes.
        """
        op, graph = self.graph.ops[index], self.graph
        for s, entry in staying.items():
            found = packed_reading(graph, op, s, self.program.packings[entry].codec)
            if found is None or found[0] is PackedReading.SHAPE or op.outputs[0] is None:
                continue
            gradient, shape = self.values.fetcher(op.args[found[1]]), graph.values[op.outputs[0]].shape
            compute = partial(self.packing.computed, entry, found[0])
            return lambda: self._bind_outputs(op, op.outputs, compute(gradient(), shape))
        return None

    def _run_drawing(self, index: int, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs a random operator on the numbers that belong to it in the order of draws, which
        is not that of operators.
        """
        generator = self._drawn_from(self.graph.ops[index])
        first = index == min(i for together in self.graph.draws for i in together)

        def run_drawing() -> None:
            if first:
                self._find_draws()
            after = generator.generator_state()
            generator.set_generator_state(self._rng[index])
            run()
            generator.set_generator_state(after)

        return run_drawing

    def _find_draws(self) -> None:
        """Record where each random operator's numbers begin, and leave the generator after the last one."""
        for together in self.graph.draws:
            op = self.graph.ops[together[0]]
            state = self._drawn_from(op).generator_state()
            self._rng.update(dict.fromkeys(together, state))
            self.values.draw(op)

    def _rerun_op(self, index: int) -> Callable[[], None]:
        op = self.graph.ops[index]
        if (moved := transfer_of(self.graph, op)) is not None:
            return _call(self.transfers.begin, moved)
        call = self.values.caller(op, pure_arguments(op))
        outputs, generator = op.outputs, self._drawn_from(op)

        def rerun() -> None:
            if op.random:
                present = generator.generator_state()
                generator.set_generator_state(self._rng[index])
                result = call()
                generator.set_generator_state(present)
            else:
                result = call()
            for v, tensor in zip(outputs, flatten(result), strict=True):
                if v is not None and self.values.base[self.graph.values[v].storage] is None:
                    self.values.bind(v, tensor)

        return rerun

    def _drawn_from(self, op: Op) -> Backend:
        """Return the device whose generator an operator uses: that of its result."""
        made = (self.graph.values[v].storage for v in op.outputs if v is not None)
        on_device = any(self.graph.storages[s].device != CPU for s in made)
        return self.backend if on_device else CpuBackend()

    def _bind_outputs(self, op: Op, outputs: tuple[int | None, ...], result: Any, *, check: bool = False) -> None:
        tensors = flatten(result)
        if len(tensors) != len(outputs):
            raise GraphChangedError(f"{op.name} returned {len(tensors)} tensors, but {len(outputs)} were recorded")
        for v, tensor in zip(outputs, tensors, strict=True):
            if v is not None:
                if check or not self._checked:
                    check_layout(op, self.graph.values[v], tensor)
                self.values.bind(v, tensor)

    def _guard(self, op: Op) -> Callable[[], None]:
        fetch, expected, *places = self.values.fetcher(op.args[0]), *op.args[1:]
        where = "".join(f"{place}: " for place in places if place)

        def check() -> None:
            value = fetch().item()
            if value != expected:
                raise GraphChangedError(
                    f"{where}the program reads a tensor's value, which was {expected} when the step was recorded and "
                    f"is {value} now; a plan is valid for one value: compute with the tensor by torch's operators, "
                    "or train with `port-agent exec`, which handles such changes"
                )

        return check

    # -- updates that run in slices

    def _sliced(self, group: int) -> SlicedUpdate:
        whole = [self._run_op(i) for i in self.program.groups[group].whole]
        return SlicedUpdate(self.program, group, self.values, self.paging, whole)

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


def _close_code() -> None:
    """Count memory that an operator generated at its first run as code, because no other
    thread's operators generate any.
    """
    allocator = active()
    if allocator is not None:
        allocator.close_code()


def _call(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def no_gate() -> None:
    """Do nothing."""

"""Record the operators of a real training step.

Forward and backward pass run on real tensors. So the model takes exactly the branch that it takes in eager mode (a model that looks for
tracing or fake tensors sees none). Every shape, stride and missing gradient is the kernels' own. Under a memory budget, tensors that are
not needed are evicted meanwhile. The optimizer's step, which must change nothing, is recorded on meta tensors that have shapes and strides
but no memory.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import enable_reentrant_dispatch

from port_planner.base.errors import CaptureError, StatefulStepError, program_line
from port_planner.capture.cross_step_state import StepResults
from port_planner.ir.allowed_operators import ADD_SCALED, GUARD, OPTIMIZERS, only_checks
from port_planner.ir.arithmetic import Arithmetic, differences
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Argument, NamedArgument, Phase, Ref, Role, Value, operands
from port_planner.ir.lowering.optimizer_scalars import SETTLED_STEP
from port_planner.ir.run_op import flatten
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.ir.torch_device import generator_states, kind_of
from port_planner.ir.torch_operators import COMPLEX, of_all_labels
from port_planner.operators import operator_of
from port_planner.torch_compat.autograd import LinesOfNodes
from port_planner.torch_compat.contentless import emptied
from port_planner.torch_compat.modes import (
    DispatchKey,
    TorchDispatchMode,
    composite,
    current_modes,
    has_kernel,
    pytree,
    without_modes,
)

_DIGEST_BYTES = 16

_NO_MEMORY = "meta"
_MAX_READ = 256
"""Largest number of numbers of one tensor that are guarded individually in each step."""
_MAX_LINES = 3
"""Largest number of program lines that a message names."""
_STEP_COUNT = SETTLED_STEP
"""Step count that an optimizer receives where it reads one from a tensor; values derived from it are not constants."""

OPTIMIZER_REMEDY = f"use one of {', '.join(OPTIMIZERS)}, or train with `port-agent exec`"
"""Remedy if an optimizer's update cannot be repeated without its code."""

_CROSS_STEP_REMEDY = (
    "neither a bundle nor its checkpoints contain that. Keep it in a buffer of the model, or train with `port-agent "
    "exec`, which runs the program itself"
)

_COMPARED: dict[Any, Any] = {torch.ops.aten.equal.default: torch.eq, torch.ops.aten.allclose.default: torch.isclose}
"""Operators that return a Python bool, and their elementwise counterparts."""


@dataclass(slots=True)
class RecordedStorage:
    """A storage observed during recording; `data`: the contents of a constant."""

    nbytes: int
    role: Role
    name: str
    device: str = CPU
    data: torch.Tensor | None = None


@dataclass(slots=True)
class RecordedOp:
    """One recorded operator call."""

    name: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int | None, ...]
    writes: tuple[int, ...]
    phase: Phase
    random: bool
    line: str = ""
    """Line in which the program called the operator; in the backward pass, of whose gradient it is a part; "" if unknown."""
    draws_from: bytes = b""
    draws_to: bytes = b""
    """Digests of the state of torch's generator before and after a random operator."""


@dataclass(slots=True)
class _Place:
    """The position of a torch storage object: recorded storage, and byte offset within it."""

    storage: int
    keep_alive: Any


@dataclass(frozen=True, slots=True)
class ViewCall:
    """A call that only made a view, such as `detach`, and is not on the tape; `before`: the number of operators before it."""

    name: str
    line: str
    before: int


@dataclass(slots=True)
class Tape:
    """Everything recorded so far."""

    storages: list[RecordedStorage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[RecordedOp] = field(default_factory=list)
    draws_from: bytes = b""
    """A digest of the generator's state before the first operator."""
    as_run: bool = True
    """Whether only the program's own operators ran, without replacements that are easier to repeat."""
    changing: frozenset[str] = frozenset()
    """Python variables that have a different value after the step (`python_state`)."""
    other_formulas: frozenset[str] = frozenset()
    """Operators, with their lines, whose gradients use another formula, with different last digits, while a mode such as a recorder is
    active.
    """
    gradients: frozenset[int] = frozenset()
    """The storages in which the step leaves the gradients of the trained parameters."""
    results: StepResults = field(default_factory=StepResults)
    """The storages that this step and earlier recorded steps created."""
    views: list[ViewCall] = field(default_factory=list)
    """Calls of the forward pass that made views; they only explain differences."""


def _carried(what: str) -> CaptureError:
    """Return the error for a step that leaves something to later ones, with the line of the program."""
    place = program_line()
    return CaptureError(f"{place}{': ' if place else ''}{what}: {_CROSS_STEP_REMEDY}")


class StepRecorder(TorchDispatchMode):
    """A dispatch mode that writes each aten call to a tape. Invisible to the model."""

    def __init__(self, results: StepResults | None = None) -> None:
        """`results`: results of steps that were recorded before this one."""
        TorchDispatchMode.__init__(self)
        self.tape = Tape(results=results or StepResults())
        self.phase = Phase.FORWARD
        self.recording = True
        self.reads_numbers = False
        """Whether an update receives the number that it reads from a tensor, if the tensor has one, instead of a step count."""
        self.without_contents: Any = None
        """The mode without contents under which the step runs; None if it has contents."""
        self._places: dict[int, _Place] = {}
        self._value_ids: dict[Value, int] = {}
        self._stand_in_bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._nodes = LinesOfNodes(program_line)
        self.stand_in_device = CPU
        """Device of the results that operators compute from meta tensors."""
        self._tainted: set[int] = set()
        self._fresh: set[int] = set()
        """Constants that the step creates from Python numbers, as `torch.tensor` does, in separate memory."""
        self._parameters: dict[int, list[torch.Tensor]] = {}
        self.before_writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters to which the forward and backward pass write, with copies of their earlier contents."""
        self.settings = arithmetic()
        self._other_settings: tuple[str, Arithmetic] | None = None
        """Line and settings of the first operator that ran with other settings."""
        self._exchanged: list[tuple[torch.Tensor, str]] = []
        """Tensors whose `data` the program assigned, and the lines."""

    # -- tensors and their places

    def add(self, tensor: torch.Tensor, role: Role, name: str) -> int:
        """Register a tensor that exists before the step; return its value index."""
        key = storage_identity(tensor.untyped_storage())
        if key not in self._places:
            index = self._new_storage(tensor, role, name)
            if role is not Role.CONSTANT:
                self._tainted.add(index)
        if role is Role.PARAMETER:
            self._parameters.setdefault(self._places[key].storage, []).append(tensor)
        return self.value_of(tensor)

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the value index of a tensor; a tensor from outside the step becomes a constant.

        Raises CaptureError for a tensor on a device that no plan can name, or that only the backward pass knows.
        """
        _require_strided(tensor)
        self._device_of(tensor)
        key = storage_identity(tensor.untyped_storage())
        place = self._places.get(key)
        if place is None:
            self._require_no_cross_step(tensor)
            index = self._new_storage(tensor, Role.CONSTANT, f"constant{len(self.tape.storages)}")
            with without_modes():
                empty, storage = torch.empty(0, dtype=torch.uint8, device=tensor.device), tensor.untyped_storage()
                whole = empty.set_(storage, 0, (storage.nbytes(),), (1,))
                self.tape.storages[index].data = whole.to(CPU, copy=True)
            place = self._places[key]
        value = Value(
            place.storage,
            str(tensor.dtype).removeprefix("torch."),
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            int(tensor.storage_offset()),
        )
        index = self._value_ids.setdefault(value, len(self.tape.values))
        if index == len(self.tape.values):
            self.tape.values.append(value)
        return index

    def _require_no_cross_step(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError for a tensor that an earlier step created."""
        if self.tape.results.hold(storage_identity(tensor.untyped_storage())):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise _carried(
                f"the step reads a tensor of {kind} {list(tensor.shape)} that an earlier step created and the program kept"
            )

    def require_nothing_gathered(self) -> None:
        """Raise StatefulStepError if the program holds tensors of several earlier steps that do not belong to the model."""
        lines = self.tape.results.gathered(self._places.keys())
        if lines is not None:
            made = f", made at {', '.join(lines[:_MAX_LINES])}" if lines else ""
            raise StatefulStepError(
                f"the program keeps tensors of several steps{made}, which a later step may read: "
                f"{_CROSS_STEP_REMEDY}. To show a value, return it with the loss: loss_fn may return (loss, "
                "aux)"
            )

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Record that the program is about to assign `tensor.data`."""
        self._exchanged.append((tensor, program_line()))

    def require_kept(self, names: Mapping[torch.Tensor, str]) -> None:
        """Raise CaptureError if the step gave one of these tensors other memory, or computed with settings that it then restored."""
        for tensor, line in self._exchanged:
            if tensor in names and not self._is_at(tensor, names[tensor]):
                raise CaptureError(
                    f"{line}: the step assigns {names[tensor]}.data, which a bundle would not keep: change the tensor in place "
                    f"(copy_, add_), or train with `port-agent exec`"
                )
        if self._other_settings is not None and arithmetic() == self.settings:
            line, other = self._other_settings
            raise CaptureError(
                f"{line}: a part of the step computes with other settings of torch ({'; '.join(differences(other, self.settings))}), "
                "and a bundle has one for all operators: set it before the job is returned, or train with `port-agent exec`"
            )

    def _is_at(self, tensor: torch.Tensor, name: str) -> bool:
        place = self._places.get(storage_identity(tensor.untyped_storage()))
        return place is not None and self.tape.storages[place.storage].name == name

    def leave_results(self) -> None:
        """Register the tensors that the step created, for the steps recorded after it."""
        lines = {self.tape.values[v].storage: op.line for op in self.tape.ops for v in op.outputs if v is not None}
        made = [
            (place.keep_alive, place.storage)
            for place in self._places.values()
            if self.tape.storages[place.storage].role is Role.TEMPORARY and isinstance(place.keep_alive, StorageWeakRef)
        ]
        self.tape.results.add(
            ((reference, lines.get(s, "")) for reference, s in made if s in self._tainted),
            (reference for reference, s in made if s not in self._tainted),
        )

    def _new_storage(self, tensor: torch.Tensor, role: Role, name: str) -> int:
        storage = tensor.untyped_storage()
        index = len(self.tape.storages)
        self.tape.storages.append(RecordedStorage(int(storage.nbytes()), role, name, self._device_of(tensor)))
        # A weak reference keeps torch from giving the same address to another storage, and holds no data.
        self._places[storage_identity(storage)] = _Place(index, StorageWeakRef(storage))
        return index

    def stand_in(self, value: int) -> torch.Tensor:
        """Return a meta tensor (without memory) for a recorded value; results computed from it count as on its device."""
        v = self.tape.values[value]
        dtype: torch.dtype = getattr(torch, v.dtype)
        stored = self.tape.storages[v.storage]
        self.stand_in_device = stored.device
        with without_modes():
            base = self._stand_in_bases.get((v.storage, dtype))
            if base is None:
                base = torch.empty(stored.nbytes // dtype.itemsize, dtype=dtype, device=_NO_MEMORY)
                self._stand_in_bases[v.storage, dtype] = base
                self._places[storage_identity(base.untyped_storage())] = _Place(v.storage, base)
            return base.as_strided(v.shape, v.stride, v.offset)

    def _device_of(self, tensor: torch.Tensor) -> str:
        """Return the kind of device on which a tensor is; for a stand-in of the update, the device of its original."""
        if self.phase is Phase.UPDATE and tensor.is_meta:
            return self.stand_in_device
        return kind_of(tensor)

    def generators(self) -> bytes:
        """Return a digest of the states of the default generators of all devices that the step uses."""
        with without_modes():
            states = generator_states({storage.device for storage in self.tape.storages})
            return hashlib.blake2b(
                b"".join(states[kind].numpy().tobytes() for kind in sorted(states)), digest_size=_DIGEST_BYTES
            ).digest()

    def copy(self, target: int, source: int) -> None:
        """Record a copy of one value's contents to another."""
        writes = (self.tape.values[target].storage,)
        line = next((op.line for op in reversed(self.tape.ops) if source in op.outputs), "")
        op = RecordedOp("aten::copy_", (Ref(target), Ref(source)), (), (target,), writes, self.phase, False, line)
        self._spread_taint(op)
        self.tape.ops.append(op)

    def came_back(self, storage: torch.UntypedStorage, key: int) -> None:
        """Treat a storage as the one that was seen under this key, because it has the same contents and the earlier object may be gone."""
        if key in self._places:
            self._places[storage_identity(storage)] = _Place(self._places[key].storage, StorageWeakRef(storage))

    def add_scaled(self, target: torch.Tensor, other: torch.Tensor, factor: torch.Tensor) -> None:
        """Record `target.add_(other, alpha=factor.item())`, whose factor a meta tensor cannot supply."""
        value, args = self.value_of(target), (Ref(self.value_of(target)), Ref(self.value_of(other)))
        writes, alpha = (self.tape.values[value].storage,), Ref(self.value_of(factor))
        op = RecordedOp(ADD_SCALED, args, (("alpha", alpha),), (value,), writes, self.phase, False, program_line())
        self._spread_taint(op)
        self.tape.ops.append(op)

    def known(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage is already on the tape."""
        _require_strided(tensor)
        return storage_identity(tensor.untyped_storage()) in self._places

    # -- calls

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(func, args)
        if func in _COMPARED and self.recording:
            return self._compared(func, args, kwargs)
        if func is torch.ops.aten._pack_padded_sequence.default and self.recording:
            return self._packed_rows(func, args, kwargs)
        if func is torch.ops.aten._ctc_loss.Tensor and self.recording:
            self._require_padded_labels(*args[1:4])
        if not self.recording or func.namespace == "profiler":
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and has_kernel(func, DispatchKey.CompositeImplicitAutograd):
            with enable_reentrant_dispatch(), self:  # in this mode of torch's, such operators arrive whole
                return composite(func, *args, **kwargs)
        args, kwargs = self._as_kernels_read(func, args, kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor) and (functional := _without_out(func)) is not None:
            return self._copied_out(functional, args, kwargs)
        if (
            func is torch.ops.aten.lift_fresh.default
            and not self.known(args[0])
            and args[0].untyped_storage().resizable()
        ):
            self._fresh.add(self.tape.values[self.value_of(args[0])].storage)
        self._nodes.note()
        encoded = tuple(self._encode(a) for a in args)
        encoded_kwargs = tuple((k, self._encode(v)) for k, v in kwargs.items())
        writes = self._writes(func, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        before = self.generators() if random else b""
        without_kernel = (
            self.phase is Phase.UPDATE and not func._schema.returns
        )  # a fused update has none for meta tensors
        result: Any = None if without_kernel else func(*args, **kwargs)
        after = self.generators() if random else b""
        if func.overloadpacket is torch.ops.aten._ctc_loss:
            result = of_all_labels(args[1], result)
        outputs = flatten(result)
        if self.without_contents is not None and func is torch.ops.aten.lift_fresh.default:
            self.came_back(outputs[0].untyped_storage(), storage_identity(args[0].untyped_storage()))
        if not outputs and not writes and not only_checks(_name(func)):
            return result
        if any(t.is_conj() or t.is_neg() for t in outputs):
            return result
        moved = torch.Tag.inplace_view in func.tags and all(map(self._of_the_same_size, outputs))
        if outputs and (moved or not writes) and all(self.known(t) for t in outputs) and "out" not in kwargs:
            self._note_view(func, outputs)
            return result
        for t in outputs:
            if not self.known(t):
                self._new_storage(t, Role.TEMPORARY, "")
        op = RecordedOp(
            _name(func), encoded, encoded_kwargs, tuple(self.value_of(t) for t in outputs), writes,
            self.phase, random, self._nodes.line(), before, after,
        )  # fmt: skip
        self._spread_taint(op)
        self.tape.ops.append(op)
        return result

    def _note_view(self, func: Any, outputs: Sequence[torch.Tensor]) -> None:
        for t in outputs:
            self.value_of(t)
        if self.phase is Phase.FORWARD:
            self.tape.views.append(ViewCall(_name(func), program_line(), len(self.tape.ops)))

    def _as_kernels_read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments with real tensors instead of those that are only marked, or without contents if the step has none.

        Settings that differ from those at the start are also recorded.
        """
        if self._other_settings is None and self.without_contents is None and (now := arithmetic()) != self.settings:
            self._other_settings = program_line(), now
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._physical, (args, kwargs))
        if self.without_contents is not None and func is not torch.ops.aten.lift_fresh.default:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._emptied, (args, kwargs))
        return args, kwargs

    def _physical(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor or, if it is only marked as conjugate or negated, the tensor that kernels first compute from it."""
        if not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        self.tape.as_run = False
        if tensor.is_neg():
            unmarked = torch.ops.aten._neg_view(tensor)
            with self:
                return self._physical(torch.neg(unmarked))
        unmarked = tensor.conj()
        with self:
            return torch.conj_physical(unmarked)

    def _emptied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor without contents that replaces one with contents, at its place."""
        self.value_of(tensor)
        with without_modes():
            stands_in = emptied(tensor, self.without_contents)
        self.came_back(stands_in.untyped_storage(), storage_identity(tensor.untyped_storage()))
        return stands_in

    def _copied_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Run and record an operator and a copy of its result, instead of the variant that writes to `out`."""
        out: torch.Tensor = kwargs["out"]
        self.tape.as_run = False
        with self:
            result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
            if result.shape != out.shape:
                raise CaptureError(
                    f"{program_line()}: {_name(func)} makes a tensor of shape {list(result.shape)} for an out= of shape "
                    f"{list(out.shape)}, which would be resized; give one of the right shape"
                )
            return out.copy_(result)

    def _of_the_same_size(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage has as many bytes as when it was registered, so that only the view has moved, not the
        memory.
        """
        place = self._places.get(storage_identity(tensor.untyped_storage()))
        return place is not None and self.tape.storages[place.storage].nbytes == tensor.untyped_storage().nbytes()

    def _spread_taint(self, op: RecordedOp) -> None:
        sources = {self.tape.values[v].storage for v in operands(op)}
        if op.random or sources & self._tainted:
            self._tainted.update(self.tape.values[v].storage for v in op.outputs if v is not None)
            self._tainted.update(op.writes)

    def _item(self, func: Any, args: tuple[Any, ...]) -> Any:
        tensor = args[0]
        if self.phase is Phase.UPDATE:
            return self._number(func, tensor)
        result = func(*args)
        if self.recording:
            value = self.value_of(tensor)
            if self.tape.values[value].storage in self._tainted:
                self._guard(value, result)
        return result

    def _compared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare two tensors number by number, with an operator that shows what the result depends on."""
        one, other = args[:2]
        if func is torch.ops.aten.equal.default and one.shape != other.shape:
            return False
        with self:
            found = _COMPARED[func](*args, **kwargs).all()
        return bool(self._item(torch.ops.aten._local_scalar_dense.default, (found,)))

    def _packed_rows(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run and record the packing of a padded sequence as a selection of its rows, after guarding the lengths.

        The number of rows in each time step determines what recurrent layers do in code that is not an operator.
        """
        padded, lengths, batch_first = args
        packed, batch_sizes = func(*args, **kwargs)
        self.tape.as_run = False
        place = self._places.get(storage_identity(lengths.untyped_storage()))
        if place is not None and place.storage in self._tainted:
            item = torch.ops.aten._local_scalar_dense.default
            self._guard_each(lengths, "pack_padded_sequence", lambda number: self._item(item, (number,)))
        rows, steps = padded.shape[:2] if batch_first else reversed(padded.shape[:2])
        at = [
            row * steps + step if batch_first else step * rows + row
            for step, count in enumerate(batch_sizes.tolist())
            for row in range(count)
        ]
        with without_modes():
            chosen = torch.tensor(at, device=padded.device)
        with self:
            found = padded.reshape(rows * steps, *padded.shape[2:]).index_select(0, chosen)
        if (found.shape, found.stride()) != (packed.shape, packed.stride()):
            raise CaptureError(
                f"{program_line()}: packed rows that lie in memory as {packed.stride()} are not supported; train with `port-agent exec`"
            )
        return found, batch_sizes

    def _require_padded_labels(self, labels: torch.Tensor, *lengths: torch.Tensor) -> None:
        """Raise CaptureError if labels of a CTC loss are in one row although their lengths may differ in each batch."""
        places = [self._places.get(storage_identity(one.untyped_storage())) for one in lengths]
        if labels.dim() == 1 and any(place is not None and place.storage in self._tainted for place in places):
            raise CaptureError(
                f"{program_line()}: the CTC loss gets the labels of all samples in one row, and lengths that depend on the batch; give labels "
                "padded to equal lengths, one row per sample, or train with `port-agent exec`, which supports this"
            )

    def _of_the_model(self, value: int) -> bool:
        return self.tape.storages[self.tape.values[value].storage].role in (Role.PARAMETER, Role.BUFFER)

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        if not self.reads_numbers:
            return _STEP_COUNT
        if tensor.is_meta:
            raise CaptureError(
                f"{program_line() or 'a class of torch'}: the optimizer reads the value of a tensor in Python "
                "(.item(), float(), if), which depends on weights or gradients; a bundle does not contain its code: "
                f"{OPTIMIZER_REMEDY}"
            )
        return func(tensor)

    def read(self, tensor: torch.Tensor, method: str) -> None:
        """Guard each number of a tensor that the program reads with a method that is not an operator.

        Values that do not depend on the batch, the model or random numbers are not guarded, and neither are reads by an operator's own
        code. Raises CaptureError for non-integers, and for too many numbers.
        """
        place = self._places.get(storage_identity(tensor.untyped_storage())) if tensor.layout is torch.strided else None
        inside_operator = all(mode is not self for mode in current_modes())
        if not self.recording or place is None or place.storage not in self._tainted or inside_operator:
            return
        self._guard_each(tensor, method, torch.Tensor.item)

    def _guard_each(self, tensor: torch.Tensor, method: str, item: Callable[[torch.Tensor], Any]) -> None:
        """Guard each number of a tensor with a recorded `item`. Raises CaptureError as `read` does."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > _MAX_READ:
            raise CaptureError(
                f"{program_line()} reads {tensor.numel()} numbers of a tensor in Python (.{method}()), which depend "
                "on the batch, the model or random numbers; their consequences would be frozen into the plan. Use "
                "torch's operators instead, return it as an extra output, or train with `port-agent exec`, which "
                "supports such reads"
            )
        with torch.no_grad():
            for k in range(tensor.numel()):
                item(tensor.as_strided((), (), _offset_of(tensor, k)))

    def _guard(self, value: int, result: Any) -> None:
        if isinstance(result, float):
            raise CaptureError(
                f"{program_line()} reads the value {result} of a tensor in Python (.item(), float(), printing); it would be frozen "
                "into the plan. Return it as an extra output instead: loss_fn may return (loss, aux); or train with `port-agent exec`"
            )
        place = program_line()
        self.tape.ops.append(RecordedOp(GUARD, (Ref(value), result, place), (), (), (), self.phase, False, place))

    def _writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Return the storages that a call changes in place, by its schema or by known facts that the schema does not state."""
        schema = func._schema.arguments
        changed = []
        for i, argument in enumerate(schema):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(args[i] if i < len(args) else kwargs.get(argument.name))
        known = operator_of(_name(func))
        if known.allowed and known.hidden_writes and args[5] is True:
            changed.extend(args[i] for i in known.hidden_writes)
        tensors = [t for t in pytree.tree_leaves(changed) if isinstance(t, torch.Tensor)]
        writes = sorted({self.tape.values[self.value_of(t)].storage for t in tensors})
        if self.phase is not Phase.UPDATE:
            self._require_of_the_step(func, writes)
            written = [tensor for storage in writes for tensor in self._parameters.pop(storage, ())]
            self.before_writes += [(tensor, tensor.detach().clone()) for tensor in written]
        return tuple(writes)

    def _require_of_the_step(self, func: Any, writes: Iterable[int]) -> None:
        """Raise CaptureError if a call changes a tensor that exists before the step and does not belong to the model."""
        for s in writes:
            if self.tape.storages[s].role is Role.CONSTANT and s not in self._fresh:
                raise _carried(
                    f"{_name(func)} changes a tensor of {self.tape.storages[s].nbytes} bytes that exists before the "
                    "step and does not belong to the model"
                )

    def _encode(self, argument: Any) -> Argument:
        if isinstance(argument, torch.Tensor):
            value = self.value_of(argument)
            if self.reads_numbers and not argument.is_meta and self._of_the_model(value):
                raise CaptureError(
                    f"{program_line()}: the optimizer's step changes tensors of the model that are not in its "
                    "parameter groups; use those of the groups, or train with `port-agent exec`"
                )
            return Ref(value)
        if argument is None or isinstance(argument, bool | int | float | str):
            return argument
        if isinstance(argument, complex):
            return NamedArgument(COMPLEX, repr(argument))
        if isinstance(argument, list | tuple):
            return tuple(self._encode(a) for a in argument)
        if isinstance(argument, torch.device):
            of_stand_in = self.phase is Phase.UPDATE and argument.type == _NO_MEMORY
            return NamedArgument("device", self.stand_in_device if of_stand_in else argument.type)
        for kind, cls in NAMED_KINDS.items():
            if isinstance(argument, cls):
                return NamedArgument(kind, str(argument).removeprefix("torch."))
        if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"{program_line()}: the step has a symbolic size; call it with plain tensors of fixed shape"
            )
        if isinstance(argument, torch.Generator):
            raise CaptureError(
                f"{program_line()} draws random numbers from its own generator, which a bundle does not have: draw "
                "from torch's (leave `generator` out), or train with `port-agent exec`"
            )
        raise CaptureError(
            f"{program_line()}: an operator takes an argument of type {type(argument).__name__}, which a bundle cannot hold: give tensors, "
            "numbers or text, or train with `port-agent exec`"
        )


def _offset_of(tensor: torch.Tensor, k: int) -> int:
    """Return the offset of a tensor's k-th number in its storage, in elements."""
    offset = int(tensor.storage_offset())
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        k, place = divmod(k, size)
        offset += place * stride
    return offset


NAMED_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""torch's own named objects that may be arguments."""


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a storage's identity: no other storage has it while a StorageWeakRef of this one exists."""
    return int(StorageWeakRef(storage).cdata)


@cache
def _without_out(func: Any) -> Any:
    """Return the overload with the same arguments except `out`, which writes to no argument; None if there is none."""

    def taken(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if a.name != "out"]

    packet = func.overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        plain = all(a.alias_info is None for a in other._schema.arguments)
        if plain and other is not func and taken(other) == taken(func) and len(other._schema.returns) == 1:
            return other
    return None


def _require_strided(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        place = program_line()
        raise CaptureError(
            f"{place}{': ' * bool(place)}the step uses a {tensor.layout} tensor (or a lazy conjugate or negation); only strided dense tensors are "
            "supported: make embeddings with sparse=False, call .to_dense() or .resolve_conj() in the model, or train with `port-agent exec`"
        )


def _name(func: Any) -> str:
    name, overload = func._schema.name, func._schema.overload_name
    return f"{name}.{overload}" if overload else str(name)

"""Operators on a device whose memory has a budget: memory is freed for them, and an operator that the device lacks
memory for is tried once more.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from port_agent.backend.base import Backend
from port_agent.backend.choose import backend_of
from port_agent.backend.cuda import grow_segments
from port_agent.intercept.dispatch.operator_memory import OperatorMemory
from port_agent.intercept.dispatch.tiling_choice import MappedTiling, call_whole
from port_agent.intercept.dispatch.traits import OperatorTraits, traits_of
from port_agent.intercept.residency.device_memory import DeviceBudget, DeviceMeter, SharedDeviceBudget, outside_within
from port_agent.intercept.residency.device_storages import DeviceStorages, plain_operators
from port_agent.intercept.residency.memory import ProcessBudget
from port_agent.intercept.residency.operands import makes_storage, tensors_in
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.refusals import refuse_collective, unsupported
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, resize
from port_agent.intercept.residency.trace import Entry
from port_agent.intercept.tiles.elementwise import OperatorTiling, run_tiled, tiling_of
from port_agent.intercept.tiles.list_bits import SAMPLE_BYTES, list_bits, tile_bits
from port_agent.intercept.tiles.lists import runs_by_element
from port_planner.base.errors import program_line
from port_planner.base.units import format_bytes
from port_planner.ir.device_kinds import MPS

_NO_LIMIT = 1 << 62
_TILED_FROM = 4
"""Operands that together take less than this fraction of the limit fit beside what an operator over numbers makes."""
_OF_ILLEGAL_ADDRESSES = ("illegal memory access", "its data is not allocated yet")
"""Texts of the errors of CUDA and torch for an illegal address; the operator that raises one is often a later one."""


class DeviceFullError(torch.OutOfMemoryError):
    """An operator does not fit into a device's memory, even with everything else evicted."""


class DevicePool:
    """Runs the operators of one device within its memory; takes the place of `TilingChoice`, which
    is for those of the host.
    """

    def __init__(
        self,
        device: torch.device,
        pools: MemoryPools,
        *,
        ram_bytes: int | None = None,
        tensor_bytes: int | None = None,
        shared: ProcessBudget | None = None,
    ) -> None:
        """`ram_bytes`: limit of the whole process on the device; or `tensor_bytes`: limit of its tensors alone.
        `shared`: the budget of RAM instead, for a device that computes in the host's memory.

        Raises UnsupportedError, BudgetTooSmallError, and DeviceAbsentError for a device that the agent does not know.
        """
        if pools.devices or device.index != 0:
            raise unsupported(
                f"--gpu-ram bounds the memory of one GPU, the first, and a tensor is on {device}",
                "use one; CUDA_VISIBLE_DEVICES selects the one that the program sees",
            )
        self.device, self._pools, self._process = device, pools, shared
        self.backend = _resizing_backend(device, shared=shared is not None)
        grow_segments(device.type)
        outside_bytes = 0 if ram_bytes is None else outside_within(ram_bytes, self.backend)
        size = shared.ram_bytes if shared is not None else ram_bytes or tensor_bytes or 0
        host = pools.host.table
        table = host.add_device(device, min(host.smallest_bytes, max(size // 64, 256)))
        self.budget: DeviceBudget | None = None
        if shared is not None:
            self.budget = SharedDeviceBudget(shared, self.backend, table)
        elif ram_bytes is not None:
            self.budget = DeviceBudget(ram_bytes, outside_bytes, self.backend, table)
        self.storages = DeviceStorages(device, self.backend, pools.host, None if self.budget is None else size)
        limit = self.budget.tensor_bytes() if self.budget is not None else size
        self.residency = Residency(table, self.storages, limit)
        self._lists, self._tile_bits = list_bits(), tile_bits()
        self.fragmented_bytes = 0
        """The most bytes that the allocator had reserved without a tensor in them, at ends of segments and
        where an operator did not fit.
        """
        self.ran_again = 0
        """Operators that did not fit at first."""
        self.meter = DeviceMeter(self.backend)
        self.op_memory = OperatorMemory(self.residency, self.budget, self.meter)
        pools.add(self.residency)
        if shared is not None:
            self.storages.before_taking = self._take_from_host
            pools.host.others_leave = self._give_to_host

    def _take_from_host(self, nbytes: int) -> None:
        """Let the host's tensors leave for bytes that the device is about to take of the memory that both share."""
        process = self._process
        if process is not None and not math.isinf(self.residency.limit_bytes):
            process.coming_bytes = nbytes
            self._pools.host.limit_bytes = process.tensor_bytes()
            with self.storages.blocks.freeing():
                self._pools.host.try_make_free()
            process.coming_bytes = 0

    def _give_to_host(self, nbytes: int) -> bool:
        """Let tensors leave the device for bytes that the host lacks of the memory that both share; return whether any did."""
        process, residency = self._process, self.residency
        if process is None or self.storages.blocks.busy:  # what leaves takes memory of the host, too
            return False
        before, held_bytes = residency.limit_bytes, residency.table.resident_bytes
        residency.limit_bytes = max(held_bytes - nbytes, 0)
        try:
            with self.storages.blocks.freeing():
                residency.try_make_free()
        finally:
            residency.limit_bytes = before
        self._pools.host.limit_bytes = process.tensor_bytes()
        return residency.table.resident_bytes < held_bytes

    def concerns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator has an operand or makes its result on this device."""
        if self._is_named(kwargs.get("device")):
            return True
        return any(t.device == self.device for t in tensors_in((*args, *kwargs.values())))

    def _is_named(self, device: Any) -> bool:
        if device is None:
            return False
        named = torch.device(device)
        return named.type == self.device.type and named.index in (None, self.device.index)

    def runs_by_element(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a call over lists, which do not fit together, has the same bits if it runs on
        one element after the other.
        """
        if not runs_by_element(func, args, self.residency.limit_bytes):
            return False
        self.residency.try_make_free(SAMPLE_BYTES)
        return self._lists.has_bits_of_whole(func, args, kwargs)

    # -- as `TilingChoice`: numbers alone run in tiles here

    def tiled_call(
        self, traits: OperatorTraits, func: Any, args: Sequence[Any], kwargs: dict[str, Any], input_bytes: int
    ) -> tuple[OperatorTiling | None, MappedTiling | None]:
        """Return the tiling of an operator over numbers that do not fit together, if its bits are the same in tiles.

        Raises UnsupportedError for one that moves tensors between processes.
        """
        refuse_collective(func)
        limit_bytes = self.residency.limit_bytes
        if not traits.tiled or traits.takes_lists or input_bytes <= limit_bytes / _TILED_FROM:
            return None, None
        given = [t for t in tensors_in((*args, *kwargs.values())) if t.numel() > 1]
        if any(t.device != self.device for t in given) or not self._is_named(kwargs.get("device") or self.device):
            return None, None
        tiling = tiling_of(func, args, kwargs, limit_bytes)
        if tiling is None or tiling.row or tiling.runs or not self._tile_bits.has_bits_of_whole(func, args, kwargs):
            return None, None
        return tiling, None

    def ensure_resident(
        self, traits: OperatorTraits, inputs: list[Storage], mapped: MappedTiling | None, *, whole: bool
    ) -> tuple[list[Storage], MappedTiling | None]:
        """Make operands resident, or let those stay away that are read in tiles.

        Raises DeviceFullError if they do not fit together.
        """
        held = inputs if whole else [s for s in inputs if s.resident]
        try:
            self._pools.ensure_resident(held)
        except torch.OutOfMemoryError as error:
            raise self.full(traits, inputs) from error
        return held, None

    def make_free(
        self,
        traits: OperatorTraits,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: list[Storage],
        held: list[Storage],
        entry: Entry | None,
        mapped: MappedTiling | None,
        *,
        writes: bool,
    ) -> None:
        """Free memory for an operator's results and workspace, in the pool where they will be."""
        there = kwargs.get("device")
        residency = self.residency if there is None or self._is_named(there) else self._pools.host
        if entry is not None:
            need_bytes = entry.need_bytes
        else:
            need_bytes = self.op_memory.expected_bytes(traits, args, {**kwargs, "device": None}, inputs)
        try:
            if residency is self.residency:
                self._take_from_host(need_bytes)
            if not (need_bytes or writes):
                residency.try_make_free()
            elif not residency.make_free(need_bytes) and residency is self.residency:
                self.op_memory.short(traits.name, [s for s in held if s.table is residency.table], need_bytes)
        except torch.OutOfMemoryError as error:
            raise self.full(traits, inputs) from error

    def run_tiles(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tiling: OperatorTiling,
        inputs: list[Storage],
        written: list[Storage],
    ) -> Any:
        """Run an operator in tiles; what it makes begins whole, and leaves at once where it does not fit.

        Raises DeviceFullError.
        """
        self.storages.streams.note()
        try:
            for storage in inputs:
                storage.pins -= 1
            try:
                made_bytes = tiling.made_bytes if makes_storage(func) else 0
                self.residency.make_free(tiling.buffers_bytes + made_bytes)
            finally:
                for storage in inputs:
                    storage.pins += 1
            return run_tiled(func, args, kwargs, tiling, written, self.residency, self._pools.host.table)
        except torch.OutOfMemoryError as error:
            raise self.full(traits_of(func), inputs) from error
        finally:
            for storage in written:
                storage.clean = not storage.resident

    def call(self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage]) -> Any:
        """Call an operator; if the device lacks memory, call it once more with all other tensors evicted.

        Raises DeviceFullError.
        """
        self.storages.streams.note()
        for stream in (one for one in args if isinstance(one, torch.Stream)):  # of record_stream
            self.storages.streams.note(stream)
        random = torch.Tag.nondeterministic_seeded in traits.func.tags
        state = self.backend.generator_state() if random else None
        try:
            return call_whole(traits, args, kwargs)
        except torch.OutOfMemoryError as error:
            if traits.writes or kwargs.get("generator") is not None:  # it may have begun
                raise self.full(traits, inputs) from error
        self._note_fragmentation()
        self.residency.empty()
        self.storages.release()
        if state is not None:
            self.backend.set_generator_state(state)
        try:
            result = call_whole(traits, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise self.full(traits, inputs) from error
        self._report_ran_again(traits)
        return result

    def ran(self) -> None:
        """Compare resident bytes with the limit after each operator; the limit is measured again from time to time."""
        if self.budget is not None and self.budget.due():
            self.residency.limit_bytes = self.budget.tensor_bytes()
        if self.residency.table.resident_bytes > self.residency.limit_bytes:
            self.residency.try_make_free()

    def end_segment(self) -> None:
        """Handle the end of a segment of the program."""
        self._note_fragmentation()
        if self.budget is not None:
            self.budget.end_segment()

    def lift(self) -> None:
        """Remove the budget, and free unused memory."""
        self.storages.release()
        if self.budget is not None:
            self.backend.limit(_NO_LIMIT)

    def bind(self) -> None:
        """Apply the budget again after `lift`."""
        if self.budget is not None:
            self.budget.enforce()

    def _note_fragmentation(self) -> None:
        self.fragmented_bytes = max(
            self.fragmented_bytes, self.backend.reserved_bytes() - self.backend.allocated_bytes()
        )

    def _report_ran_again(self, traits: OperatorTraits) -> None:
        self.ran_again += 1
        if self.ran_again == 1:
            place = program_line()
            sys.stderr.write(
                f"port-agent: {place + ': ' if place else ''}{traits.name} did not fit on {self.device} at first ({format_bytes(self.fragmented_bytes)} "
                "were reserved without a tensor). It ran after everything else had left and unused memory was given back. More memory than "
                f"{self._bound} avoids that\n"
            )

    def explain(self, error: BaseException) -> None:
        """Add a note to an error about an illegal address: the budget may be its cause."""
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _OF_ILLEGAL_ADDRESSES):
            error.add_note(
                f"port-agent: the memory of {self.device} has a budget ({self._bound}). Something other than an operator may have used an "
                "evicted tensor: a kernel in C++, or a thread that is older than the budget. Call the tensor's data_ptr() before, so that it "
                "stays until the step ends, or run without a budget for this memory"
            )

    @property
    def _bound(self) -> str:
        if self._process is not None:
            return f"--ram {format_bytes(self._process.ram_bytes)}, which {self.device} shares"
        if self.budget is None:
            return f"--gpu-tensors {format_bytes(self.residency.limit_bytes)}"
        return f"--gpu-ram {format_bytes(self.budget.ram_bytes)}"

    def full(self, traits: OperatorTraits, inputs: Sequence[Storage]) -> DeviceFullError:
        """Return the error for an operator on `inputs` that does not fit with everything else evicted."""
        own = {s for s in inputs if s.table is self.residency.table}
        place = program_line()
        return DeviceFullError(
            f"{place + ': ' if place else ''}{traits.name} is out of memory on {self.device}: its operands take "
            f"{format_bytes(sum(s.nbytes for s in own))}, {format_bytes(self.backend.allocated_bytes())} are in use of {self._bound}, "
            f"and nothing else can leave; give more, or smaller batches"
        )


def _resizing_backend(device: torch.device, *, shared: bool) -> Backend:
    """Return the backend of a device whose storages can be emptied and filled.

    `shared`: whether it shares a budget of the host's memory. Raises UnsupportedError by name for others.
    """
    budget = f"--device {device.type} {'--ram' if shared else '--gpu-ram'} SIZE"
    plan = f"plan the training with `port-agent plan {budget}`, which needs no storage to be emptied"
    if device.type == MPS:
        raise unsupported('torch 2.13 cannot resize storages of MPS ("unexpected device type mps")', plan)
    backend = backend_of(device.type)
    if backend.unified and not shared:
        raise unsupported(
            f"{device} shares the host's memory: tensors that left it would stay there",
            "give --ram SIZE alone, which bounds both",
        )
    with plain_operators():
        tried = torch.zeros(1, dtype=torch.uint8, device=device).untyped_storage()
        try:
            resize(tried, 0)
        except RuntimeError as error:
            raise unsupported(
                f"torch {torch.__version__} cannot resize storages of {device} ({error})", plan
            ) from error
    return backend

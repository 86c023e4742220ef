"""Operators on a device whose memory has a budget: memory is freed for them, and an operator that the device lacks memory for is tried
once more.
"""

from collections.abc import Sequence
from typing import Any

import torch

from port_agent.backend.base import Backend
from port_agent.backend.choose import backend_of
from port_agent.intercept.dispatch.operator_memory import OperatorMemory
from port_agent.intercept.dispatch.tiling_choice import MappedTiling, call_whole
from port_agent.intercept.dispatch.traits import OperatorTraits
from port_agent.intercept.residency.device_memory import DeviceBudget, DeviceMeter, outside_within
from port_agent.intercept.residency.device_storages import DeviceStorages, plain_operators
from port_agent.intercept.residency.operands import tensors_in
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.refusals import refuse_collective, unsupported
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, resize
from port_agent.intercept.residency.trace import Entry
from port_agent.intercept.tiles.elementwise import OperatorTiling
from port_agent.intercept.tiles.list_bits import SAMPLE_BYTES, ListBits
from port_agent.intercept.tiles.lists import runs_by_element
from port_planner.base.errors import program_line
from port_planner.base.units import format_bytes
from port_planner.ir.device_kinds import MPS

_NO_LIMIT = 1 << 62


class DeviceFullError(torch.OutOfMemoryError):
    """An operator does not fit into a device's memory, even with everything else evicted."""


class DevicePool:
    """Runs the operators of one device within its memory; takes the place of `TilingChoice`, which is for those of the host."""

    def __init__(
        self, device: torch.device, pools: MemoryPools, *, ram_bytes: int | None, tensor_bytes: int | None
    ) -> None:
        """`ram_bytes`: limit of the whole process on the device; or `tensor_bytes`: limit of its tensors alone.

        Raises UnsupportedError, BudgetTooSmallError, and DeviceAbsentError for a device that the agent does not know.
        """
        if pools.devices or device.index != 0:
            raise unsupported(
                f"--gpu-ram bounds the memory of one GPU, the first, and a tensor is on {device}",
                "use one; CUDA_VISIBLE_DEVICES selects the one that the program sees",
            )
        self.device, self._pools = device, pools
        self.backend = _resizing_backend(device)
        outside_bytes = 0 if ram_bytes is None else outside_within(ram_bytes, self.backend)
        size = ram_bytes if ram_bytes is not None else tensor_bytes or 0
        host = pools.host.table
        table = host.add_device(device, min(host.smallest_bytes, max(size // 64, 256)))
        self.budget = None if ram_bytes is None else DeviceBudget(ram_bytes, outside_bytes, self.backend, table)
        self.storages = DeviceStorages(device, self.backend, pools.host, ram_bytes)
        limit = self.budget.tensor_bytes() if self.budget is not None else size
        self.residency = Residency(table, self.storages, limit)
        self._lists = ListBits()
        self.meter = DeviceMeter(self.backend)
        self.op_memory = OperatorMemory(self.residency, self.budget, self.meter)
        pools.add(self.residency)

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
        """Return whether a call over lists, which do not fit together, has the same bits if it runs on one element after the other."""
        if not runs_by_element(func, args, self.residency.limit_bytes):
            return False
        self.residency.try_make_free(SAMPLE_BYTES)
        return self._lists.has_bits_of_whole(func, args, kwargs)

    # -- as `TilingChoice`: nothing runs in pieces here

    def tiled_call(
        self, traits: OperatorTraits, func: Any, args: Sequence[Any], kwargs: dict[str, Any], input_bytes: int
    ) -> tuple[OperatorTiling | None, MappedTiling | None]:
        """Return None, because an operator runs whole here. Raises UnsupportedError for one that moves tensors between processes."""
        refuse_collective(func)
        return None, None

    def ensure_resident(
        self, traits: OperatorTraits, inputs: list[Storage], mapped: MappedTiling | None, *, whole: bool
    ) -> tuple[list[Storage], MappedTiling | None]:
        """Make operands resident. Raises DeviceFullError if they do not fit together."""
        try:
            self._pools.ensure_resident(inputs)
        except torch.OutOfMemoryError as error:
            raise self._full(traits, inputs) from error
        return inputs, None

    def make_free(
        self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage],
        held: list[Storage], entry: Entry | None, mapped: MappedTiling | None, *, writes: bool,
    ) -> None:  # fmt: skip
        """Free memory for an operator's results and workspace, in the pool where they will be."""
        there = kwargs.get("device")
        residency = self.residency if there is None or self._is_named(there) else self._pools.host
        if entry is not None:
            need_bytes = entry.need_bytes
        else:
            need_bytes = self.op_memory.expected_bytes(traits, args, {**kwargs, "device": None}, inputs)
        try:
            if not (need_bytes or writes):
                residency.try_make_free()
            elif not residency.make_free(need_bytes) and residency is self.residency:
                self.op_memory.short(traits.name, [s for s in held if s.table is residency.table], need_bytes)
        except torch.OutOfMemoryError as error:
            raise self._full(traits, inputs) from error

    def run_tiles(self, *_: Any) -> Any:
        """Raise RuntimeError: operators of a device are not tiled."""
        raise RuntimeError("operators of a device run whole; report this")

    def call(self, traits: OperatorTraits, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage]) -> Any:
        """Call an operator; if the device lacks memory, call it once more with all other tensors evicted. Raises DeviceFullError."""
        self.storages.streams.note()
        random = torch.Tag.nondeterministic_seeded in traits.func.tags
        state = self.backend.generator_state() if random else None
        try:
            return call_whole(traits, args, kwargs)
        except torch.OutOfMemoryError as error:
            if traits.writes or kwargs.get("generator") is not None:  # it may have begun
                raise self._full(traits, inputs) from error
        self.residency.empty()
        self.storages.release()
        if state is not None:
            self.backend.set_generator_state(state)
        try:
            return call_whole(traits, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise self._full(traits, inputs) from error

    def ran(self) -> None:
        """Compare resident bytes with the limit after each operator; the limit is measured again from time to time."""
        if self.budget is not None and self.budget.due():
            self.residency.limit_bytes = self.budget.tensor_bytes()
        if self.residency.table.resident_bytes > self.residency.limit_bytes:
            self.residency.try_make_free()

    def end_segment(self) -> None:
        """Handle the end of a segment of the program."""
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

    def _full(self, traits: OperatorTraits, inputs: Sequence[Storage]) -> DeviceFullError:
        own = {s for s in inputs if s.table is self.residency.table}
        bound = "no budget" if self.budget is None else format_bytes(self.budget.ram_bytes)
        place = program_line()
        return DeviceFullError(
            f"{place + ': ' if place else ''}{traits.name} is out of memory on {self.device}: its operands take "
            f"{format_bytes(sum(s.nbytes for s in own))}, {format_bytes(self.backend.allocated_bytes())} are in use of --gpu-ram "
            f"{bound}, and nothing else can leave; give more, or smaller batches"
        )


def _resizing_backend(device: torch.device) -> Backend:
    """Return the backend of a device whose storages can be emptied and filled. Raises UnsupportedError by name for others."""
    plan = "plan the training with `port-agent plan --gpu-ram SIZE`, which needs no storage to be emptied"
    if device.type == MPS:
        raise unsupported('torch 2.13 cannot resize storages of MPS ("unexpected device type mps")', plan)
    backend = backend_of(device.type)
    if backend.unified:
        raise unsupported(
            f"{device} shares the host's memory: evicted tensors would stay in it, and one budget for both is not supported",
            plan,
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

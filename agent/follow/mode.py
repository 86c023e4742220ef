"""The dispatch mode: every ATen operator of the program passes through here."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from agent.follow import autocast
from agent.follow.light_dynamo import never_compile
from agent.follow.lists import runs_by_element, split_call
from agent.follow.memory import ProcessBudget, WorkspaceMeter
from agent.follow.operands import (
    bare_storages_in,
    makes_storage,
    reads_nothing,
    result_bytes,
    storages_in,
    tensors_in,
    written_arguments,
    written_storages,
)
from agent.follow.piecewise import PIECE_BYTES, pieces_of, run_piecewise
from agent.follow.recompute import SMALLEST_BYTES as RECIPE_BYTES
from agent.follow.recompute import WORTH, recipe_of, repeatable
from agent.follow.residency import Residency
from agent.follow.storages import Storage, StorageTable
from agent.follow.trace import AHEAD, LONGEST_SEGMENT, Entry, TraceBook, Use
from planner.ir.errors import ExitCode, PortError

_PACKING = frozenset(
    f"aten::{name}" for name in ("convolution", "convolution_backward", "addmm", "mm", "bmm", "baddbmm")
)
"""Operators whose kernels copy operands into an order of their own."""

_UNKNOWN_WORKSPACE = 1.0
"""Share of their operands' size that they are expected to take before they were seen."""

_SHOWN_AT_ONCE = 2
"""`torch.save` asks for a storage's size right before it writes its bytes, one storage after the other."""


class Follower:
    """Runs operators with their storages resident. One lock: the program's threads take turns at operators."""

    def __init__(self, table: StorageTable, residency: Residency, process: ProcessBudget | None) -> None:
        self.table, self.residency = table, residency
        self._process = process
        self._workspace = WorkspaceMeter(enabled=process is not None)
        self._workspace_shares: dict[Any, float] = {}
        """The most that each operator took besides its operands and results, as a share of its operands."""
        self.book = TraceBook()
        self.lock = threading.RLock()
        self.operators = 0
        self._fetched_to = 0
        self._escaped: list[Storage] = []
        self._escaped_before: list[Storage] = []
        self._shown: deque[Storage] = deque()

    # -- one operator

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator as it was called; its followed operands are resident while it runs. Raises PageError."""
        _refuse_other_formula(func, args)
        with self.lock:
            self.residency.bury()
            if runs_by_element(func, args, self.residency.limit_bytes):
                return split_call(func, args, kwargs, self._run_one)
            return self._run_one(func, args, kwargs)

    def _run_one(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        residency, book = self.residency, self.book
        self.operators += 1
        residency.clock += 1
        inputs = [] if reads_nothing(func) else storages_in((*args, *kwargs.values()), self.table)
        if func._schema.name == "aten::set_":
            inputs += bare_storages_in(args, self.table)
        fingerprint = hash((id(func), *[s.nbytes for s in inputs]))
        entry = book.expect(fingerprint)
        if residency.may_recompute and entry is None:
            residency.victims.demote()
        residency.may_recompute = entry is not None
        written: list[Storage] = []
        large = pieces_of(func, args, kwargs, residency.limit_bytes)
        for storage in inputs:
            storage.pins += 1
        try:
            residency.bring(inputs if large is None else [s for s in inputs if s.resident or not s.clean or s.mapped])
            if written_arguments(func):
                written = self._before_write(func, args, kwargs)
            if large is None:
                residency.make_room(entry.need_bytes if entry else self._expected_bytes(func, args, kwargs, inputs))
            self._workspace.begin()
            first_made = self.table.met
            began = time.perf_counter()
            if large is None:
                result = _call(func, args, kwargs)
            else:
                result = self._run_piecewise(func, args, kwargs, large, inputs, written)
            for storage in written:
                if storage.resident:
                    residency.resized(storage)
        finally:
            for storage in inputs:
                storage.pins -= 1
        self._after(func, args, kwargs, fingerprint, entry, inputs, first_made, result, time.perf_counter() - began)
        return result

    def _run_piecewise(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], large: list[torch.Tensor], inputs: list[Storage],
        written: list[Storage],
    ) -> Any:  # fmt: skip
        """Run an elementwise operator whose operands do not fit together; those that do not fit leave, or stay away.

        They leave for the page file, not to be recomputed: a piece of them must be there to be read.
        """
        residency = self.residency
        may_recompute, residency.may_recompute = residency.may_recompute, False
        for storage in inputs:
            storage.pins -= 1
        try:
            residency.make_room(PIECE_BYTES * (len(large) + 1))
        finally:
            residency.may_recompute = may_recompute
            for storage in inputs:
                storage.pins += 1
        try:
            return run_piecewise(func, args, kwargs, large, written, residency, self.table)
        finally:
            for storage in written:
                storage.clean = not storage.resident

    def _expected_bytes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Storage]) -> int:
        """Return what an operator that no trace knows makes, and a guess of what it takes besides."""
        made = result_bytes(func, args, kwargs) if self.residency.pressed else None
        if made is None:
            made = max((s.nbytes for s in inputs), default=0) if makes_storage(func) else 0
        share = self._workspace_shares.get(func)
        if share is None:
            share = _UNKNOWN_WORKSPACE if self._process is not None and func._schema.name in _PACKING else 0.0
        return made + int(share * sum(s.nbytes for s in inputs))

    def _before_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Storage]:
        """Make what was dropped because it could be made from what changes now; count the change before making room."""
        written = written_storages(func, args, kwargs, self.table)
        for storage in written:
            dependents, storage.dependents = storage.dependents, None
            self.residency.bring(
                [d for d in dependents or () if not d.resident and not d.clean and d.ref() is not None]
            )
        for storage in written:
            self.residency.changes(storage)
        return written

    def _after(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], fingerprint: int, entry: Entry | None,
        inputs: list[Storage], first_made: int, result: Any, seconds: float,
    ) -> None:  # fmt: skip
        residency, book, table = self.residency, self.book, self.table
        made: list[Storage] = []
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
            storage = table.of(tensor) if tensor.layout is torch.strided else None
            if storage is not None and storage.number >= first_made and storage.birth is None:
                storage.birth = (book.segment, book.position, len(made))
                made.append(storage)
        touched = (*inputs, *made)
        if entry is not None and len(entry.next_uses) == len(touched):
            for storage, position in zip(touched, entry.next_uses, strict=True):
                residency.victims.touch(storage, residency.clock, book.next_clock(storage, position))
        else:
            for storage in touched:
                residency.victims.touch(storage, residency.clock, None)
        workspace_bytes = self._workspace.end(sum(s.nbytes for s in made if s.resident))
        if residency.pressed and len(made) == 1 and repeatable(func) and self._worth_repeating(made[0], seconds):
            made[0].recipe = recipe_of(func, args, kwargs, inputs, made[0], result, workspace_bytes=workspace_bytes)
        if workspace_bytes:
            share = workspace_bytes / max(sum(s.nbytes for s in inputs), workspace_bytes)
            self._workspace_shares[func] = max(self._workspace_shares.get(func, 0.0), share)
        book.ran(fingerprint, inputs, made, workspace_bytes)
        if residency.pressed:
            self._learn(touched)
        if book.position >= LONGEST_SEGMENT:
            self.end_segment()
        if self._process is not None and self._process.due():
            residency.limit_bytes = self._process.tensor_bytes()
        if table.resident_bytes > residency.limit_bytes:
            residency.make_room(0)
        if residency.pressed and entry is not None:
            self._fetch_ahead()

    def _worth_repeating(self, made: Storage, seconds: float) -> bool:
        return made.nbytes >= RECIPE_BYTES and seconds < WORTH * self.residency.paging_seconds(made.nbytes)

    def _learn(self, touched: Sequence[Storage]) -> None:
        """Remember where each storage was used, and start writing those that left after this use the last time."""
        entry = self.book.entry_run()
        leaving = entry.leaving
        for operand, storage in enumerate(touched):
            storage.left_at = Use(entry, operand)
            if leaving is not None and operand in leaving:
                self.residency.write_early(storage)

    def _fetch_ahead(self) -> None:
        """Start reading what the next operators of the trace need, as far as there is room."""
        book = self.book
        trace = book.matched
        if trace is None:
            return
        place = max(self._fetched_to, book.position)
        stop = min(book.position + AHEAD, len(trace.entries))
        if place >= stop:
            return
        reserve_bytes = trace.entries[book.position].room_bytes
        while place < stop:
            for local in trace.entries[place].operands:
                number = book.number_of(local)
                storage = None if number is None else self.table.numbered(number)
                if storage is None or storage.resident:
                    continue
                if not self.residency.prefetch(storage, reserve_bytes, book.start_clock + place):
                    self._fetched_to = place
                    return
            place += 1
        self._fetched_to = place

    # -- between operators

    def end_segment(self) -> None:
        """Take note that a backward() or an optimizer's step ended. Pointers that left in the one before are void now."""
        with self.lock:
            self.book.end_segment(self.residency.clock + 1)
            if self._process is not None:
                self._process.end_segment()
            self._fetched_to = 0
            for storage in self._escaped_before:
                storage.pins -= 1
            self._escaped_before, self._escaped = self._escaped, []

    def escape(self, storage: Storage) -> None:
        """Keep a storage resident until the next segment ends: a pointer to it leaves, and may be written through."""
        with self.lock:
            storage.pins += 1
            self._escaped.append(storage)
            self.residency.bring([storage])
            self.residency.changes(storage)

    @contextlib.contextmanager
    def reading(self, storage: Storage) -> Iterator[None]:
        """Keep a storage resident for the time of a call that reads it past the dispatcher."""
        with self.lock:
            storage.pins += 1
            try:
                self.residency.bring([storage])
                yield
            finally:
                storage.pins -= 1

    def meet(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was made past the dispatcher."""
        with self.lock:
            if tensor.layout is torch.strided:
                self.table.of(tensor)
            self.residency.make_room(0)

    def show(self, storage: Storage) -> None:
        """Keep a storage resident until a few others were shown: its size is asked for, and then its bytes are read."""
        with self.lock:
            storage.pins += 1
            self._shown.append(storage)
            self.residency.bring([storage])
            while len(self._shown) > _SHOWN_AT_ONCE:
                self._shown.popleft().pins -= 1
            self.residency.make_room(0)


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func._schema.name not in autocast.FUSED:
        return func(*args, **kwargs)
    with autocast.as_the_program_has_it():
        return func(*args, **kwargs)


class NotFollowedError(PortError):
    """The program does something that cannot be followed with the same numbers."""

    exit_code = ExitCode.IMPOSSIBLE


def _refuse_other_formula(func: Any, args: Sequence[Any]) -> None:
    """Refuse operators whose gradient torch computes by another formula while any dispatch mode is active.

    `prod_backward` asks `areAnyTensorSubclassLike`, which is true then (torch/csrc/autograd/FunctionsManual.cpp).
    """
    if func._schema.name == "aten::prod" and torch.is_grad_enabled() and args[0].requires_grad:
        raise NotFollowedError(
            "the gradient of prod() has other last digits while operators are followed; take x.log().sum().exp(), or "
            "compute it under torch.no_grad(), or run the program without a budget"
        )


@cache
def _is_composite(func: Any) -> bool:
    """Tell whether an operator is made of others.

    In inference mode such operators come to a dispatch mode whole. Run there, with autograd switched off below, a product
    with a weight is not folded as in plain PyTorch (`should_fold` in LinearAlgebra.cpp asks `requires_grad`).
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class FollowMode(TorchDispatchMode):
    """The follower in one thread of the program; a mode belongs to a thread."""

    def __init__(self, follower: Follower) -> None:
        initialise: Any = super().__init__
        initialise()
        self._follower = follower

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True wraps each call in torch._dynamo, which takes 70 MiB; `never_compile` does without

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator; a tensor subclass takes itself apart first, and its parts come here."""
        if types and any(is_traceable_wrapper_subclass(t) for t in tensors_in((*args, *(kwargs or {}).values()))):
            return NotImplemented
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with enable_reentrant_dispatch(), self:
                # torch's own kernel; `decompose` prefers decompositions in Python, which have other bits (gru)
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        return self._follower.run(func, args, kwargs or {})


never_compile(FollowMode.__torch_dispatch__)

"""The dispatch mode, through which every ATen operator of the program passes."""

import _thread
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import enable_reentrant_dispatch

from port_agent.backend.choose import shares_host_memory
from port_agent.intercept.decisions.prefetcher import Prefetcher
from port_agent.intercept.decisions.rematerialization import remat_of
from port_agent.intercept.decisions.step_planner import StepPlanner
from port_agent.intercept.dispatch.device_pool import DevicePool
from port_agent.intercept.dispatch.operator_memory import OperatorMemory
from port_agent.intercept.dispatch.pace import CpuPace
from port_agent.intercept.dispatch.signals import SignalSafeLock
from port_agent.intercept.dispatch.tangents import refuse_tangents
from port_agent.intercept.dispatch.tiling_choice import TilingChoice
from port_agent.intercept.dispatch.traits import OperatorTraits, traits_of
from port_agent.intercept.dispatch.values_alone import composite_kernel
from port_agent.intercept.residency.device_storages import plain_operators
from port_agent.intercept.residency.memory import ProcessBudget, WorkspaceMeter
from port_agent.intercept.residency.operands import (
    bare_storages_in,
    is_composite,
    is_wrapper,
    storages_in,
    tensors_in,
    written_storages,
)
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.refusals import refuse_higher_order, refuse_unsupported, unsupported
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, StorageTable, read_mapping_ahead
from port_agent.intercept.residency.trace import AHEAD, LONGEST_SEGMENT, Entry, TraceBook
from port_agent.intercept.tiles.lists import runs_by_element, split_call
from port_agent.intercept.tiles.rows import MappedRows
from port_agent.malloc import release_free_memory
from port_planner.base.code_pages import release_code_pages
from port_planner.torch_compat.loading import never_compile
from port_planner.torch_compat.modes import OperatorMode, current_modes, pop_mode, push_mode
from port_planner.torch_compat.tensors import FakeTensor

_LARGE_SHARE = 1 / 2
"""Share of the limit that a mapped file must have to evict tensors while it is read."""
_KEPT_SHARE = 1 / 2
"""Largest share of the memory for tensors that is reserved for a program that announces reuse."""


class _OperatorCall(NamedTuple):
    """One operator as the program calls it, with what is known before it runs.

    `whole`: it does not run in tiles. `written`: storages that it changes.
    """

    way: TilingChoice | DevicePool
    traits: OperatorTraits
    args: Sequence[Any]
    kwargs: dict[str, Any]
    fingerprint: int
    entry: Entry | None
    inputs: list[Storage]
    written: list[Storage]
    whole: bool


class Interceptor:
    """Runs operators with their storages resident; under one lock, threads take turns at operators."""

    def __init__(
        self,
        table: StorageTable,
        residency: Residency,
        process: ProcessBudget | None,
        planner: StepPlanner,
        at_step: Callable[[], None],
    ) -> None:
        """`at_step` is called after each optimizer step."""
        self.table, self.residency, self.planner = table, residency, planner
        self.pools = MemoryPools(residency)
        self.device: DevicePool | None = None
        """The pool of the device whose memory has a budget; see `bound_devices`."""
        self.guarded = residency.backing.guarded
        """Whether an access to an evicted tensor brings it back."""
        self.recomputes = True
        """Whether results may be dropped and recomputed."""
        self._process, self._at_step = process, at_step
        self.op_memory = OperatorMemory(residency, process, WorkspaceMeter(enabled=process is not None))
        self._tiling = TilingChoice(table, residency, self.op_memory)
        self.book = TraceBook()
        self._prefetcher = Prefetcher(table, self.pools, planner, self.book)
        self.lock = SignalSafeLock(self._outside_of_operators)
        self._may_run = self.lock.condition()
        self._held = False
        self.when_interrupted: Callable[[], None] = lambda: None
        """Function that is called when a signal handler ends the waiting of a paused program."""
        self.when_made: Callable[[Sequence[Storage]], object] = lambda made: None
        """Function that is called with the storages that an operator made, before anything is evicted for them."""
        self.waits = self.guarded
        """Whether no operator is intercepted yet; see `begin`."""
        self._near = False
        self.aside = False
        """Whether interception has ended for good; see `stand_aside`."""
        self.backwards = 0
        """Number of backward passes in progress."""
        self._pace: CpuPace | None = None
        self._at_hand: Any = None
        """The operator that started last."""
        self.operators = 0
        self.steps = 0
        """Optimizer steps."""
        self._exported: list[Storage] = []
        self._exported_before: list[Storage] = []

    def bound_devices(self, *, ram_bytes: int | None, tensor_bytes: int | None) -> None:
        """Limit the bytes that the program holds on a GPU, too; no step is planned then.

        The GPU is that of the program's first tensor on a GPU; until then, the program may choose which GPUs it sees.
        That tensor's operator raises the errors of `DevicePool`.
        """

        def bound(device: torch.device) -> None:
            with plain_operators():
                self.device = DevicePool(device, self.pools, ram_bytes=ram_bytes, tensor_bytes=tensor_bytes)

        self.table.expect_devices(bound)
        self.planner.plan_nothing()
        self.begin(near=True)

    def share_devices(self) -> None:
        """Limit what the program holds on a device that computes in the host's memory by the budget of this memory, too.

        The first operator with a tensor there raises the errors of `DevicePool`; no step is planned from then on.
        """

        def bound(device: torch.device) -> None:
            if device.type in self.table.elsewhere or not shares_host_memory(device.type):
                return
            with plain_operators():
                self.device = DevicePool(device, self.pools, shared=self._process)
            self.planner.close()
            self.planner.plan_nothing()

        self.table.expect_devices(bound)
        self.begin(near=True)

    # -- one operator

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator as called, with its intercepted operands resident meanwhile. Raises PageError."""
        with self.lock:
            if self._held or self._pace is not None:
                self._wait_while_held()
            traits = traits_of(func)
            if traits.views:
                return func(*args, **kwargs) if traits.known.whole_view else self._view(func, args, kwargs)
            self._at_hand = func
            self._reclaim()
            if traits.takes_lists and self._runs_by_element(func, args, kwargs):
                return split_call(func, args, kwargs, self._run_one)
            return self._run_one(func, args, kwargs)

    def _runs_by_element(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        device = self.device
        if device is not None and device.concerns(args, kwargs):
            return device.runs_by_element(func, args, kwargs)
        return runs_by_element(func, args, self.residency.limit_bytes)

    def _reclaim(self) -> None:
        """Reclaim the memory of dead storages, and record their end."""
        for residency in self.pools:
            for gone in residency.reclaim_dead():
                self.book.ended(gone)
                if self.planner.recording is not None:
                    self.planner.recording.ended(gone)

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return views of operands. Views are not recorded in a trace, because two of five operators are views.

        Views check that they end within the storage, so an evicted storage comes back; its next use is near.
        """
        for storage in storages_in(args, self.table):
            if not storage.resident and not storage.in_file:
                storage.pins += 1
                try:
                    self.pools.ensure_resident([storage])
                except torch.OutOfMemoryError as error:
                    if self.device is None:
                        raise
                    raise self.device.full(traits_of(func), [storage]) from error
                finally:
                    storage.pins -= 1
        return func(*args, **kwargs)

    def _run_one(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        residency, traits = self.residency, traits_of(func)
        device = self.device if self.device is not None and self.device.concerns(args, kwargs) else None
        way = self._tiling if device is None else device
        self.operators += 1
        read = args if device is not None else _read_by_host(traits, args)
        inputs = [] if traits.reads_nothing else storages_in((*read, *kwargs.values()) if kwargs else read, self.table)
        if traits.name == "aten::set_":
            inputs += bare_storages_in(args, self.table)
        sizes = [s.nbytes for s in inputs]
        fingerprint = hash((traits.number, *sizes))
        entry = self.book.expect(fingerprint)
        self.pools.begin_operator(expected=entry is not None)
        op_tiling, mapped = way.tiled_call(traits, func, args, kwargs, sum(sizes))
        for storage in inputs:
            storage.pins += 1
            if storage.left_at is not None and storage.resident:
                storage.left_at.stayed()
        written: list[Storage] = []
        over_bytes = residency.counters.over_bytes
        try:
            held, mapped = way.ensure_resident(traits, inputs, mapped, whole=op_tiling is None)
            if traits.writes:
                written = written_storages(func, args, kwargs, self.table)
                self.pools.change(written)
            if op_tiling is None:
                way.make_free(traits, args, kwargs, inputs, held, entry, mapped, writes=bool(written))
            measured = entry is None and op_tiling is None
            if measured:
                way.op_memory.begin()
            first_made = self.table.met
            began = time.perf_counter()
            if mapped is not None:
                result = mapped.run()
                if not isinstance(mapped, MappedRows):
                    residency.counters.mapped_bytes += mapped.read_bytes
            elif op_tiling is None:
                result = way.call(traits, args, kwargs, inputs)
            else:
                result = way.run_tiles(func, args, kwargs, op_tiling, inputs, written)
        except (RuntimeError, MemoryError):  # raised by torch, which made nothing
            residency.counters.over_bytes = over_bytes
            raise
        finally:
            for storage in inputs:
                storage.pins -= 1
            for storage in written:  # also after a failed operator, which may have resized its `out` before
                if storage.resident:
                    self.resized(storage)
        if traits.reads_rows or mapped is not None:
            residency.drop_touched(inputs)
        elif traits.known.copies and self.book.segment == 0:
            residency.leave_to_files(inputs)
        seconds = time.perf_counter() - began
        mapped_bytes = 0 if mapped is None else mapped.mapped_bytes
        call = _OperatorCall(way, traits, args, kwargs, fingerprint, entry, inputs, written, op_tiling is None)
        self._after(call, result, first_made, seconds, mapped_bytes, measured=measured)
        return result

    def _after(
        self, call: _OperatorCall, result: Any, first_made: int, seconds: float, mapped_bytes: int, *, measured: bool
    ) -> None:
        """Record the effects of an operator.

        The result of a tiled operator is not recomputed, because that would run it whole.
        """
        way, traits, entry, inputs = call.way, call.traits, call.entry, call.inputs
        residency, book, table = self.residency, self.book, self.table
        made: list[Storage] = []
        for tensor in tensors_in(result) if isinstance(result, (list, tuple)) else _alone(result):
            storage = table.of(tensor) if tensor.layout is torch.strided else None
            if storage is not None and storage.number >= first_made and storage.birth is None:
                if not book.resting:
                    storage.birth = (book.segment, book.position, len(made))
                made.append(storage)
        self.when_made(made)
        touched = (*inputs, *made)
        pressed = self.pools.pressed
        if pressed and entry is not None and len(entry.next_uses) == len(touched):
            self._prefetcher.touch(entry, touched)
        else:
            for storage in touched:
                self.pools.of(storage).eviction.touch(storage, residency.clock, None)
        if entry is not None:  # measured when its trace was recorded
            workspace_bytes = entry.workspace_bytes
        elif measured:
            workspace_bytes = way.op_memory.end(sum(s.nbytes for s in made if s.resident)) + mapped_bytes
        else:  # the whole operator, which is elementwise, would need none of the tiles' buffers
            workspace_bytes = 0
        again = len(made) == 1 and traits.repeatable and call.whole and self.recomputes and way is self._tiling
        if residency.pressed and again and self._prefetcher.remade(entry, made[0], seconds):
            made[0].remat = remat_of(
                traits.func,
                call.args,
                call.kwargs,
                inputs,
                made[0],
                result,
                residency.backing,
                workspace_bytes=workspace_bytes,
            )
        way.op_memory.took(traits, call.args, inputs, workspace_bytes, mapped_bytes)
        if self.planner.recording is not None:
            self.planner.recording.add(inputs, made, call.written, seconds, workspace_bytes, repeatable=again)
        book.ran(call.fingerprint, inputs, made, workspace_bytes)
        if pressed and book.plan is None and not book.resting:
            self._prefetcher.learn(touched)
        if book.position >= LONGEST_SEGMENT:
            self.end_segment()
        if self._process is not None and self._process.due():
            residency.limit_bytes = self._process.tensor_bytes()
        if table.resident_bytes > residency.limit_bytes:
            residency.try_make_free()
        way.ran()
        if pressed and entry is not None:
            self._prefetcher.fetch_ahead()

    @contextlib.contextmanager
    def _outside_of_operators(self) -> Iterator[None]:
        """Intercept the block even inside an operator, where autograd and the mode are off."""
        with contextlib.ExitStack() as stack:
            if not any(isinstance(mode, FollowMode) for mode in current_modes()):
                with contextlib.suppress(RuntimeError):  # not inside a mode: another one has switched all modes off
                    stack.enter_context(enable_reentrant_dispatch())
                stack.enter_context(following(self))
            yield

    def begin(self, *, near: bool = False) -> None:
        """Intercept the operators of this thread and of those that it starts, once memory comes `near` to the limit.

        Interception does not start in a backward pass, whose nodes were examined without a mode. Nor does it start
        above one of the program's own modes, which would end first.
        """
        self._near = self._near or near
        if not self.waits or self.aside or not self._near or self.backwards or current_modes():
            return
        self.waits = False
        if self._process is not None:
            self.residency.limit_bytes = self._process.tensor_bytes()
        self.follow()

    def expect_pages(self, nbytes: int) -> None:
        """Intercept operators from now on if a file's pages, of `nbytes`, are a large part of what may be resident."""
        if nbytes >= self.residency.limit_bytes * _LARGE_SHARE:
            self.begin(near=True)

    def follow(self) -> None:
        """Intercept the operators of this thread, unless it is too early or too late for that."""
        if not (self.aside or self.waits):
            mode: Any = FollowMode(self)
            mode.__enter__()

    def leave(self) -> None:
        """Stop intercepting the operators of this thread; the program's own modes stay."""
        modes: list[Any] = current_modes()
        place = next((k for k, mode in enumerate(modes) if isinstance(mode, FollowMode)), None)
        if place is None:
            return
        for _ in modes[place + 1 :]:
            pop_mode()
        modes[place].__exit__(None, None, None)
        for mode in modes[place + 1 :]:
            push_mode(mode)

    def stand_aside(self) -> None:
        """Stop intercepting operators in all threads; guarded memory alone then keeps the budget.

        Raises PageError if a dropped storage could not be recomputed.
        """
        if self.aside:
            return
        if self.device is not None:
            raise unsupported(
                f"torch.compile makes programs that access the memory of {self.device.device} outside of operators, where evicted "
                "tensors are not brought back",
                "leave out torch.compile, or run with TORCH_COMPILE_DISABLE=1 in the environment",
            )
        with self.lock:
            self.residency.page_from_here(self.table)
        self.aside = True
        self.leave()

    def page_from_here(self, arguments: Sequence[Any]) -> None:
        """Make the tensors and storages among arguments resident, because something other than an
        operator is about to access them.

        From now on they are paged, not recomputed. Raises PageError.
        """
        known = (self.table.known_storage(a) if isinstance(a, torch.UntypedStorage) else None for a in arguments)
        tensors = (self.table.known(t) for t in tensors_in(arguments))
        found = [s for s in (*known, *tensors) if s is not None and s.remat is not None]
        if found:
            with self.lock:
                self.residency.page_from_here(found)

    # -- between operators

    def end_segment(self, *, stepped: bool = False) -> None:
        """Record that a backward() or an optimizer step has ended; pointers from the previous
        segment are no longer guarded.
        """
        with self.lock:
            if self.book.resting:
                if self._process is not None and self._process.settling:
                    self._process.end_segment()
                return
            empty = self.book.position == 0
            whole = self.book.end_segment(self.residency.clock + 1)
            if not empty:
                self.planner.segment_ended(self.book.ended_last, whole=whole, stepped=stepped)
            if self._process is not None:
                self._process.end_segment()
            if self.device is not None:
                self.device.end_segment()
            self._prefetcher.fetched_to = 0
            for storage in self._exported_before:
                storage.pins -= 1
            self._exported_before, self._exported = self._exported, []
            if stepped:
                self.steps += 1
                self._at_step()
            if self.waits and self._process is not None:
                self.residency.limit_bytes = self._process.tensor_bytes()
        self.begin()

    @contextlib.contextmanager
    def without_prefetch(self) -> Iterator[None]:
        """Record and predict nothing in the block, which is a separate segment and does something new.

        Evictions are then least recently used, apart from `keeping`.
        """
        with self.lock:
            if self.book.position > 0:
                self.end_segment()
            self.planner.close()
            self.planner.plan_nothing()
            for residency in self.pools:
                residency.eviction.drop_predictions()
                residency.trust_trace = False
            self.book.resting = True
        try:
            yield
        finally:
            with self.lock:
                self.book.resting, self.book.start_clock = False, self.residency.clock + 1
                if self._process is not None:
                    self._process.end_segment()

    @contextlib.contextmanager
    def keeping(
        self, tensors: Sequence[torch.Tensor], then: Sequence[torch.Tensor] = (), most: float | None = None
    ) -> Iterator[None]:
        """Keep tensors resident in the block, which uses them several times, and begin to read those needed `then`.

        If something else does not fit beside them, they are evicted like any other tensor. Tensors that take more than
        half of the memory, or more than the share `most` of it, are not kept.
        """
        residency = self.residency
        with self.lock:
            self._reclaim()  # otherwise others would not fit alongside dead storages
            storages = [s for s in self._storages_of(tensors) if s.table is self.table]
            if sum(s.nbytes for s in storages) <= residency.limit_bytes * (most or _KEPT_SHARE):
                residency.kept = set(storages)
                residency.ensure_resident(storages)
            for storage in self._storages_of(then):
                self._read_ahead(storage)
        try:
            yield
        finally:
            with self.lock:
                residency.kept = set()
                residency.try_make_free()

    def _storages_of(self, tensors: Sequence[torch.Tensor]) -> list[Storage]:
        found = (self.table.of(tensor) for tensor in tensors)
        return list(dict.fromkeys(storage for storage in found if storage is not None))

    def _read_ahead(self, storage: Storage) -> None:
        """Begin to read an evicted storage: into the page cache if it is in a file, otherwise into
        free memory if there is some.
        """
        memory = storage.ref()
        if storage.resident or memory is None:
            return
        if storage.in_file:
            read_mapping_ahead(memory)
        else:
            self.pools.of(storage).prefetch(storage, 0, self.residency.clock + AHEAD)

    def become_child(self) -> None:
        """Continue in a forked child, which has no budget."""
        self._process = None
        self.planner.plan_nothing()
        for residency in self.pools:
            residency.become_child()
        self.go_on()

    def escape(self, storage: Storage) -> None:
        """Keep a storage resident until the next segment ends, because a pointer to it was
        handed out, maybe for writing.

        A mapped one stays in place, and its pages show from now on whether it was written.
        """
        with self.lock:
            self._wait_while_held()
            if self.device is not None:
                self.device.storages.streams.note()
            if storage.in_file:
                self.residency.watch(storage)
                return
            storage.pins += 1
            self._exported.append(storage)
            self.pools.ensure_resident([storage])
            self.pools.change([storage])

    def export(self, storage: Storage) -> None:
        """Keep a storage resident permanently, because something holds its address for an unknown time."""
        with self.lock:
            self.escape(storage)
            if not storage.in_file:
                storage.pins += 1

    def borrow(self, storage: Storage) -> Callable[[], None]:
        """Keep a storage resident, maybe for writing, until the returned function is called, from any thread."""
        with self.lock:
            self._wait_while_held()
            self.pools.of(storage).borrow(storage)
        return functools.partial(self.pools.of(storage).released.append, storage)

    def resized(self, storage: Storage) -> None:
        """Record that a storage may have a new size. Raises UnsupportedError if numpy uses its memory."""
        if self.pools.of(storage).resized(storage) and storage.borrowed:
            raise unsupported(
                "a tensor is resized while a numpy array shares its memory, which plain PyTorch rejects, too",
                "delete the array before",
            )

    @contextlib.contextmanager
    def reading(self, storage: Storage) -> Iterator[None]:
        """Keep a storage resident during a call that reads it without the dispatcher."""
        with self._resident([storage]):
            yield

    @contextlib.contextmanager
    def writing(self, storage: Storage) -> Iterator[None]:
        """Keep a storage resident during a call that writes it without the dispatcher."""
        with self._resident([storage]):
            self.pools.change([storage])
            yield
        with self.lock:
            self.pools.of(storage).try_make_free()

    @contextlib.contextmanager
    def working_on(self, tensors: Sequence[torch.Tensor], need_bytes: int, what: str) -> Iterator[None]:
        """Keep tensors resident, with `need_bytes` free at first, while something other than a
        visible operator works on them.
        """
        with self.lock, self._resident(storages := self._storages_of(tensors)):
            if not self.residency.make_free(need_bytes):
                self.op_memory.short(what, storages, need_bytes)
            yield

    @contextlib.contextmanager
    def _resident(self, storages: Sequence[Storage]) -> Iterator[None]:
        with self.lock:
            self._wait_while_held()
            if self.device is not None:
                self.device.storages.streams.note()
            for storage in storages:
                storage.pins += 1
            try:
                self.pools.ensure_resident(storages)
                yield
            finally:
                for storage in storages:
                    storage.pins -= 1

    def meet(self, tensor: torch.Tensor) -> None:
        """Register a tensor that was created without the dispatcher."""
        with self.lock:
            if tensor.layout is torch.strided:
                self.table.of(tensor)
            for residency in self.pools:
                residency.try_make_free()

    def make_way(self, nbytes: int = 0) -> None:
        """Evict tensors for memory that the process took between operators, and for `nbytes` more; do nothing while
        a thread runs an operator.

        An importing thread does not wait here, because the operator may be waiting for its import.
        """
        if self._process is None or not self.lock.acquire_if_free():
            return
        try:
            self._reclaim()
            self.residency.limit_bytes = self._process.tensor_bytes()
            self.residency.try_make_free(nbytes)
        finally:
            self.lock.release()

    # -- paused from another thread: `port_agent.intercept.exec.opportunistic`

    @property
    def operator_at_hand(self) -> str:
        """Return the name of the operator that started last, "" if none did."""
        at_hand = self._at_hand
        return "" if at_hand is None else str(at_hand._schema.name)

    def hold(self, patience_s: float = threading.TIMEOUT_MAX) -> bool:
        """Let no operator start from now on, and return once the current one has ended.

        Return False if it has not ended within `patience_s`, or if operators are no longer intercepted; the
        program may then continue.
        """
        self._held = True
        if not self.lock.acquire_within(patience_s):
            return False
        try:
            self.planner.interrupt()
            return not self.aside
        finally:
            self.lock.release()

    def give_back(self) -> None:
        """Release the memory of a paused program by evicting its tensors to the page file. Raises PageError."""
        with self.lock:
            self._reclaim()
            self._prefetcher.fetched_to = 0
            try:
                for residency in self.pools:
                    residency.empty()
            finally:
                for residency in self.pools:
                    residency.backing.release()
                release_free_memory()
                release_code_pages()

    def go_on(self) -> None:
        """Let operators run again. Does not wait for one that has not ended since `hold`."""
        self._held = False
        if self.lock.acquire_if_free():
            self._notify()
            self.lock.release()
        else:
            _thread.start_new_thread(self._notify_later, ())

    def _notify_later(self) -> None:
        with self.lock:
            self._notify()

    def _notify(self) -> None:
        self.planner.interrupt()
        self._may_run.notify_all()

    def limit_cpu(self, cpu_percent: float) -> None:
        """Limit this process to a share of all CPUs from now on; 100 means unlimited.

        Does not wait for a running operator.
        """
        self._pace = CpuPace(cpu_percent) if cpu_percent < 100 else None

    def _wait_while_held(self) -> None:
        """Wait between operators while paused; an exception from a signal handler here ends the program."""
        try:
            pace = self._pace  # set by another thread
            if pace is not None and (delay_s := pace.delay_s()) > 0:
                self._may_run.wait(delay_s)
            while self._held:
                self._may_run.wait()
        except BaseException:
            self._held = False
            self.when_interrupted()
            raise


def _read_by_host(traits: OperatorTraits, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments without one of which the CPU's kernel asks for the shape alone; a device's may differ."""
    place = traits.shape_alone
    return args if place is None else (*args[:place], *args[place + 1 :])


def _alone(result: Any) -> Sequence[torch.Tensor]:
    return (result,) if isinstance(result, torch.Tensor) else ()


class FollowMode(OperatorMode):
    """The interception in one thread of the program, because a mode belongs to a thread."""

    supports_higher_order_operators = True
    """Whether higher-order operators come here, which rejects them by name."""

    def __init__(self, interceptor: Interceptor) -> None:
        initialise: Any = super().__init__
        initialise()
        self._interceptor = interceptor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator. A tensor subclass first decomposes itself, and its parts come here.

        Tensors without memory are handled by their own mode, which is below this one while a program
        is traced (`torch.export`).
        """
        if self._interceptor.aside:
            return func(*args, **(kwargs or {}))
        refuse_higher_order(func)
        if not self._interceptor.guarded:
            refuse_unsupported(func, types)
        refuse_tangents(func, args)
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))
        if types and any(is_wrapper(t) for t in tensors_in((*args, *(kwargs or {}).values()))):
            return NotImplemented
        if torch.is_inference_mode_enabled() and is_composite(func):
            # Composites arrive whole in this mode. Below it, with autograd off, a product with a weight is not folded
            # as in plain PyTorch (`should_fold` in LinearAlgebra.cpp asks `requires_grad`).
            with enable_reentrant_dispatch(), self:
                return composite_kernel(func)(*args, **(kwargs or {}))
        return self._interceptor.run(func, args, kwargs or {})


@contextlib.contextmanager
def following(interceptor: Interceptor) -> Iterator[None]:
    """Intercept the operators of this thread in the block."""
    interceptor.follow()
    try:
        yield
    finally:
        interceptor.leave()


never_compile(FollowMode.__torch_dispatch__)

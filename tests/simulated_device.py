"""A device 'sim' in Python: CPU kernels on memory that is counted, capped and poisoned, and copies on streams.

It is torch's private backend, so models, autograd and optimizers run on it unchanged. It is as
unkind as a device may be:

- a copy with non_blocking=True happens only when someone waits for it, and until then garbage lies where it goes;
- a copy that starts before what it reads was computed, or before what it overwrites was used for the
  last time, brings garbage;
- freed memory turns to garbage at once, and memory beyond the cap is refused.

What is before what, events alone say: each stream and the host know how far they have seen each other stream come. So a
wait that is missing, memory that is freed early and an event of the wrong moment change the numbers, always in the same
way. Works with torch 2.13; the registration of Python backends is private to torch.
"""

import ctypes
import functools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from port_planner.ir.device_kinds import BACKEND_GROUP

if TYPE_CHECKING:  # torch may be loading this while the agent's own modules wait for torch
    from port_agent.backend.base import Event

NAME = "sim"
UNIFIED = "SIM_UNIFIED"
"""Set in the environment: the device says that its memory is the host's own."""
ROUNDING = "SIM_ROUNDING"
"""Bytes in the environment: each tensor takes a multiple of them, as in memory that is fragmented."""
OWN_BITS = "SIM_OWN_BITS"
"""Set in the environment: matrix products and convolutions give other last bits than the
CPU's, as a GPU's kernels do.
"""
UNSEEN = "SIM_UNSEEN"
"""Set in the environment: what is taken of the device's memory no limit of the kernel's on data counts."""
COPY_S, SHARED_S = "SIM_COPY_S", "SIM_SHARED_S"
"""Seconds in the environment: of a copy to or from the device for each MiB, and of an operator for each MiB of its
operands that lie in memory which the host reaches, too.
"""
CONTEXT_BYTES = 3 << 20
"""What the device says that a process holds of its memory beside tensors."""
_POISON = 0xC5
_CPU = DispatchKeySet(DispatchKey.CPU)
_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "convolution", "convolution_backward")}
"""Operators that add in an order of the device's own where it has bits of its own."""
_OTHER_BITS = 0xFF
_OWN = {"copy_", "_copy_from", "_to_copy", "_local_scalar_dense", "set_"}
"""Operators with a kernel of their own here."""

Clock = dict[int, int]
"""Stream -> how many of its works are known to be done."""


def _later(a: Clock, b: Clock) -> Clock:
    return {s: max(a.get(s, 0), b.get(s, 0)) for s in a.keys() | b.keys()}


@dataclass(slots=True)
class _Block:
    """Memory of the device: the CPU storage that it is, and which work wrote or used which bytes of it last."""

    memory: torch.UntypedStorage
    nbytes: int
    shared: bool = False
    """Whether the host reaches it without copies."""
    writes: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    uses: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class SimEvent:
    """A point in a stream's work, and what is known to be done then."""

    def __init__(self, stream: "SimStream") -> None:
        self.stream, self.number, self.clock = stream, stream.number, dict(stream.clock)

    def synchronize(self) -> None:
        """Let the host wait."""
        with _DEVICE.lock:
            self.stream.do_until(self.number)
            _DEVICE.host = _later(_DEVICE.host, self.clock)

    def query(self) -> bool:
        """Return whether nothing before it is deferred any more."""
        with _DEVICE.lock:
            return not self.stream.is_behind(self.number)


class SimStream:
    """Works in order; deferred ones are done when someone waits for them."""

    def __init__(self) -> None:
        self.index = len(_STREAMS)
        _STREAMS.append(self)
        self.number = 0
        self.clock: Clock = {}
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()

    def launch(self) -> Clock:
        """Take a work and return what is known to be done when it starts."""
        known = _later(self.clock, _DEVICE.host)
        self.number += 1
        self.clock = {**known, self.index: self.number}
        return known

    def defer(self, action: Callable[[], None]) -> None:
        """Do the work just launched only when someone waits for it."""
        self._deferred.append((self.number, action))

    def is_behind(self, number: int) -> bool:
        """Return whether work up to this number is still deferred."""
        return bool(self._deferred) and self._deferred[0][0] <= number

    def do_until(self, number: int) -> None:
        """Do what is deferred up to the work of this number."""
        while self.is_behind(number):
            self._deferred.popleft()[1]()

    def wait_event(self, event: SimEvent) -> None:
        """Start what is launched from now on only after the event."""
        with _DEVICE.lock:
            event.stream.do_until(event.number)
            self.clock = _later(self.clock, event.clock)

    def record_event(self) -> SimEvent:
        """Return the present point."""
        with _DEVICE.lock:
            return SimEvent(self)


class _Device:
    """What the device holds, and what went wrong on it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.cap_bytes: int | None = None
        self.rounding = int(os.environ.get(ROUNDING, "1"))
        self.own_bits = bool(os.environ.get(OWN_BITS))
        self.copy_s, self.shared_s = (float(os.environ.get(name, "0")) for name in (COPY_S, SHARED_S))
        self.copied_bytes = 0
        """To and from the host, since someone asked last."""
        self.allocated = self.peak = 0
        self.host: Clock = {}
        self.blocks: dict[int, _Block] = {}
        """Storage of the device, by its address -> its memory."""
        self.races: list[str] = []
        """What was read, written or copied before its time."""
        self.current = threading.local()

    def taken(self, nbytes: int) -> int:
        """Return the bytes that a tensor of this size takes."""
        return -(-nbytes // self.rounding) * self.rounding

    def take(self, nbytes: int) -> None:
        nbytes = self.taken(nbytes)
        if self.cap_bytes is not None and self.allocated + nbytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"sim: {nbytes} bytes asked for, {self.allocated} of {self.cap_bytes} are in use"
            )
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    @property
    def stream(self) -> SimStream:
        found: SimStream = getattr(self.current, "stream", _COMPUTE)
        return found


_DEVICE = _Device()
_STREAMS: list[SimStream] = []
_COMPUTE = SimStream()
_libraries: list[torch.library.Library] = []


# -- tensors: a storage of the device points into memory that a CPU storage owns


def _new_storage(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    nbytes = memory.nbytes()
    _DEVICE.take(nbytes)
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), nbytes)
    made = _Block(memory, nbytes)
    made.uses[0, nbytes] = (_DEVICE.stream.index, _DEVICE.stream.number)  # whoever had this memory before
    _DEVICE.blocks[storage._cdata] = made
    gone = weakref.finalize(storage, _gone, storage._cdata)  # when the last tensor goes, not Python's object
    gone.atexit = False  # by then others may have taken the memory back
    return storage


def _gone(key: int) -> None:
    with _DEVICE.lock:
        gone = _DEVICE.blocks.pop(key)
        _DEVICE.allocated -= _DEVICE.taken(gone.nbytes)
        if gone.memory.nbytes() == gone.nbytes:  # else an operator made it longer, and it is another storage's now
            ctypes.memset(gone.memory.data_ptr(), _POISON, gone.nbytes)


def _block_of(t: torch.Tensor) -> _Block | None:
    return _DEVICE.blocks.get(t.untyped_storage()._cdata)


def _reached_by_host(t: torch.Tensor) -> bool:
    found = _block_of(t)
    return found is not None and found.shared


def _is_sim(t: object) -> bool:
    return isinstance(t, torch.Tensor) and t.device.type == NAME


def alias(t: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory; a CPU tensor is its own."""
    if not _is_sim(t):
        return t
    found = _block_of(t)
    memory = torch.UntypedStorage(0) if found is None else found.memory
    return torch.empty(0, dtype=t.dtype).set_(memory, t.storage_offset(), t.size(), t.stride())


def _wrap(t: torch.Tensor, known: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the device's tensor over a CPU result; one that lies in an operand's memory shares its storage."""
    key = t.untyped_storage()._cdata
    if key not in known:
        known[key] = _new_storage(t.untyped_storage())
    empty = torch._C._acc.create_empty_tensor((0,), t.dtype)
    return _set_(empty, known[key], int(t.storage_offset()), t.size(), t.stride())


def _span(t: torch.Tensor) -> tuple[int, int]:
    size = t.element_size()
    if t.numel() == 0:
        return 0, 0
    last = sum((n - 1) * k for n, k in zip(t.size(), t.stride(), strict=True))
    offset = int(t.storage_offset())
    return offset * size, (offset + last + 1) * size


_NOBODY = -1
"""No stream: the host."""


def _unseen(marks: dict[tuple[int, int], tuple[int, int]], span: tuple[int, int], stream: int, known: Clock) -> bool:
    """Return whether some work on these bytes, marked by another stream than the one of this
    index, is not known to be done.
    """
    return any(
        s != stream and number > known.get(s, 0)
        for (low, high), (s, number) in marks.items()
        if low < span[1] and span[0] < high
    )


def _read(t: torch.Tensor, stream: SimStream, known: Clock, who: str) -> bool:
    """Mark a read; return whether what was written there is known to be done."""
    found = _block_of(t)
    if found is None:
        return True
    span = _span(t)
    good = not _unseen(found.writes, span, stream.index, known)
    if not good:
        _DEVICE.races.append(f"{who} reads bytes {span} before they are written")
    found.uses[span] = (stream.index, stream.number)
    return good


def _write(t: torch.Tensor, stream: SimStream, known: Clock, who: str) -> bool:
    """Mark a write; return whether all work on these bytes is known to be done."""
    found = _block_of(t)
    if found is None:
        return True
    span = _span(t)
    good = not (_unseen(found.writes, span, stream.index, known) or _unseen(found.uses, span, stream.index, known))
    if not good:
        _DEVICE.races.append(f"{who} writes bytes {span} while they are in use")
    found.writes[span] = found.uses[span] = (stream.index, stream.number)
    return good


def _spoil(t: torch.Tensor) -> None:
    if t.is_contiguous():
        ctypes.memset(t.data_ptr(), _POISON, t.numel() * t.element_size())


# -- operators; torch's own walk through operands took a third of the time of tests on this device


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the device's tensors among an operator's operands."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif _is_sim(value):
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return operands, or results, with each of them changed."""
    if isinstance(value, tuple | list):
        return type(value)([_mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    return change(value)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator by its CPU kernel on the same memory."""
    with _DEVICE.lock:
        return _run(op, args, kwargs)


def _changed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stream, name = _DEVICE.stream, op._schema.name
    clock = stream.launch()
    known: dict[int, torch.UntypedStorage] = {}
    operands: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for t in () if op.is_view else _tensors((args, kwargs)):
        _read(t, stream, clock, name)
        if _DEVICE.shared_s and _reached_by_host(t):
            time.sleep(_DEVICE.shared_s * t.nbytes / (1 << 20))
    for t in _changed(op, args, kwargs):
        _write(t, stream, clock, name)

    def enter(a: Any) -> Any:
        if isinstance(a, torch.device) and a.type == NAME:
            return torch.device("cpu")
        if not _is_sim(a):
            return a
        made = alias(a)
        known.setdefault(made.untyped_storage()._cdata, a.untyped_storage())
        operands[id(made)] = a, made
        return made

    def leave(t: Any) -> Any:  # an operand written in place comes back as itself
        if not isinstance(t, torch.Tensor):
            return t
        if _DEVICE.own_bits and name in _PRODUCTS and t.dtype is torch.float32:
            t.view(torch.int32).bitwise_xor_(_OTHER_BITS)
        if id(t) in operands:
            original, made = operands[id(t)]
            return original if made.shape == original.shape else _grown(original, made)
        is_new = t.untyped_storage()._cdata not in known
        wrapped = _wrap(t, known)
        if is_new:
            _write(wrapped, stream, clock, name)
        return wrapped

    args, kwargs = _mapped(enter, (args, kwargs))
    return _mapped(leave, op(*args, **kwargs))


def _grown(original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Let a tensor that was given as `out=` have what an operator made of it, which is longer than it was."""
    memory = made.untyped_storage()
    return _set_(original, _new_storage(memory), int(made.storage_offset()), made.size(), made.stride())


def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with _DEVICE.lock:
        stream = _DEVICE.stream
        clock = stream.launch()
        fine = _read(source, stream, clock, "a copy")
        fine &= _write(self, stream, clock, "a copy")
        into, out_of = alias(self), alias(source)
        across = self.device.type != source.device.type
        deferred = non_blocking and across
        if across:
            _DEVICE.copied_bytes += self.nbytes
            time.sleep(_DEVICE.copy_s * self.nbytes / (1 << 20))

        def move() -> None:
            into.copy_(out_of)
            if not fine:
                _spoil(into)

        if not deferred:
            move()
            if across:
                SimEvent(stream).synchronize()
            return self
        _spoil(into)
        stream.defer(move)
        return self


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    with _DEVICE.lock:
        kept = memory_format or torch.preserve_format
        made = torch.empty_like(alias(self), dtype=dtype or self.dtype, memory_format=kept)
        on_sim = torch.device(device or self.device).type == NAME
        return _copy_(_wrap(made, {}) if on_sim else made, self, non_blocking)


def _scalar(self: torch.Tensor) -> Any:
    _COMPUTE.record_event().synchronize()
    return alias(self).item()


def _set_(
    self: torch.Tensor, source: torch.UntypedStorage, offset: int = 0, size: Any = (), stride: Any = ()
) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _CPU, self, source, offset, size, stride
    )
    return made


def _convolution_backward_on_sim(*args: Any) -> Any:
    op = torch.ops.aten.convolution_backward.default
    g, x, w, stride, padding, dilation, transposed, output_padding, groups, mask = args
    sizes = [w.shape[1] * groups if transposed else w.shape[0]]
    return _fallback(op, g, x, w, sizes, stride, padding, dilation, transposed, output_padding, groups, mask)


def _shadowed() -> Iterator[tuple[str, Any]]:
    """Yield aten operators with both a CPU kernel and a composite one, which would come before the fallback."""
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, full)
        if full.startswith("aten::") and has("CPU") and has("CompositeExplicitAutograd") and name not in _OWN:
            yield full.removeprefix("aten::"), getattr(getattr(torch.ops.aten, name), overload or "default")


class _Module(_DummyBackendModule):
    """torch.sim. CPU kernels draw from the CPU's generator, so that is this device's too."""

    synchronize = staticmethod(lambda device=None: _COMPUTE.record_event().synchronize())
    memory_allocated = staticmethod(lambda device=None: _DEVICE.allocated)
    max_memory_allocated = staticmethod(lambda device=None: _DEVICE.peak)
    reset_peak_memory_stats = staticmethod(lambda device=None: setattr(_DEVICE, "peak", _DEVICE.allocated))
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def register() -> None:
    """Make 'sim' known to torch, once per process."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_fallback, "PrivateUse1")
    kernels: dict[str, Any] = {
        "copy_": _copy_,
        "_copy_from": lambda self, into, non_blocking=False: _copy_(into, self, non_blocking),
        "_to_copy": _to_copy,
        "_local_scalar_dense": _scalar,
        "set_.source_Storage_storage_offset": _set_,
        "convolution_overrideable": functools.partial(_fallback, torch.ops.aten.convolution.default),
        "convolution_backward_overrideable": _convolution_backward_on_sim,
        **{name: functools.partial(_fallback, op) for name, op in _shadowed()},
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    _libraries.extend([every, aten])


def installed(folder: Path) -> dict[str, str]:
    """Return an environment in which processes know the device, torch and the agent;
    `folder` is to hold its package.
    """
    info = folder / "simulated_device-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-device\nVersion: 0\n")
    groups = {"torch.backends": "register", BACKEND_GROUP: "SimBackend"}
    lines = (f"[{group}]\n{NAME} = {__name__}:{name}\n" for group, name in groups.items())
    (info / "entry_points.txt").write_text("".join(lines))
    root = Path(__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(root)))}


class SimBackend:
    """A `Backend` on the simulated device; see `port_agent.backend.base`."""

    kind = NAME
    addressable = False

    def __init__(self) -> None:
        register()
        self.unified = bool(os.environ.get(UNIFIED))
        self.copies = SimStream()

    def allocate(self, nbytes: int) -> torch.Tensor:
        if os.environ.get(UNSEEN):
            with _DEVICE.lock:
                return _wrap(torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8), {})  # a shared map is no data
        return torch.empty(nbytes, dtype=torch.uint8, device=NAME)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        if not self.unified:
            return self.allocate(nbytes)
        from port_agent.backend.raw_bytes import block

        with _DEVICE.lock:
            made = _wrap(block(nbytes), {})
            _DEVICE.blocks[made.untyped_storage()._cdata].shared = True
        return made[:nbytes]

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        with _DEVICE.lock:
            found = _block_of(memory)
            if found is None or not found.shared:
                return None
            span, view = _span(memory), alias(memory)
            if any(_unseen(marks, span, _NOBODY, _DEVICE.host) for marks in (found.writes, found.uses)):
                _DEVICE.races.append(f"the host reaches bytes {span} while they are in use")
                _spoil(view)
            return view

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        from port_agent.backend.raw_bytes import block

        return block(nbytes)

    def reached(self) -> "Event":
        return _COMPUTE.record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: "Event") -> "Event":
        with _DEVICE.lock:
            outer = _DEVICE.stream
            _DEVICE.current.stream = self.copies
            try:
                self._follow(self.copies, after)
                target.copy_(source, non_blocking=True)
                return self.copies.record_event()
            finally:
                _DEVICE.current.stream = outer

    def wait(self, event: "Event") -> None:
        self._follow(_COMPUTE, event)

    def _follow(self, stream: SimStream, event: "Event") -> None:
        if isinstance(event, SimEvent):
            stream.wait_event(event)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        for stream in (_COMPUTE, self.copies):
            stream.record_event().synchronize()

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def allocated_bytes(self) -> int:
        return _DEVICE.allocated

    def reserved_bytes(self) -> int:
        return self.allocated_bytes()

    def outside_bytes(self) -> int:
        return CONTEXT_BYTES

    def peak_bytes(self) -> int:
        return _DEVICE.peak

    def reset_peak(self) -> None:
        _DEVICE.peak = _DEVICE.allocated

    def limit(self, nbytes: int | None) -> None:
        """Refuse more than this number of bytes; None: no limit."""
        _DEVICE.cap_bytes = nbytes

    def take_times(self, copy_s: float, shared_s: float) -> None:
        """From now on, take this number of seconds for the operations that `COPY_S` and `SHARED_S` time."""
        _DEVICE.copy_s, _DEVICE.shared_s = copy_s, shared_s

    def copied_bytes(self) -> int:
        """Return and forget how many bytes were copied between the host and the device."""
        found, _DEVICE.copied_bytes = _DEVICE.copied_bytes, 0
        return found

    def use_own_bits(self, own: bool) -> None:
        """Give other last bits than the CPU from now on, or the same."""
        _DEVICE.own_bits = own

    def idle(self) -> bool:
        """Return whether the host knows that the device has finished all its work."""
        return all(_DEVICE.host.get(stream.index, 0) >= stream.number for stream in (_COMPUTE, self.copies))

    def ahead(self) -> int:
        """Return how many works of the computing stream the host does not know to be done."""
        return _COMPUTE.number - _DEVICE.host.get(_COMPUTE.index, 0)

    def races(self) -> list[str]:
        """Return and forget what happened before its time."""
        found, _DEVICE.races = _DEVICE.races, []
        return found

"""Guards around methods that read memory without the dispatcher: their storage is first made resident, and stays
while its pointer may be used.

The methods are patched individually. A TorchFunctionMode would also see them, but an active one disables the fast paths
of `nn.TransformerEncoder` and others, which changes bits.
"""

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeGuard

import numpy as np
import torch

from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.patches.function_guards import FunctionGuards
from port_agent.intercept.patches.replaced_attributes import ReplacedAttributes
from port_agent.intercept.patches.safetensors_saving import (
    SafetensorsSaving,
    asked_by_safetensors,
    compares_addresses,
    compares_storages,
)
from port_agent.intercept.residency.operands import DENSE_TYPES, bare_storages_in, is_wrapper, strided_runs, tensors_in
from port_agent.intercept.residency.refusals import unsupported
from port_agent.intercept.residency.storages import Storage, StorageTable, data_ptr, untyped_storage
from port_planner.torch_compat.tensors import (
    DLPACK_EXPORTS,
    FILE_READS,
    FILE_WRITES,
    PASSES_ADDRESS_ON,
    STORAGE_METHODS,
    untyped,
)

_TENSOR_POINTERS = ("const_data_ptr", "mutable_data_ptr", "share_memory_")
"""Methods of a tensor that hand out its memory."""

_TENSOR_READS = ("__deepcopy__", "__repr__")
"""Methods of a tensor that read its memory while they run; its text is created with every mode disabled."""

_ARRAY_INTERFACE = 3
"""The version of numpy's array interface that is used."""

_COUNT, _DATA_TYPE = 1, 2
"""Positions of arguments of a reader's `get_storage_from_record` after the name."""

_MIN_LOADED_BYTES = 64 << 10
"""Bytes below which storages stay where they were loaded.

Among them are states of generators (5 KB), which C++ reads without the dispatcher.
"""

_LOADED_TWICE = 2
"""Number of copies of a storage that briefly exist while it is loaded."""

_PICKLED = 3
"""Memory for pickling a storage, as a multiple of its size: its bytes, and pickle's buffer, which grows by half."""

_TRITON = "triton.runtime.jit"

_ASKING_FRAME = 2
"""Number of frames from a guard to its caller: `guarded` is the first, followed by the frame that calls the method."""

Guard = Callable[[Callable[..., Any], Any, Any, Any], Any]


class PointerGuards:
    """Installs the guards around the methods, and removes them.

    If the host's memory is guarded, only a device's tensors are brought in, because touching the host's
    tensors brings them in anyway.
    """

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._table: StorageTable = interceptor.table
        self._replaced = ReplacedAttributes()
        self._safetensors = SafetensorsSaving(interceptor)
        self._functions = FunctionGuards(interceptor)
        self._launches = threading.local()
        """State of each thread: `under_way` is set while a Triton kernel asks for the addresses of its arguments."""

    def install(self) -> None:
        """Guard the methods."""
        self._guard(torch.Tensor, _TENSOR_POINTERS, self._tensor_pointer)
        for owner, name in DLPACK_EXPORTS:
            self._guard(owner, (name,), self._tensor_exported)
        self._guard(torch.Tensor, ("data_ptr",), self._tensor_address)
        self._guard(torch.Tensor, _TENSOR_READS, self._tensor_read)
        self._guard(torch.UntypedStorage, ("_share_cuda_",), self._shared_on_device)
        self._guard(torch.cuda.CUDAGraph, ("capture_begin",), self._captured)
        self._guard_array_interface()
        self._functions.install()
        if not self._interceptor.guarded:
            self._safetensors.install()
            self._guard(torch.Tensor, ("numpy",), self._tensor_array)
            self._guard(torch.Tensor, ("tolist",), self._tensor_list)
        of_storages = {
            "pointer": self._storage_pointer,
            "address": self._storage_address,
            "read": self._storage_read,
            "write": self._storage_write,
            "size": self._storage_size,
            "resize": self._storage_resize,
        }
        for kind, names in STORAGE_METHODS.items():
            self._guard(torch.UntypedStorage, names, of_storages[kind])
        if not self._interceptor.guarded:
            self._guard(torch.TypedStorage, ("__reduce__",), self._storage_pickled)
            for (owner, name), guard in ((FILE_WRITES, self._storage_saved), (FILE_READS, self._storage_loaded)):
                self._guard(owner, (name,), guard)

    def remove(self) -> None:
        """Restore the original methods."""
        self._functions.remove()
        if not self._interceptor.guarded:
            self._safetensors.remove()
        self._replaced.put_back()

    def _guard(self, owner: Any, names: tuple[str, ...], guard: Guard) -> None:
        for name in names:
            method = getattr(owner, name, None)
            if method is not None:
                self._replaced.replace(owner, name, _guarded(method, guard))

    # -- a device's memory

    def _guard_array_interface(self) -> None:
        """Keep tensors of a device in place whose address `__cuda_array_interface__` reveals,
        because CuPy and Numba store it.
        """
        own: Any = torch.Tensor.__dict__["__cuda_array_interface__"]

        def exported(tensor: torch.Tensor) -> Any:
            for storage in self._storages(tensor):
                self._interceptor.export(storage)
            return own.fget(tensor)

        self._replaced.replace(torch.Tensor, "__cuda_array_interface__", property(exported))

    def _guard_triton(self) -> None:
        """Make the arguments of a Triton kernel resident for its launch, from the first kernel on
        that asks for an address.
        """
        module = sys.modules.get(_TRITON)
        launcher = getattr(module, "JITFunction", None)
        if launcher is not None and not self._replaced.has_any_of(launcher):
            self._guard(launcher, ("run",), self._launched)

    def _launched(self, method: Callable[..., Any], kernel: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel with its operands resident; it is unknown which of them it writes."""
        given = [s for t in tensors_in((*args, *kwargs.values())) for s in self._storages(t)]
        with contextlib.ExitStack() as stack:
            for storage in dict.fromkeys(given):
                stack.enter_context(self._interceptor.writing(storage))
            self._launches.under_way = True
            try:
                return method(kernel, *args, **kwargs)
            finally:
                self._launches.under_way = False

    def _shared_on_device(
        self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any
    ) -> Any:
        if self._of(memory) is not None:
            raise unsupported(
                "a tensor on a GPU is handed to another process, which would not find it where it was",
                "send a copy of it on the CPU, or run without --gpu-ram",
            )
        return method(memory, *args, **kwargs)

    def _captured(self, method: Callable[..., Any], graph: Any, args: Any, kwargs: Any) -> Any:
        if self._interceptor.device is not None:
            raise unsupported(
                "a CUDA graph replays kernels on fixed addresses, and its tensors may have been evicted by then",
                "leave out the graph, or run without --gpu-ram",
            )
        return method(graph, *args, **kwargs)

    # -- guards

    def _storages(self, tensor: torch.Tensor) -> list[Storage]:
        """Return the storages of a tensor, registered now at the latest, because the method's
        operators could evict them.
        """
        if is_wrapper(tensor) or (tensor.device.type != "cpu" and tensor.device not in self._table.devices):
            return []
        found = (self._table.of(part) for part in strided_runs(tensor))
        return [storage for storage in found if self._concerns(storage)]

    def _concerns(self, storage: Storage | None) -> TypeGuard[Storage]:
        """Return whether an access to a storage outside of operators would not find its contents."""
        return storage is not None and (storage.table is not self._table or not self._interceptor.guarded)

    def _of(self, memory: torch.UntypedStorage) -> Storage | None:
        """Return a storage that must be brought in, registering it now at the latest."""
        if memory.device.type != "cpu" and memory.device not in self._table.devices:
            return None
        storage = self._table.of_storage(memory)
        return storage if self._concerns(storage) else None

    def _known(self, memory: torch.UntypedStorage) -> Storage | None:
        """Return a storage that must be brought in, if it was registered."""
        storage = self._table.known_storage(memory)
        return storage if self._concerns(storage) else None

    def _sources(self, arguments: Any) -> list[Storage]:
        """Return those bare storages among the arguments that must be brought in."""
        return [storage for storage in bare_storages_in(arguments, self._table) if self._concerns(storage)]

    def _tensor_pointer(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        self._guard_triton()
        for storage in () if getattr(self._launches, "under_way", False) else self._storages(tensor):
            self._interceptor.escape(storage)
        return method(tensor, *args, **kwargs)

    def _tensor_array(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """Return numpy's array over a tensor's memory, which may be evicted once nothing uses that array.

        With torch's own method, the memory would stay permanently, even if a program passes many tensors to numpy.
        """
        if not args and kwargs == {"force": True}:
            tensor, kwargs = _resolved(tensor.detach().cpu()), {}
        storages = self._storages(tensor)
        if len(storages) != 1 or storages[0].in_file or args or kwargs or not _is_an_array(tensor):
            return self._tensor_pointer(method, tensor, args, kwargs)
        data_type = method(torch.empty(0, dtype=tensor.dtype)).dtype
        return np.asarray(_BorrowedMemory(tensor, data_type, self._interceptor.borrow(storages[0])))

    def _tensor_exported(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        for storage in self._storages(tensor):
            self._interceptor.export(storage)
        return method(tensor, *args, **kwargs)

    def _tensor_address(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """Return a tensor's address as `_tensor_pointer` does, but a placeholder to safetensors and similar libraries.

        `save_file` asks for all addresses before it reads one; others compare them with each other and their storage's.
        """
        asking = sys._getframe(_ASKING_FRAME)
        compared = compares_addresses(asking)
        written = tensor.is_cpu and asked_by_safetensors(asking)
        if (compared or written) and len(found := self._storages(tensor)) == 1:
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            if compared:
                return id(untyped_storage(tensor)) + offset_bytes
            placeholder = self._safetensors.placeholder(asking, found[0], offset_bytes)
            if placeholder is not None:
                return placeholder
        return self._tensor_pointer(method, tensor, args, kwargs)

    def _tensor_read(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for storage in self._storages(tensor):
                stack.enter_context(self._interceptor.reading(storage))
            result = method(tensor, *args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._interceptor.meet(result)
        return result

    def _tensor_list(self, method: Callable[..., Any], tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        return self._tensor_read(method, _resolved(tensor), args, kwargs)

    def _storage_pointer(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        storage = self._of(memory)
        if storage is not None:
            self._interceptor.escape(storage)
        return method(memory, *args, **kwargs)

    def _storage_write(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        storage = self._of(memory)
        with contextlib.ExitStack() as stack:
            for source in self._sources(args):
                stack.enter_context(self._interceptor.reading(source))
            if storage is not None:
                stack.enter_context(self._interceptor.writing(storage))
            return method(memory, *args, **kwargs)

    def _storage_address(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        """Return a storage's address as `_storage_pointer` does, but a number to torch.save,
        safetensors and similar libraries.

        They only check whether two addresses are equal. The address of an evicted storage may be reused, so a unique
        number identifies it instead, and nothing must stay resident.
        """
        asking = _asking(sys._getframe(_ASKING_FRAME))
        compared = asking.f_code.co_filename == torch.serialization.__file__ or compares_storages(asking)
        if compared and self._of(memory) is not None:
            return id(memory)
        return self._storage_pointer(method, memory, args, kwargs)

    def _storage_read(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        storage = self._known(memory)
        if storage is None:
            return method(memory, *args, **kwargs)
        with self._interceptor.reading(storage):
            return method(memory, *args, **kwargs)

    def _storage_size(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        storage = self._known(memory)
        return method(memory, *args, **kwargs) if storage is None else storage.nbytes

    def _storage_pickled(self, method: Callable[..., Any], memory: torch.TypedStorage, args: Any, kwargs: Any) -> Any:
        """Evict tensors for the bytes that pickle makes of one, which no operator makes, and for those
        that it has already made.
        """
        storage = self._table.known_storage(untyped(memory))
        if storage is not None:
            self._interceptor.make_way(_PICKLED * storage.nbytes)
        return method(memory, *args, **kwargs)

    def _storage_saved(self, method: Callable[..., Any], writer: Any, args: Any, kwargs: Any) -> Any:
        """Keep the storages that `torch.save` writes to a file resident; other code may run between writing
        its size and its contents.
        """
        with contextlib.ExitStack() as stack:
            for source in self._sources(args):
                stack.enter_context(self._interceptor.reading(source))
            return method(writer, *args, **kwargs)

    def _storage_loaded(self, method: Callable[..., Any], reader: Any, args: Any, kwargs: Any) -> Any:
        """Return what `torch.load` reads from a file, in memory that can be evicted; memory that the reader
        allocates cannot be resized.
        """
        nbytes = args[_COUNT] if args[_DATA_TYPE:] == (torch.UntypedStorage,) else 0
        if nbytes < max(_MIN_LOADED_BYTES, self._table.smallest_bytes):
            return method(reader, *args, **kwargs)
        with self._interceptor.working_on((), _LOADED_TWICE * nbytes, "torch.load"):
            loaded = method(reader, *args, **kwargs)
            own = torch.UntypedStorage(nbytes)
            ctypes.memmove(data_ptr(own), data_ptr(untyped_storage(loaded)), nbytes)
        return loaded.new_empty(0).set_(own, 0, loaded.shape, loaded.stride())

    def _storage_resize(self, method: Callable[..., Any], memory: torch.UntypedStorage, args: Any, kwargs: Any) -> Any:
        storage = self._known(memory)
        if storage is None:
            return method(memory, *args, **kwargs)
        with self._interceptor.writing(storage):
            result = method(memory, *args, **kwargs)
            self._interceptor.resized(storage)
        return result


class _BorrowedMemory:
    """A tensor's memory in the form that numpy accepts; `released` is called once no array uses it."""

    def __init__(self, tensor: torch.Tensor, data_type: "np.dtype[Any]", released: Callable[[], None]) -> None:
        itemsize = tensor.element_size()
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (data_ptr(untyped_storage(tensor)) + int(tensor.storage_offset()) * itemsize, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(n * itemsize for n in tensor.stride()),
            "typestr": data_type.str,
            "version": _ARRAY_INTERFACE,
        }
        weakref.finalize(self, released).atexit = False


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory equals its values, without lazy conjugation or negation."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _is_an_array(tensor: torch.Tensor) -> bool:
    """Return whether numpy can use a tensor unchanged; if not, torch's error says why."""
    plain = type(tensor) in DENSE_TYPES and tensor.layout is torch.strided and tensor.numel() > 0
    return plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def _asking(frame: FrameType) -> FrameType:
    """Return the frame that asks a storage, skipping torch's typed storage, which only forwards the request."""
    behind = frame.f_back if frame.f_code is PASSES_ADDRESS_ON else None
    return frame if behind is None else behind


def _guarded(method: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return guard(method, self, args, kwargs)

    return guarded

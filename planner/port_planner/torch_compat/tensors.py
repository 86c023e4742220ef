"""Tensors and their storages: what reads their memory without operators, and what kind a tensor is."""

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from port_planner.torch_compat.parts import find, require, use_part, uses

__all__ = ["FakeTensor", "FakeTensorMode"]

STORAGE_METHODS: Mapping[str, tuple[str, ...]] = {
    "pointer": ("share_memory_", "_share_filename_cpu_", "_share_fd_cpu_", "pin_memory", "_swap_data_ptr_"),
    "address": ("data_ptr",),
    "read": (
        "tolist", "clone", "byteswap", "_byteswap", "_write_file", "__getitem__", "__iter__", "__copy__", "__deepcopy__",
        "__reduce__", "cpu", "to", "type", "new", "bool", "byte", "char", "short", "int", "long", "half", "float", "double",
        "bfloat16", "complex_float", "complex_double",
    ),
    "write": ("__setitem__", "copy_", "fill_", "_set_from_file"),
    "size": ("nbytes", "size", "__len__"),
    "resize": ("resize_",),
}  # fmt: skip
"""Methods of `UntypedStorage` that ask for its memory past the operators: they hand out its address, read or write it
while they run, give it other memory, or would report 0 bytes for an evicted one. The others are in
`decided/methods.txt`.
"""

DLPACK_EXPORTS: tuple[tuple[Any, str], ...] = (
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
)
"""Functions that export a tensor's memory as a capsule, for its lifetime (`Tensor.__dlpack__` calls them)."""

FILE_READS: tuple[Any, str] = (torch._C.PyTorchFileReader, "get_storage_from_record")
FILE_WRITES: tuple[Any, str] = (torch._C.PyTorchFileWriter, "write_record")
"""Class and method that `torch.load` and `torch.save` call for each storage."""

POINTER_READS: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("data_ptr", "numpy", "tolist", "share_memory_", "__deepcopy__", "__repr__")),
    *((torch.Tensor, name) for name in ("const_data_ptr", "mutable_data_ptr") if hasattr(torch.Tensor, name)),
    *(
        (torch.UntypedStorage, name)
        for kind in ("pointer", "address", "read", "write")
        for name in STORAGE_METHODS[kind]
    ),
    *((owner, name) for owner, name in DLPACK_EXPORTS if hasattr(owner, name)),
    FILE_WRITES,
)
"""Known functions by which code other than operators accesses a tensor's memory."""

SCRIPT_SAVES: tuple[tuple[Any, str], ...] = tuple(
    (owner, name)
    for owner in (getattr(torch._C, kind, None) for kind in ("ScriptModule", "ScriptFunction"))
    for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")
    if hasattr(owner, name)
)
"""Owner and name of the functions that write scripted and traced modules and functions, constants included,
as long as torch has them.
"""

PASSES_ADDRESS_ON: CodeType = torch.TypedStorage._data_ptr.__code__
"""The function that asks a storage for its address on behalf of its caller."""

is_zero: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor has no memory and represents zeros created by autograd."""


@uses("torch.TypedStorage()._untyped_storage", "typed storages are not followed, or each use of one warns")
def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage inside a typed one, whose own method `untyped` would warn."""
    return storage._untyped_storage


@uses("torch.nn.Module()._buffers", "a recorded step leaves other tensors in the places of a model's buffers")
def set_buffer(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a tensor as a module's buffer of this name, even if the module lost it."""
    module._buffers[name] = tensor


def _guarded_are_there() -> None:
    for names in STORAGE_METHODS.values():
        for name in names:
            find(f"torch.UntypedStorage.{name}")


def _code_is_storages() -> None:
    require(PASSES_ADDRESS_ON.co_filename == torch.storage.__file__, "its code is another module's")


def _operators_compute_nothing() -> None:
    kept = torch.ones(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = (kept + 1) * 2
    require(isinstance(made, FakeTensor) and kept.tolist() == [1.0, 1.0], "operators compute under FakeTensorMode")


use_part("torch.UntypedStorage's methods", "they read past operators", "wrong values silently", _guarded_are_there)
use_part("torch._C._to_dlpack", "what it hands out stays", "others read memory that was given back")
use_part("torch._C._to_dlpack_versioned", "what it hands out stays", "others read memory that was given back")
use_part("torch._C.PyTorchFileReader.get_storage_from_record", "loads into what can leave", "loading takes the budget")
use_part("torch._C.PyTorchFileWriter.write_record", "brings in what is saved", "torch.save writes empty storages")
use_part(
    "torch.TypedStorage._data_ptr", "torch.save compares addresses", "all is brought in at once", _code_is_storages
)
use_part("torch.Tensor._is_zerotensor", "has no memory to follow", "gradients of some operators end in an error")
use_part(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "runs a pass for its shapes and its operators alone",
    "`finetune --explain` fails, and `plan` does not say for how many updates the operators stay the same",
    _operators_compute_nothing,
)

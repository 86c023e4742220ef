"""Write a model larger than the budget with `safetensors.torch.save_file`: one tensor after another,
with the library's bytes.

The library takes the addresses of all tensors before it writes the first. Under a budget it receives
placeholders. The library itself begins the file with empty tensors, so that order, names and metadata are its
own. Then sizes and contents are filled in.
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any

from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.residency.refusals import unsupported
from port_agent.intercept.residency.storages import Storage, data_ptr

_MODULE = "safetensors.torch"

_ASKING = ("_to_ndarray", "_flatten_as_ptr", "save_file")
"""Functions that ask for addresses which only the library's writer uses; others use them at once."""

_COMPARING_MODULES = (_MODULE, "huggingface_hub.serialization._torch")
"""Modules that compare the sizes and addresses of storages: safetensors to find tensors that share one, huggingface_hub
to distribute tensors among files.
"""

_COMPARING = ("_is_complete", "_filter_shared_not_shared", "_end_ptr")
"""Functions that only compare addresses within one storage, to find tensors that share it, for
`save_model` and `load_model`.
"""

_FIRST_PLACEHOLDER = 1 << 62
"""First placeholder for an address; no process has such addresses."""

_DATA_TYPES = (
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
"""Data types in the library's order, because its names for them differ."""

_REMEDY = "save with torch.save, or after the budget"

_LENGTH_BYTES = 8
"""Bytes of the header's length, in front of it; the header is padded to a multiple of this (the safetensors format)."""


def asked_by_safetensors(frame: FrameType) -> bool:
    """Return whether a frame is one of safetensors' functions for torch."""
    module = sys.modules.get(_MODULE)
    return module is not None and frame.f_code.co_filename == module.__file__


def compares_storages(frame: FrameType) -> bool:
    """Return whether a frame belongs to a module that only compares sizes and addresses of storages."""
    modules = (sys.modules.get(name) for name in _COMPARING_MODULES)
    return frame.f_code.co_filename in {module.__file__ for module in modules if module is not None}


def compares_addresses(frame: FrameType) -> bool:
    """Return whether a frame of such a module asks for the address of a tensor to compare it."""
    return frame.f_code.co_name in _COMPARING and compares_storages(frame)


class SafetensorsSaving:
    """Takes the place between `save_file` and the library's writer while a program runs under a budget."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._numbers = itertools.count(_FIRST_PLACEHOLDER)
        self._places: dict[int, tuple[Storage, int]] = {}
        self._module: Any = None
        self._writer: Callable[..., None] | None = None

    def placeholder(self, frame: FrameType, storage: Storage, offset_bytes: int) -> int | None:
        """Return a placeholder for the address of an intercepted tensor if `save_file` asks for it; otherwise None.

        `frame`: the frame that asks for the address.
        """
        calls: list[str] = []
        caller: FrameType | None = frame
        while caller is not None and len(calls) < len(_ASKING):
            calls.append(caller.f_code.co_name if asked_by_safetensors(caller) else "")
            caller = caller.f_back
        if tuple(calls) != _ASKING or self._module is None or self._module.serialize_file != self._write:
            return None
        number = next(self._numbers)
        self._places[number] = storage, offset_bytes
        return number

    def install(self) -> None:
        """Replace the library's writer; `save_file` looks it up before it asks for addresses."""
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(_MODULE)
            if (
                hasattr(module, "TensorSpec") and sys.byteorder == "little"
            ):  # versions before 0.8 copied the bytes themselves
                self._module, self._writer = module, module.serialize_file
                module.serialize_file = self._write

    def remove(self) -> None:
        """Restore the library's writer."""
        if self._writer is not None:
            self._module.serialize_file = self._writer
            self._writer = None

    def _write(self, specs: dict[str, Any], filename: str | os.PathLike[str], metadata: Any = None) -> None:
        """Write the file as the library does.

        Raises PageError, OSError, and UnsupportedError if its header is not understood.
        """
        places = {s.data_ptr: self._places[s.data_ptr] for s in specs.values() if s.data_ptr in self._places}
        self._places.clear()
        if self._writer is None:
            raise RuntimeError("safetensors is asked to write after its writer was put back")
        if not places:
            self._writer(specs, filename, metadata=metadata)
            return
        begun = Path(f"{os.fspath(filename)}.{os.getpid()}.part")
        empty = {name: _emptied(s) for name, s in specs.items()}
        try:
            self._writer(empty, begun, metadata=metadata)
            header = _filled_in(begun.read_bytes(), specs)
            with begun.open("r+b") as file:
                file.truncate(0)
                file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
                for name in json.loads(header):
                    if name in specs:
                        self._write_tensor(file, specs[name], places)
            begun.replace(filename)
        finally:
            begun.unlink(missing_ok=True)

    def _write_tensor(self, file: IO[bytes], spec: Any, places: dict[int, tuple[Storage, int]]) -> None:
        if spec.data_len == 0:
            return
        if spec.data_ptr not in places:
            file.write(memoryview((ctypes.c_char * spec.data_len).from_address(spec.data_ptr)))
            return
        storage, offset_bytes = places[spec.data_ptr]
        with self._interceptor.reading(storage):
            memory = storage.ref()
            if memory is None:
                raise RuntimeError("a tensor is written after its end")
            file.write(memoryview((ctypes.c_char * spec.data_len).from_address(data_ptr(memory) + offset_bytes)))


def _emptied(spec: Any) -> Any:
    """Return a spec of the same data type without elements. Raises UnsupportedError."""

    def empty(data_type: str) -> Any:
        return type(spec)(dtype=data_type, shape=[0], data_ptr=1, data_len=0)

    for data_type in _DATA_TYPES:
        if (made := empty(data_type)).dtype == spec.dtype:
            return made
    raise unsupported(f"safetensors uses an unknown data type, {spec.dtype}", _REMEDY)


def _filled_in(empty: bytes, specs: dict[str, Any]) -> bytes:
    """Return the header for tensors of the sizes in `specs`, made from a file of empty ones.

    Raises UnsupportedError.
    """
    length = int.from_bytes(empty[:_LENGTH_BYTES], "little")
    header = empty[_LENGTH_BYTES : _LENGTH_BYTES + length]
    entries = json.loads(header)
    if _padded(entries) != header:
        raise unsupported("this version of safetensors writes an unknown header", _REMEDY)
    end = 0
    for name, entry in entries.items():
        if name in specs:
            entry["shape"] = list(specs[name].shape)
            entry["data_offsets"] = [end, end + specs[name].data_len]
            end += specs[name].data_len
    return _padded(entries)


def _padded(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % _LENGTH_BYTES)

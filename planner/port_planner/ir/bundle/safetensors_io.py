"""Safetensors files, written chunk by chunk and read in place.

It needs no torch, and never a whole tensor in memory.

Format: u64 little-endian header length, JSON header (name -> dtype, shape, byte range), data.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from port_planner.ir.graph import ITEM_BYTES

MAX_HEADER_BYTES = 64 << 20

_SAFE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
STORED_DTYPES = tuple(_SAFE_NAMES)
"""Types of tensors that such a file may contain."""
_DTYPE_NAMES = {v: k for k, v in _SAFE_NAMES.items()}


@dataclass(frozen=True)
class Chunks:
    """A tensor to write: its bytes in row-major order, in chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]


class TensorEntry(msgspec.Struct, frozen=True):
    """The entry of a tensor in a header, with its data type by the format's own name."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor inside a file: absolute byte offset and layout."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a dense tensor."""
    size = ITEM_BYTES[dtype]
    for n in shape:
        size *= n
    return size


def encoded_header(tensors: Mapping[str, Chunks], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the start of a safetensors file; the tensors follow in the order of their names."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key in sorted(tensors):
        chunks = tensors[key]
        size = tensor_bytes(chunks.dtype, chunks.shape)
        header[key] = {
            "dtype": _SAFE_NAMES[chunks.dtype],
            "shape": list(chunks.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def encode(tensors: Mapping[str, Chunks], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file."""
    yield encoded_header(tensors, metadata)
    for key in sorted(tensors):
        yield from tensors[key].chunks()


def read_header(stream: IO[bytes], available: int) -> bytes:
    """Return the header of a file of `available` bytes, and its length.

    Raises ValueError or struct.error if there is none.
    """
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0]
    if length > min(MAX_HEADER_BYTES, available - 8):
        raise ValueError(f"the header claims {length} bytes")
    return prefix + stream.read(length)


def payload_offset(stream: IO[bytes], available: int) -> int:
    """Return where the tensors of a file of `available` bytes begin; its size if it is not a valid safetensors file."""
    prefix = stream.read(9)
    length = int.from_bytes(prefix[:8], "little")
    if prefix[8:] != b"{" or length > min(MAX_HEADER_BYTES, available - 8):
        return available
    return 8 + length


def read_entries(header: bytes) -> dict[str, TensorEntry]:
    """Return the header's entry for each tensor. Raises ValueError or RecursionError for an invalid header."""
    entries = msgspec.json.decode(header[struct.calcsize("<Q") :], type=dict[str, msgspec.Raw])
    entries.pop("__metadata__", None)
    return {key: msgspec.json.decode(entry, type=TensorEntry) for key, entry in entries.items()}


def index(header: bytes, available: int, start: int) -> dict[str, Member]:
    """Return each tensor's location; `start`: the absolute offset of the file's first byte.

    Raises ValueError, KeyError or RecursionError for an invalid header, or one whose numbers do not fit `available`
    bytes.
    """
    length = len(header)
    return {key: _member(key, e, start + length, available - length) for key, e in read_entries(header).items()}


def _member(key: str, entry: TensorEntry, start: int, available: int) -> Member:
    (begin, end), dtype, shape = entry.data_offsets, _DTYPE_NAMES[entry.dtype], entry.shape
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= available or tensor_bytes(dtype, shape) != end - begin:
        raise ValueError(f"tensor {key} of shape {shape} does not fit its range {begin}..{end}")
    return Member(start + begin, end - begin, dtype, shape)

"""Safetensors as everybody else writes and reads them, and headers that lie."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from port_planner.ir.bundle.safetensors_io import (
    MAX_HEADER_BYTES,
    Chunks,
    Member,
    encode,
    encoded_header,
    index,
    read_header,
    tensor_bytes,
)

TENSORS = {
    "b": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "a": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "one": torch.tensor(3.25, dtype=torch.float64),
    "none": torch.zeros(4, 0),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def indexed(data: bytes, start: int = 0) -> dict[str, Member]:
    """Return the members of a file that begins at byte `start` of another."""
    return index(read_header(io.BytesIO(data), len(data)), len(data), start)


def chunks(tensor: torch.Tensor, size: int = 5) -> Chunks:
    """Return a tensor in chunks of an odd size."""
    data = raw(tensor)
    kind = str(tensor.dtype).removeprefix("torch.")
    return Chunks(kind, tuple(tensor.shape), lambda: (data[i : i + size] for i in range(0, len(data), size)))


def test_others_read_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"".join(encode({k: chunks(t) for k, t in TENSORS.items()}, {"made": "here"})))
    with safe_open(path, framework="pt") as archive:
        assert archive.metadata() == {"made": "here"} and set(archive.keys()) == set(TENSORS)
        for key, tensor in TENSORS.items():
            found = archive.get_tensor(key)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), key


def test_what_others_write_is_found(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(TENSORS, path, {"made": "elsewhere"})
    whole = path.read_bytes()
    members = indexed(whole)
    assert set(members) == set(TENSORS)
    for key, tensor in TENSORS.items():
        member = members[key]
        assert (member.dtype, member.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert whole[member.offset : member.offset + member.nbytes] == raw(tensor)


def test_places_count_from_the_beginning_of_the_outer_file() -> None:
    data = b"".join(encode({"a": chunks(TENSORS["b"])}))
    (member,) = indexed(data, 1000).values()
    assert data[member.offset - 1000 :] == raw(TENSORS["b"]), "the data is the end of the file"


def test_data_begins_at_a_multiple_of_eight() -> None:
    """So that a reader may map it; the format asks for it."""
    for name in ("a", "ab", "abc", "abcdefgh"):
        length = struct.unpack("<Q", encoded_header({name: chunks(TENSORS["b"])})[:8])[0]
        assert length % 8 == 0


@given(st.sampled_from(["float32", "int8", "bool", "bfloat16"]), st.lists(st.integers(0, 7), max_size=4))
def test_bytes_of_a_dense_tensor(kind: str, shape: list[int]) -> None:
    tensor = torch.zeros(shape, dtype=getattr(torch, kind))
    assert tensor_bytes(kind, shape) == tensor.numel() * tensor.element_size()


def file_of(header: Any, payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + payload


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 9]},
        {"data_offsets": [4, 12]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [8, 0]},
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [-1, -2]},
        {"shape": [2, 1 << 62]},
        {"dtype": "F16"},
    ],
)
def test_a_tensor_that_does_not_fit_its_place_is_refused(change: dict[str, Any]) -> None:
    data = file_of({"x": GOOD}, bytes(8))
    assert indexed(data)["x"].nbytes == 8
    data = file_of({"x": {**GOOD, **change}}, bytes(8))
    with pytest.raises(ValueError, match=r"tensor x of shape .* does not fit its range"):
        indexed(data)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 63, 3])
def test_a_header_longer_than_the_file_is_not_read(length: int) -> None:
    with pytest.raises(ValueError, match=f"the header claims {length} bytes"):
        read_header(io.BytesIO(struct.pack("<Q", length) + b"{}"), 10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02\0",
        file_of([]),
        file_of(7),
        file_of({"x": 7}),
        file_of({"x": {}}),
        b"\x10\x27\0\0\0\0\0\0" + b'{"x":' + b"[" * 9995,
        file_of({"x": {**GOOD, "dtype": "F7"}}),
    ],
)
def test_what_is_no_safetensors_raises_what_is_declared(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, RecursionError, struct.error)):
        indexed(data)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        members = indexed(data)
    except (ValueError, KeyError, RecursionError, struct.error):
        return
    assert all(member.offset + member.nbytes <= len(data) for member in members.values())

"""Methods that read past the dispatcher find the contents of what had left, and are as before when the budget ends."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError
from tests.forked import run_forked
from tests.simulated_card import library, missing

COUNT = 4096
"""Elements of a tensor that is larger than the budget leaves room for beside another one."""

WAYS: dict[str, Callable[[torch.Tensor], list[float]]] = {
    "numpy": lambda tensor: tensor.numpy()[:3].tolist(),
    "tolist": lambda tensor: tensor.tolist()[:3],
    "dlpack": lambda tensor: torch.from_dlpack(tensor)[:3].tolist(),
    "bytes of the storage": lambda tensor: list(
        struct.unpack("=3f", bytes(tensor.untyped_storage()[i] for i in range(12)))
    ),
}


def left(tensors: int = 8) -> list[torch.Tensor]:
    """Return tensors of which the first has left: those after it take the room."""
    return [torch.arange(COUNT, dtype=torch.float32) + 1 + i for i in range(tensors)]


@pytest.mark.parametrize("way", WAYS)
def test_contents_of_what_left_are_read(way: str, tmp_path: Path) -> None:
    with budget(tensors="40K", page_dir=tmp_path).resizing() as held:
        first = left()[0]
        assert WAYS[way](first) == [1.0, 2.0, 3.0]
    assert held.report.written_bytes > 0, "else nothing had left"


def test_a_storage_that_is_away_tells_its_size(tmp_path: Path) -> None:
    with budget(tensors="40K", page_dir=tmp_path).resizing():
        assert [tensor.untyped_storage().nbytes() for tensor in left()] == [COUNT * 4] * 8


def test_what_is_written_through_a_pointer_stays(tmp_path: Path) -> None:
    with budget(tensors="80K", page_dir=tmp_path).resizing():
        first = torch.zeros(COUNT)
        first.numpy()[5] = 7.0
        others = left()
        assert first[5].item() == 7.0 and others[0][0].item() == 1.0


def test_what_numpy_has_no_more_leaves_again(tmp_path: Path) -> None:
    weights = [torch.arange(4096.0) + i for i in range(16)]
    with budget(tensors="40K", page_dir=tmp_path).resizing() as held:
        assert sum(int(weight.detach().numpy()[-1]) for weight in weights) == 16 * 4095 + 120
        assert held.report.peak_tensor_bytes <= 3 * COUNT * 4
        array = weights[0].numpy()[2:]
        array[0] = 7.0
        doubled = [weight * 2 for weight in weights]
        array[1] = 8.0
        assert weights[0][2:4].tolist() == [7.0, 8.0] and doubled[0][2:4].tolist() == [14.0, 6.0]
        del weights[0]
        assert array[2] == 4.0
        whole = weights[0].numpy()
        with pytest.raises(UnsupportedError, match="resized while a numpy array shares its memory"):
            weights[0].resize_(whole.size + 1)
    assert array[:2].tolist() == [7.0, 8.0]


ARRAYS: dict[str, Callable[[], torch.Tensor]] = {
    "a matrix that lies by columns": lambda: torch.arange(4096.0).reshape(64, 64).t()[1:],
    "a number": lambda: torch.arange(4096.0)[2],
    "nothing": lambda: torch.ones(0, 3),
    "booleans": lambda: torch.arange(4096) > 1,
    "complex numbers": lambda: torch.arange(4096) * (1 + 2j),
    "conjugated": lambda: (torch.arange(4096) * (1 + 2j)).conj(),
    "negated": lambda: torch.arange(4096.0)._neg_view(),
    "half": lambda: torch.arange(4096).half(),
    "bfloat16": lambda: torch.arange(4096).bfloat16(),
    "one with a gradient": lambda: torch.arange(4096.0).requires_grad_(),
    "a sparse one": lambda: torch.eye(64).to_sparse(),
}
ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "force": lambda tensor: tensor.numpy(force=True),
    "list": lambda tensor: np.array(tensor.tolist()),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("asked", ASKED)
def test_arrays_are_as_torchs_own(name: str, asked: str, tmp_path: Path) -> None:
    def found() -> tuple[object, ...]:
        try:
            array = ASKED[asked](ARRAYS[name]())
        except (RuntimeError, TypeError) as error:
            return type(error), str(error)
        return type(array), array.dtype, array.shape, array.strides, array.flags.writeable, array.tolist()

    expected = found()
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        assert found() == expected


def test_methods_are_torchs_own_afterwards(tmp_path: Path) -> None:
    before = torch.Tensor.numpy, torch.Tensor.tolist, torch.UntypedStorage.data_ptr
    with budget(tensors="40K", page_dir=tmp_path).resizing():
        assert torch.Tensor.numpy is not before[0]
    assert (torch.Tensor.numpy, torch.Tensor.tolist, torch.UntypedStorage.data_ptr) == before


@pytest.mark.process
@pytest.mark.parametrize("export", ["numpy", "torch", "capsule"])
def test_memory_handed_out_by_dlpack_is_shared_for_good(export: str, tmp_path: Path) -> None:
    import_again: dict[str, Any] = {
        "numpy": np.from_dlpack,
        "torch": torch.from_dlpack,
        "capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    }
    weight = torch.arange(4096.0)
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        weight.sum()
        torch.ones(300, 300) @ torch.ones(300, 300)
        shared = import_again[export](weight)
        for step in range(4):
            torch.ones((), requires_grad=True).backward()
            torch.ones(300, 300) @ torch.ones(300, 300)
            shared[step] = -1.0
            doubled = weight * 2
            torch.ones(300, 300) @ torch.ones(300, 300)
            weight[step + 10] = -2.0
            assert float(doubled[step]) == -2.0 and float(shared[step + 10]) == -2.0
            assert float(shared[4095]) == 4095.0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_what_comes_to_a_gpus_memory_past_the_operators_finds_it_or_is_refused_by_name() -> None:
    library()
    done = run_forked("tests.card_programs", "doors")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["size"] == [16_000, 16_000] and found["stays"] == [True, 1.0]
    assert found["kernel"][1:] == 2 * [[12_000.0, [0, 0]]], "a kernel's operands leave after its launch"
    assert found["function"] == [64_000.0, 16_000.0, 80_000.0], (
        "what a function's own kernels in C++ are given stays for it"
    )
    assert found["bare thread"] == 20_000.0
    assert found["printed"] == ["tensor([1., 1.], device='card:0')", 8_000.0, [2.0, 2.0]] and found["saved"] == 8_000.0
    assert "a CUDA graph replays kernels" in found["graph"] and "handed to another process" in found["shared"]

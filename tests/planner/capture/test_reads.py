"""Reads of a tensor's contents past torch's operators: told while the block runs, and by nothing afterwards."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from planner.capture.reads import reads_told

READS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "numpy": (lambda t: t.numpy(), "numpy"),
    "array": (np.asarray, "numpy"),
    "list": (lambda t: t.tolist(), "tolist"),
    "capsule": (np.from_dlpack, "__dlpack__"),
    "byte of a storage": (lambda t: t.untyped_storage()[0], "__getitem__"),
    "bytes of a storage": (lambda t: t.untyped_storage().tolist(), "tolist"),
}


@pytest.mark.parametrize("what", READS)
def test_each_way_is_told_with_what_is_read(what: str) -> None:
    tensor, (read, method) = torch.tensor([3, 1]), READS[what]
    expected = read(tensor)
    found: list[tuple[torch.Tensor, str]] = []
    with reads_told(lambda t, name: found.append((t, name))):
        assert np.array_equal(read(tensor), expected)
        assert len(tensor) == 2 and tensor.sum().item() == 4
    assert found and found[0][1] == method
    assert found[0][0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    found.clear()
    read(tensor)
    assert not found


def test_methods_are_as_before_even_where_the_program_fails() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("numpy", "tolist", "__dlpack__")}

    def refuse(tensor: torch.Tensor, method: str) -> None:
        raise ValueError(method)

    with pytest.raises(ValueError, match="tolist"), reads_told(refuse):
        torch.ones(1).tolist()
    assert before == {name: vars(torch.Tensor).get(name) for name in before}

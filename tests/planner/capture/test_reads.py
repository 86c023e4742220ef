"""Reads of a tensor's contents past torch's operators: told while the block runs, and by nothing afterwards."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from torch.utils._python_dispatch import TorchDispatchMode

from port_planner.capture.reads import watch_reads

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
    with watch_reads(lambda t, name: found.append((t, name))):
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

    with pytest.raises(ValueError, match="tolist"), watch_reads(refuse):
        torch.ones(1).tolist()
    assert before == {name: vars(torch.Tensor).get(name) for name in before}


def test_one_hot_reads_no_class_where_their_number_is_given_and_refuses_the_same() -> None:
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.name())
            return func(*args, **kwargs or {})

    classes, found = torch.tensor([[2, 0], [1, 2]]), list[str]()
    expected, inferred = one_hot(classes, 5), one_hot(classes)
    with watch_reads(lambda t, name: None):
        with Reads():
            given = one_hot(classes, 5)
        assert "aten::_local_scalar_dense" not in found
        assert torch.equal(given, expected) and given.dtype == expected.dtype
        assert torch.equal(one_hot(classes), inferred)
        for wrong in (torch.tensor([5]), torch.tensor([-1])):
            with pytest.raises(RuntimeError, match="out of bounds"):
                one_hot(wrong, 5)
        with pytest.raises(RuntimeError, match="only applicable to index tensor"):
            one_hot(classes.float(), 5)
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        one_hot(torch.tensor([5]), 5)

"""The operators of a plan are those of this torch, or named."""

import pytest

from planner.ir.operators import OperatorError
from planner.ir.torch_operators import resolve


def test_an_operator_that_this_torch_does_not_have_is_named() -> None:
    with pytest.raises(OperatorError, match="has no operator"):
        resolve("aten::add.NoSuchOverload")

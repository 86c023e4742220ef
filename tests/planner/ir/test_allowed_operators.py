"""Which operators may stand in a graph."""

import pytest

from port_planner.ir.allowed_operators import OperatorError, check_operator
from port_planner.ir.torch_operators import resolve


@pytest.mark.parametrize(
    "name",
    ["aten::to_file", "prim::Print", "os::system", "aten::add.out", "aten::mul.out", "aten::set_.source_Storage", "", "aten::", "aten", "port::guard2", "aten::from_file"],
)  # fmt: skip
def test_operators_off_the_list_are_named(name: str) -> None:
    with pytest.raises(OperatorError, match="not supported"):
        check_operator(name)


def test_what_a_program_may_do_instead_is_said() -> None:
    with pytest.raises(OperatorError, match=r"not supported; call torch\.backends\.mha\.set_fastpath_enabled\(False\)"):
        check_operator("aten::_transformer_encoder_layer_fwd")


@pytest.mark.parametrize("name", ["aten::native_dropout", "aten::addmm", "aten::add.Tensor", "aten::maximum.out"])
def test_operators_on_the_list(name: str) -> None:
    assert callable(resolve(name))

"""What is known of an operator is what the functions say that it is looked up from."""

import pytest
import torch

from port_agent.intercept.dispatch.traits import forget_traits, traits_of
from port_agent.intercept.residency import operands
from port_planner.operators.row import Operator

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "flags"),
    [
        (ATEN.add_.Tensor, {"writes", "tiled"}),
        (ATEN.mul.Tensor, {"makes_storage", "repeatable", "tiled"}),
        (ATEN.view.default, {"views"}),
        (ATEN.embedding.default, {"reads_rows", "makes_storage", "repeatable", "maps_file"}),
        (ATEN.mm.default, {"makes_storage", "repeatable", "maps_file"}),
        (ATEN._foreach_add_.Scalar, {"writes", "counts_inside", "takes_lists", "tiled"}),
        (ATEN._to_copy.default, {"makes_storage", "repeatable", "tiled"}),
        (ATEN.prod.default, {"makes_storage", "repeatable"}),
        (ATEN.bernoulli.default, {"makes_storage"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_flags_of_operators(func: object, flags: set[str]) -> None:
    traits = traits_of(func)
    found = {name for name in traits.__dataclass_fields__ if getattr(traits, name) is True}
    assert found == flags
    assert traits_of(func) is traits and traits.func is func and traits.shape_alone is None


def test_its_row_is_at_hand() -> None:
    assert traits_of(ATEN._to_copy.default).known.copies and traits_of(ATEN.detach.default).known.whole_view


def test_of_an_operand_the_shape_alone_may_be_looked_at() -> None:
    traits = traits_of(ATEN.nll_loss_backward.default)
    assert traits.shape_alone == 1 and not traits.repeatable


def test_what_is_known_can_be_learnt_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    func = ATEN.native_batch_norm.default
    assert traits_of(func).writes
    monkeypatch.setattr(operands, "operator_of", lambda name: Operator())
    operands.written_arguments.cache_clear()
    forget_traits()
    assert not traits_of(func).writes
    monkeypatch.undo()
    operands.written_arguments.cache_clear()
    forget_traits()
    assert traits_of(func).writes

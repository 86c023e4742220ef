"""What operators are expected to take, and what is told where it is not there."""

from pathlib import Path

import pytest
import torch

from port_agent.intercept.budget import Budget, budget
from port_agent.intercept.dispatch.operator_memory import MemoryShortage, OperatorMemory, report_shortage
from port_agent.intercept.dispatch.traits import traits_of
from port_agent.intercept.residency.storages import Storage

aten = torch.ops.aten


@pytest.fixture
def bound(tmp_path: Path, held_bytes: int) -> Budget:
    return budget(ram=held_bytes + (400 << 20), page_dir=tmp_path).resizing()


def followed(bound: Budget, *tensors: torch.Tensor) -> tuple[OperatorMemory, list[Storage]]:
    storages = [bound.interceptor.table.of(tensor) for tensor in tensors]
    return bound.interceptor.op_memory, [storage for storage in storages if storage is not None]


def test_a_product_is_expected_to_copy_its_operands_but_not_without_bound(bound: Budget) -> None:
    with bound:
        small, large = torch.empty(1 << 10, 1 << 10), torch.empty(1 << 10, 1 << 14)
        op_memory, inputs = followed(bound, small, small.clone())
        traits = traits_of(aten.mm.default)
        assert op_memory.expected_bytes(traits, (small, small), {}, inputs) == 3 * small.nbytes
        op_memory, inputs = followed(bound, small, large)
        assert op_memory.expected_bytes(traits, (small, large), {}, inputs) == large.nbytes + (32 << 20)
        both = small.bfloat16(), large.bfloat16()
        op_memory, inputs = followed(bound, *both)
        assert op_memory.expected_bytes(traits, both, {}, inputs) == both[1].nbytes + sum(t.nbytes for t in both)


def test_what_was_measured_is_expected_again_as_a_share_of_the_operands(bound: Budget) -> None:
    with bound:
        one, other = torch.empty(1 << 18), torch.empty(1 << 20)
        op_memory, inputs = followed(bound, one)
        traits = traits_of(aten.cumsum.default)
        made = op_memory.expected_bytes(traits, (one, 0), {}, inputs)
        op_memory.took(traits, (one, 0), inputs, one.nbytes // 2)
        assert op_memory.expected_bytes(traits, (one, 0), {}, inputs) == made + one.nbytes // 2
        op_memory.took(traits, (one, 0), inputs, one.nbytes // 4)
        op_memory, inputs = followed(bound, other)
        assert op_memory.expected_bytes(traits, (other, 0), {}, inputs) == made * 4 + other.nbytes // 2, (
            "the most counts"
        )


def test_what_took_more_than_its_operands_is_expected_to_again_on_as_many(bound: Budget) -> None:
    with bound:
        image, other = torch.empty(1 << 16), torch.empty(1 << 15)
        traits = traits_of(aten.convolution.default)
        for tensor, besides in ((image, 0), (image, 5), (image, 3)):
            op_memory, inputs = followed(bound, tensor)
            op_memory.took(traits, (tensor,), inputs, besides * tensor.nbytes)
        op_memory.took(traits, (image,), inputs, 20 * image.nbytes, 18 * image.nbytes)
        assert op_memory.expected_bytes(traits, (image,), {}, inputs) == (1 + 5) * image.nbytes, (
            "a file is not read in place again"
        )
        op_memory, inputs = followed(bound, other)
        assert op_memory.expected_bytes(traits, (other,), {}, inputs) == (1 + 1) * other.nbytes, (
            "of others no more than the share is known"
        )


def test_what_was_measured_on_one_data_type_is_not_expected_of_another(bound: Budget) -> None:
    with bound:
        wide = torch.empty(1 << 10, 1 << 10)
        narrow = wide.bfloat16()
        traits = traits_of(aten.mm.default)
        op_memory, inputs = followed(bound, wide)
        op_memory.took(traits, (wide, wide), inputs, wide.nbytes // 64)
        op_memory, inputs = followed(bound, narrow, narrow.clone())
        assert op_memory.expected_bytes(traits, (narrow, narrow), {}, inputs) == 3 * narrow.nbytes


def test_a_shortage_is_told_once_for_each_operator_and_a_small_one_is_not(bound: Budget) -> None:
    fields: list[MemoryShortage] = []
    with bound:
        one = torch.empty(1 << 20)
        op_memory, inputs = followed(bound, one)
        op_memory.on_shortage = fields.append
        left = int(bound.interceptor.residency.limit_bytes)
        for name, beyond in (
            ("aten::mm", 1 << 20),
            ("aten::mm", 1 << 30),
            ("aten::mm", 2 << 30),
            ("aten::bmm", 1 << 30),
        ):
            op_memory.short(name, inputs, left + beyond)
    assert [lack.operator for lack in fields] == ["aten::mm", "aten::bmm"]
    first = fields[0]
    assert (first.operand_bytes, first.tensor_bytes) == (one.nbytes, left)
    assert first.needed_bytes == one.nbytes + left + (1 << 30)


@pytest.mark.parametrize(
    ("line", "begins"), [("train.py:3", "train.py:3: aten::mm needs 3.0 MiB"), ("", "aten::mm needs")]
)
def test_what_is_told_has_the_line_of_the_program_where_there_is_one(
    line: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report_shortage(MemoryShortage("aten::mm", line, 3 << 20, 1 << 20, 2 << 20, 100 << 20))
    said = capsys.readouterr().err
    assert said.startswith(f"port-agent: {begins}")
    assert "leaves 2.0 MiB for tensors; give 101.0 MiB, or smaller batches" in said

"""Blocks of rows are those whose products have the bits of all rows at once here; where none have them, it is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from port_agent.finetuning.accumulation.head_rows import MIN_ROWS, HeadRows, head_row_blocks, works_by_element
from port_agent.finetuning.inputs.options import FinetuneError


@pytest.fixture(autouse=True)
def _nothing_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "at_once", "lengths"),
    [(256, 64, [64] * 4), (255, 64, [64, 64, 64, 63]), (96, 64, [64, 32]), (70, 64, [70]), (10, 16, [10]), (33, 16, [16, 17])],
)  # fmt: skip
def test_blocks_follow_each_other_and_none_has_too_few_rows(rows: int, at_once: int, lengths: list[int]) -> None:
    blocks = head_row_blocks(rows, at_once)
    assert [stop - start for start, stop in blocks] == lengths
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])] and blocks[-1][1] == rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_products_in_the_blocks_that_it_gives_have_the_bits_of_the_whole(biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(3000, 96, dtype=dtype), torch.randn(3000, dtype=dtype) if biased else None
    rows = HeadRows(weight, bias, most=64)
    for count in (200, 256):
        hidden = torch.randn(count, 96, dtype=dtype)
        whole = F.linear(hidden[None], weight, bias)[0]
        try:
            blocks = rows.blocks(count)
        except FinetuneError:  # a device where they differ: then they must
            assert any(
                not torch.equal(F.linear(hidden[None, a:b], weight, bias)[0], whole[a:b])
                for a, b in head_row_blocks(count, 64)
            )
            continue
        assert max(stop - start for start, stop in blocks) < 64 + MIN_ROWS
        for start, stop in blocks:
            assert torch.equal(F.linear(hidden[None, start:stop], weight, bias)[0], whole[start:stop])
            assert torch.equal(whole[start:stop].clone().mm(weight), whole.mm(weight)[start:stop])


@pytest.fixture
def other_bits_below(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return how to have products of some numbers of rows differ from those of all rows."""

    def set_rows(*differing: int) -> None:
        linear = F.linear
        monkeypatch.setattr(
            F,
            "linear",
            lambda hidden, *given: linear(hidden, *given) + (hidden.shape[1] in differing),
        )

    return set_rows


def test_blocks_whose_bits_differ_are_passed_over(other_bits_below: Any) -> None:
    other_bits_below(128, 64)
    assert HeadRows(torch.empty(500, 32), None, most=128).blocks(256) == head_row_blocks(256, 32)


def test_where_all_differ_it_is_refused_by_name_and_what_fits_is_not_compared(other_bits_below: Any) -> None:
    other_bits_below(32, 16)
    rows = HeadRows(torch.empty(500, 32), None, most=32)
    with pytest.raises(
        FinetuneError, match=r"256 rows has different bits in blocks of 32 or 16 rows on this device.*--ram"
    ):
        rows.blocks(256)
    assert rows.blocks(32) == [(0, 32)]


def test_a_number_of_rows_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(HeadRows, "_has_bits_of_whole", lambda self, blocks: not compared.append(blocks[-1][1]))
    rows = HeadRows(torch.empty(500, 32), None, most=16)
    assert rows.blocks(64) == rows.blocks(64) != rows.blocks(96) and compared == [64, 96]
    assert HeadRows(torch.empty(500, 32), None, most=16).blocks(96) == rows.blocks(96) and compared == [64, 96]
    HeadRows(torch.empty(500, 48), None, most=16).blocks(96)
    assert compared == [64, 96, 96]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_function_of_elements_is_told_from_one_of_rows_by_values_and_by_gradients(dtype: torch.dtype) -> None:
    class OtherGradients(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * gradients[0].shape[-1]

    of_other_gradients: Any = OtherGradients.apply
    assert works_by_element(lambda given: given * 0.0625, dtype)
    assert works_by_element(lambda given: torch.tanh(given / 30.0) * 30.0, dtype)
    assert not works_by_element(lambda given: given - given.amax(-1, keepdim=True), dtype)
    assert not works_by_element(of_other_gradients, dtype)

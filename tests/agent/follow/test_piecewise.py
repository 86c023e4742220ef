"""Elementwise operators over operands that do not fit together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agent import budget
from agent.follow.piecewise import PIECE_BYTES, pieces_of

ATEN = torch.ops.aten
ELEMENTS = 3 * PIECE_BYTES // 4 + 77


def test_only_whole_contiguous_elementwise_operands_are_cut() -> None:
    x, limit = torch.ones(ELEMENTS), 1 << 20
    assert pieces_of(ATEN.mul.Tensor, (x, x), {}, limit) is not None
    assert pieces_of(ATEN.mul.Tensor, (x, x), {}, float("inf")) is None
    assert pieces_of(ATEN.mul.Tensor, (x[1:], x[1:]), {}, limit) is None
    assert pieces_of(ATEN.cumsum.default, (x, 0), {}, limit) is None
    assert pieces_of(ATEN.mul.Tensor, (x[:100], x[:100]), {}, 16) is None


@pytest.mark.parametrize("left_out", [0, 1, 5000, PIECE_BYTES // 4])
def test_the_beginning_of_a_storage_is_read_and_changed_in_pieces(left_out: int, tmp_path: Path) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        whole, other = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
        part = whole[: ELEMENTS - left_out]
        doubled = part * 2.0
        other.mul_(0.5)  # which sends the others away
        part.add_(1.0)
        return doubled, whole

    expected = run()
    with budget(tensors=2 * PIECE_BYTES, page_dir=tmp_path):
        followed = run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(followed, expected, strict=True))


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda x: torch.view_as_complex(x.view(-1, 2)).conj() + torch.view_as_complex(x.view(-1, 2)),
    "negated": lambda x: torch._neg_view(x) * x,
    "of two types": lambda x: x * x.view(torch.int32),
}


@pytest.mark.parametrize("name", LAZY)
def test_views_that_show_other_numbers_than_their_memory_holds_are_not_cut(name: str, tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x, other = torch.randn(8 * PIECE_BYTES // 4), torch.ones(8 * PIECE_BYTES // 4)
        other.mul_(0.5)  # which sends the other away
        return LAZY[name](x)

    expected = run()
    with budget(tensors=9 * PIECE_BYTES, page_dir=tmp_path):
        followed = run()
        assert torch.equal(followed, expected)


@pytest.mark.parametrize("room", [9, 17])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_a_single_number_of_any_shape_gives_the_result_its_shape(
    shape: tuple[int, ...], room: int, tmp_path: Path
) -> None:
    """One that has more dimensions than the rest adds them."""
    rows = torch.ones(4, 2 * PIECE_BYTES // 4).cumsum(0)
    expected = rows * torch.full(shape, 2.0)
    with budget(tensors=room * PIECE_BYTES, page_dir=tmp_path):
        found = rows * torch.full(shape, 2.0)
        assert found.shape == expected.shape and torch.equal(found, expected)


@pytest.mark.parametrize("foreach", [True, False])
def test_an_update_larger_than_the_budget_has_the_same_bits(foreach: bool, tmp_path: Path) -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(ELEMENTS))
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=foreach)
        for _ in range(2):
            weight.grad = weight.detach() * 0.5
            optimizer.step()
        return weight.detach()

    expected = train()
    with budget(tensors=2 * PIECE_BYTES, page_dir=tmp_path) as b:
        followed = train()
        assert b.report.peak_tensor_bytes < 4 * 4 * ELEMENTS, "weight, gradient and two moments never meet"
    assert torch.equal(followed, expected)


@pytest.mark.parametrize(("pieces", "room"), [(5, 9), (8, 9), (6, 11)])
def test_buffers_of_pieces_take_no_room_once_they_are_done(pieces: int, room: int, tmp_path: Path) -> None:
    """Nor does a result that finds no room beside an operand: it lives in the page file."""
    items = pieces * PIECE_BYTES // 4
    with budget(tensors=str(room * PIECE_BYTES), page_dir=tmp_path) as held:
        first, second = torch.ones(items), torch.full((items,), 2.0)
        table = held.follower.table
        table.peak_bytes = table.resident_bytes  # the first tensors were made without knowing how large they would be
        third = first.add(second)
        assert first.add_(second).add_(third)[-1].item() == 6.0
        assert table.peak_bytes <= room * PIECE_BYTES
    assert held.report.over_bytes == 0, "pieces of two at a time have room beside one"

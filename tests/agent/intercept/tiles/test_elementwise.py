"""Elementwise operators over operands that do not fit together."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent import budget
from port_agent.intercept.tiles.elementwise import TILE_BYTES, tiling_of
from port_planner.base.tensor_bytes import same_bits

ATEN = torch.ops.aten
ELEMENTS = 3 * TILE_BYTES // 4 + 77


def test_only_whole_contiguous_elementwise_operands_are_cut() -> None:
    x, limit = torch.ones(ELEMENTS), 1 << 20
    assert tiling_of(ATEN.mul.Tensor, (x, x), {}, limit) is not None
    assert tiling_of(ATEN.mul.Tensor, (x, x), {}, float("inf")) is None
    assert tiling_of(ATEN.mul.Tensor, (x[1:], x[1:]), {}, limit) is None
    assert tiling_of(ATEN.cumsum.default, (x, 0), {}, limit) is None
    assert tiling_of(ATEN.mul.Tensor, (x[:100], x[:100]), {}, 16) is None


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [0, 1, 5000, TILE_BYTES // 4])
def test_the_beginning_of_a_storage_is_read_and_changed_in_tiles(left_out: int, tmp_path: Path) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        whole, other = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
        part = whole[: ELEMENTS - left_out]
        doubled = part * 2.0
        other.mul_(0.5)  # which sends the others away
        part.add_(1.0)
        return doubled, whole

    expected = run()
    with budget(tensors=2 * TILE_BYTES, page_dir=tmp_path).resizing():
        followed = run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(followed, expected, strict=True))


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda x: torch.view_as_complex(x.view(-1, 2)).conj() + torch.view_as_complex(x.view(-1, 2)),
    "negated": lambda x: torch._neg_view(x) * x,
    "of two types": lambda x: x * x.view(torch.int32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAZY)
def test_views_that_show_other_numbers_than_their_memory_holds_are_not_cut(name: str, tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x, other = torch.randn(8 * TILE_BYTES // 4), torch.ones(8 * TILE_BYTES // 4)
        other.mul_(0.5)  # which sends the other away
        return LAZY[name](x)

    expected = run()
    with budget(tensors=9 * TILE_BYTES, page_dir=tmp_path).resizing():
        followed = run()
        assert torch.equal(followed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("room", [9, 17])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_a_single_number_of_any_shape_gives_the_result_its_shape(
    shape: tuple[int, ...], room: int, tmp_path: Path
) -> None:
    """One that has more dimensions than the rest adds them."""
    rows = torch.ones(4, 2 * TILE_BYTES // 4).cumsum(0)
    expected = rows * torch.full(shape, 2.0)
    with budget(tensors=room * TILE_BYTES, page_dir=tmp_path).resizing():
        found = rows * torch.full(shape, 2.0)
        assert found.shape == expected.shape and torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("elements", [48 * TILE_BYTES // 16, 48 * TILE_BYTES // 16 + 77])
def test_numbers_that_vectors_round_apart_are_those_of_the_whole(elements: int, threads: int, tmp_path: Path) -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(elements, dtype=torch.bfloat16))
        gradient = torch.randn(elements, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.3, foreach=False)
        for _ in range(2):
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = train()
        with budget(tensors=2 * TILE_BYTES, page_dir=tmp_path).resizing():
            found = train()
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("func", "other", "item_bytes"),
    [
        (ATEN.mul.Tensor, 2.5, 4),
        (ATEN.div.Tensor, 3, 4),
        (ATEN.mul.Tensor, torch.tensor(2, dtype=torch.int64), 1),
        (ATEN.mul_.Tensor, 2, 0),
    ],
)
def test_results_have_the_size_of_the_type_that_they_get(func: Any, other: Any, item_bytes: int) -> None:
    tiling = tiling_of(func, (torch.ones(ELEMENTS * 4, dtype=torch.int8), other), {}, 1 << 20)
    assert tiling is not None and tiling.made_item_bytes == item_bytes


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu of tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "relu6": torch.nn.functional.relu6,
    "sigmoid": torch.sigmoid,
    "leaky": torch.nn.functional.leaky_relu,
    "cube": lambda x: torch.tanh(x + 0.044715 * torch.pow(x, 3.0)),
    "masked": lambda x: torch.exp(x.masked_fill(x > 1, -2.0)),
    "rsqrt": lambda x: torch.rsqrt(x * x + 1e-3),
}


@pytest.mark.slow
@pytest.mark.sample(10)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients_run_in_tiles(
    name: str, dtype: torch.dtype, threads: int, tmp_path: Path
) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(8 * TILE_BYTES // 4, dtype=dtype, requires_grad=True)
        y = ACTIVATIONS[name](x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        return y.detach(), x.grad

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = run()
        with budget(
            tensors=6 * expected[0].nbytes // 4, page_dir=tmp_path
        ).resizing() as bound:  # of the three of a gradient
            found = run()
            over_bytes = bound.report.over_bytes
            assert all(same_bits(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert over_bytes == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_single_numbers_of_tensors_that_are_away_are_read(tmp_path: Path) -> None:
    def run() -> list[torch.Tensor]:
        x, y, other = (torch.arange(ELEMENTS) + k for k in (1.0, 2.0, 3.0))
        other.mul_(0.5)  # which sends the others away
        return [y * x[5], torch.div(y, x[7:8]), x.mul_(y[3]), torch.add(x, x[9])]

    expected = run()
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing():
        found = run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("place", [(..., slice(None, None, 2)), (..., slice(0, 4))], ids=["every other", "short runs"])
def test_gradients_of_slices_in_many_parts_are_made_whole(place: Any, tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        x = torch.ones(ELEMENTS, 8, requires_grad=True)
        x[place].backward(torch.arange(4.0 * ELEMENTS).view(ELEMENTS, 4))
        assert x.grad is not None
        return x.grad

    expected = run()
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing():
        assert torch.equal(run(), expected)


def test_what_writes_a_number_of_an_operand_is_plain_pytorchs_error(tmp_path: Path) -> None:
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing():
        x = torch.ones(ELEMENTS)
        with pytest.raises(RuntimeError, match="single memory location"):
            x.mul_(x[ELEMENTS - 1])
        assert x.sum().item() == ELEMENTS, "no tile was changed"


@pytest.mark.slow
@torch.inference_mode()
def test_results_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    """In inference mode nobody else sees to it that `out` is what is returned."""
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing():
        x, y, out, small = torch.ones(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(1)
        assert torch.maximum(y, x, out=out).data_ptr() == out.data_ptr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the resizing
            torch.maximum(y, x, out=small)
        assert small.shape == x.shape and small.sum().item() == ELEMENTS


@pytest.mark.slow
def test_a_copy_in_another_order_and_strides_of_single_dimensions_are_plain_pytorchs(tmp_path: Path) -> None:
    def run() -> list[torch.Tensor]:
        x = torch.arange(2.0 * TILE_BYTES).view(2, TILE_BYTES // 4, 2, 2)
        column = torch.arange(2.0 * TILE_BYTES).view(1, -1).t()
        return [x.clone(memory_format=torch.channels_last), column.clone(), column + 1]

    expected = run()
    with budget(tensors=TILE_BYTES, page_dir=tmp_path).resizing():
        found = run()
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.slow
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
    with budget(tensors=2 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        followed = train()
        assert b.report.peak_tensor_bytes < 4 * 4 * ELEMENTS, "weight, gradient and two moments never meet"
    assert torch.equal(followed, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("tiling", "room"), [(5, 9), (8, 9), (6, 11)])
def test_buffers_of_tiles_take_no_room_once_they_are_done(tiling: int, room: int, tmp_path: Path) -> None:
    """Nor does a result that finds no room beside an operand: it lives in the page file."""
    items = tiling * TILE_BYTES // 4
    with budget(tensors=str(room * TILE_BYTES), page_dir=tmp_path).resizing() as held:
        first, second = torch.ones(items), torch.full((items,), 2.0)
        table = held.interceptor.table
        table.peak_bytes = table.resident_bytes  # the first tensors were made without knowing how large they would be
        third = first.add(second)
        assert first.add_(second).add_(third)[-1].item() == 6.0
        assert table.peak_bytes <= room * TILE_BYTES
    assert held.report.over_bytes == 0, "tiles of two at a time have room beside one"


SOFTMAXES = {
    "softmax": (ATEN._softmax.default, ATEN._softmax_backward_data.default),
    "log_softmax": (ATEN._log_softmax.default, ATEN._log_softmax_backward_data.default),
}


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("shape", [(120, 40003), (2, 3, 12, 70000), (5, 1100001)])
def test_a_softmax_of_rows_that_do_not_fit_has_the_same_bits(
    shape: tuple[int, ...], name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows end within checksummed chunks, and may be longer than a tile."""
    forward, backward = SOFTMAXES[name]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        made = forward(x, -1, False)
        return made, backward(grad, made, len(shape) - 1, dtype)

    expected = run()
    with budget(tensors=expected[0].nbytes + 4 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        followed = run()
        assert b.report.written_bytes > 0 and b.report.peak_tensor_bytes < 3 * expected[0].nbytes
        for mine, theirs in zip(followed, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_softmax_along_another_dimension_runs_whole() -> None:
    x, limit = torch.empty(300, ELEMENTS // 100, device="meta"), 1 << 20
    assert tiling_of(ATEN._softmax.default, (x, 1, False), {}, limit) is not None
    assert tiling_of(ATEN._softmax.default, (x, 0, False), {}, limit) is None
    assert tiling_of(ATEN._softmax_backward_data.default, (x, x[:1], -1, x.dtype), {}, limit) is None


def test_a_conversion_runs_in_tiles_where_numbers_are_converted_each_by_itself() -> None:
    x, limit = torch.empty(ELEMENTS, device="meta"), 1 << 20
    found = tiling_of(ATEN._to_copy.default, (x,), {"dtype": torch.float64}, limit)
    assert found is not None and found.made_bytes == 8 * ELEMENTS and 8 * found.step == TILE_BYTES
    assert tiling_of(ATEN._to_copy.default, (x,), {"dtype": torch.int64}, limit) is None


@pytest.mark.process
def test_the_loss_of_a_language_model_takes_its_logits_once(tmp_path: Path) -> None:
    """Plain PyTorch holds the gradient of their logarithms, these, and the gradient that it makes of both, at once."""
    rows, vocabulary = 96, 40003
    logits_bytes = 4 * rows * vocabulary

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(vocabulary, 16)
        hidden = torch.randn(rows, 16, requires_grad=True)
        losses = []
        for _ in range(3):
            labels = torch.randint(0, vocabulary, (rows,))
            labels[3] = -100
            loss = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)
            loss.backward()
            losses.append(loss.detach())
        assert hidden.grad is not None
        return [*losses, hidden.grad]

    expected = run()
    with budget(tensors=logits_bytes + 6 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        followed = run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(followed, expected, strict=True))
    assert b.report.over_bytes == 0 and b.report.peak_tensor_bytes <= logits_bytes + 6 * TILE_BYTES


@pytest.mark.process
def test_what_was_made_in_tiles_is_not_made_again_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the medium: operand and result have no room beside each other."""
    with budget(tensors=14 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        monkeypatch.setattr(b.interceptor.planner, "paging_seconds", lambda nbytes: 1e9)
        source = torch.ones(10 * TILE_BYTES // 4)
        for _ in range(4):
            doubled = source * 2.0
            other = torch.ones(8 * TILE_BYTES // 4).mul_(2.0)
            assert doubled.sum() + other.sum() == 2 * (source.numel() + other.numel())
            del doubled, other
            torch.ones(1, requires_grad=True).sum().backward()
        assert b.report.peak_tensor_bytes <= 14 * TILE_BYTES and b.report.over_bytes == 0


@pytest.mark.slow
def test_tiles_that_are_written_in_place_fill_chunks_whatever_the_other_operand(tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        bytes_each, doubles = (
            torch.zeros(6 * TILE_BYTES // 4, dtype=torch.uint8),
            torch.empty(6 * TILE_BYTES // 4, dtype=torch.float64),
        )
        doubles.uniform_(0, 200)
        return bytes_each.copy_(doubles)

    expected = run()
    with budget(tensors=12 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        followed = run()
        assert b.report.written_bytes > 0 and torch.equal(followed, expected)

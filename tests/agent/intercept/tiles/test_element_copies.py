"""Copies of views and gradients of slices, told as runs of elements, are what the operators make."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent import budget
from port_agent.intercept.tiles import element_copies
from port_agent.intercept.tiles.element_copies import ElementRun, element_runs, only_copies
from port_agent.intercept.tiles.elementwise import TILE_BYTES, tiling_of

ATEN = torch.ops.aten
CONTIGUOUS = {"memory_format": torch.contiguous_format}


def made_of(runs: tuple[ElementRun, ...], source: torch.Tensor) -> torch.Tensor:
    reached = source.untyped_storage().nbytes() // source.element_size()
    flat = source.as_strided((reached,), (1,), 0)
    return torch.cat([torch.zeros(r.count) if r.start is None else flat[r.start : r.start + r.count] for r in runs])


def views() -> dict[str, torch.Tensor]:
    whole = torch.randn(3, 4, 5, 6)
    return {
        "all": whole,
        "begin of rows": whole[..., :3],
        "without the last": whole[:, :-1],
        "within": whole[1:, 1:3, 2:],
        "turned": whole.transpose(1, 2),
        "expanded": whole[:, :1].expand(3, 4, 5, 6),
        "one": whole[2, 3, 4, 5],
        "every other": whole[::2, :, ::2],
    }


@pytest.mark.parametrize("name", views())
def test_a_copy_of_a_view_is_its_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_copies, "_SHORTEST_RUN_BYTES", 1)
    view = views()[name]
    assert torch.equal(made_of(element_runs(ATEN.clone.default, (view,), CONTIGUOUS), view), view.reshape(-1))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_the_gradient_of_a_slice_is_its_runs_among_zeros(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_copies, "_SHORTEST_RUN_BYTES", 1)
    sizes = [3, 4, 5]
    for start, end in itertools.product([None, 0, 1, 2, -1, -2, 9], [1, 3, -1, 9223372036854775807]):
        grad = torch.randn(torch.empty(sizes).index_select(dim, torch.arange(sizes[dim])[slice(start, end)]).shape)
        args = (grad, sizes, dim, 0 if start is None else start, end, 1)
        runs = element_runs(ATEN.slice_backward.default, args, {})
        if grad.numel():
            assert torch.equal(made_of(runs, grad), ATEN.slice_backward.default(*args).view(-1))
        else:
            assert runs == ()


def test_what_moves_in_short_runs_or_in_another_order_is_left_whole() -> None:
    large = torch.empty(1 << 10, 1 << 10)
    refused: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ATEN.clone.default, (large.t(),), CONTIGUOUS),
        (ATEN.clone.default, (large[:, :99],), CONTIGUOUS),
        (ATEN.clone.default, (large[: 1 << 9],), {"memory_format": torch.preserve_format}),
        (ATEN.clone.default, (torch.empty(1 << 20, dtype=torch.complex64).conj(),), CONTIGUOUS),
        (ATEN.slice_backward.default, (large, [1 << 10, 1 << 11], 1, 0, 1 << 11, 2), {}),
        (ATEN.slice_backward.default, (large.t(), [1 << 11, 1 << 10], 0, 0, 1 << 10, 1), {}),
    ]
    assert all(element_runs(*call) == () for call in refused)
    assert only_copies(ATEN.clone.default) and not only_copies(ATEN.mul.Tensor)


@pytest.mark.process
def test_logits_without_the_last_token_take_their_place_once(tmp_path: Path) -> None:
    samples, tokens, vocabulary = 3, 40, 40003
    logits_bytes = 4 * samples * tokens * vocabulary

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, hidden = torch.randn(vocabulary, 8), torch.randn(samples, tokens, 8, requires_grad=True)
        losses = []
        for _ in range(3):
            labels = torch.randint(0, vocabulary, (samples, tokens))
            logits = hidden @ weight.t()
            shifted = logits[..., :-1, :].contiguous().view(-1, vocabulary)
            loss = torch.nn.functional.cross_entropy(shifted, labels[..., 1:].reshape(-1))
            loss.backward()
            losses.append(loss.detach())
        assert hidden.grad is not None
        return [*losses, hidden.grad]

    expected = run()
    with budget(tensors=logits_bytes + 6 * TILE_BYTES, page_dir=tmp_path).resizing() as b:
        followed = run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(followed, expected, strict=True))
    assert b.report.over_bytes == 0 and b.report.peak_tensor_bytes <= logits_bytes + 6 * TILE_BYTES


def test_a_move_is_cut_only_where_both_ends_do_not_fit() -> None:
    view = torch.empty(2, 40, 40003, device="meta")[:, :-1]
    assert tiling_of(ATEN.clone.default, (view,), CONTIGUOUS, 1e9) is None
    found = tiling_of(ATEN.clone.default, (view,), CONTIGUOUS, 1 << 20)
    assert found is not None and found.shape == view.shape and found.made_bytes == 4 * view.numel()

"""Random programs of a few operators on views, lists and single numbers, followed in a few KiB: bits, strides, counters
and errors of plain PyTorch.

Chunks are 4 KiB here, so that small tensors are cut, too.
"""

import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from port_agent import budget
from port_agent.intercept.tiles import element_copies, elementwise, tile_buffers
from port_agent.paging import pager
from tests.agent.intercept.programs import SCRIPTS, computed, followed

CHUNK_BYTES = 4 << 10
SEEDS, MANY_SEEDS = 60, 2000
STEPS = 12
SHAPES = [(4, 1500), (4, 1500), (4, 1500), (6000,), (1,), (), (1, 1), (5, 1201), (4, 750, 2, 1)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool]
ATEN = torch.ops.aten

Seen = tuple[object, ...]


class Program:
    """Draws operators and operands from what it made before; the draws depend on shapes and data types alone."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.made: list[Tensor] = []
        self.seen: list[Seen] = []
        self.steps: list[Callable[[], object]] = [
            self.chunks, self.chunks, self.in_place, self.in_place, self.out, self.view, self.view, self.copy, self.lists, self.lists,
            self.rows, self.moved, self.forget,
        ]  # fmt: skip

    def run(self) -> list[Seen]:
        torch.manual_seed(0)
        self.made = [self.fresh() for _ in range(5)]
        for _ in range(STEPS):
            step = self.draw.choice(self.steps)
            try:
                made = step()
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                self.seen.append((step.__name__, type(error).__name__))
                continue
            tensors = [t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, Tensor)]
            self.seen += [(step.__name__, t.dtype, t.shape, t.stride(), t._version) for t in tensors]
            self.made += tensors
        self.seen += [("bits", _bits(t)) for t in self.made]
        return self.seen

    def fresh(self, like: Tensor | None = None) -> Tensor:
        shape = self.draw.choice(SHAPES) if like is None else like.shape
        return (4 * torch.randn(shape)).to(self.draw.choice(DTYPES))

    def any(self) -> Tensor:
        return self.draw.choice(self.made)

    def other(self, x: Tensor) -> Tensor:
        """Return one of the same shape, or a single number, which may lie in a large tensor."""
        kind = self.draw.randrange(4)
        alike = [t for t in self.made if t.shape == x.shape]
        if kind == 0 and alike:
            return self.draw.choice(alike)
        if kind == 1:
            return self.any().flatten()[-1:]
        return self.fresh(x) if kind == 2 else torch.full(self.draw.choice([(), (1,), (1, 1)]), 3.0)

    def chunks(self) -> object:
        x = self.any()
        y, z = self.other(x), self.other(x)
        call = self.draw.choice([
            lambda: x + y, lambda: x * y, lambda: x / y, lambda: torch.add(x, y, alpha=2), lambda: torch.addcmul(x, y, z), lambda: -x,
            lambda: torch.maximum(x, y), lambda: x.abs(), lambda: torch.lerp(x, y, 0.3), lambda: x.reciprocal(), lambda: x * 2.5,
        ])  # fmt: skip
        return call()

    def in_place(self) -> object:
        x = self.any()
        y = self.other(x)
        call = self.draw.choice([
            lambda: x.add_(y), lambda: x.mul_(y), lambda: x.div_(y), lambda: x.copy_(y), lambda: x.addcdiv_(y, y), lambda: x.neg_(),
            lambda: x.sub_(x), lambda: x.clamp_(-1, 1), lambda: x.lerp_(y, 0.3), lambda: x.mul_(x.flatten()[0]),
        ])  # fmt: skip
        return call()

    def out(self) -> object:
        x = self.any()
        out = self.draw.choice([self.other(x), torch.zeros(x.shape, dtype=x.dtype), torch.zeros(1, dtype=x.dtype)])
        return [torch.maximum(x, self.other(x), out=out), out]

    def view(self) -> object:
        x = self.any()
        call = self.draw.choice([
            lambda: x.transpose(0, -1), lambda: x[1:], lambda: x[..., ::2], lambda: x.unsqueeze(-1), lambda: x.flatten(), lambda: x.conj(),
            lambda: torch._neg_view(x.float()), lambda: x.expand(2, *x.shape), lambda: x.view(torch.int32), lambda: x.view(1, -1).t(),
        ])  # fmt: skip
        return call()

    def copy(self) -> object:
        x = self.any()
        order = self.draw.choice([torch.preserve_format, torch.contiguous_format, torch.channels_last])
        return (
            x.clone(memory_format=order)
            if self.draw.random() < 0.5
            else x.to(self.draw.choice(DTYPES), memory_format=order)
        )

    def lists(self) -> object:
        xs = [self.any() for _ in range(self.draw.randrange(1, 4))]
        ys = [self.other(x) for x in xs][: self.draw.choice([1, 3, 3, 3])]
        call = self.draw.choice(
            [
                lambda: torch._foreach_add_(xs, ys),
                lambda: torch._foreach_mul_(xs, 2.0),
                lambda: torch._foreach_mul(xs, ys),
                lambda: torch._foreach_addcmul_(xs, ys, ys, torch.ones(len(xs))),
                lambda: torch._foreach_sqrt_(xs),
                lambda: torch._foreach_div_(xs, [2.0] * len(ys)),
                lambda: torch._foreach_neg(xs),
            ]
        )
        return call() or xs

    def rows(self) -> object:
        x = self.any()
        function = self.draw.choice([torch.softmax, torch.log_softmax])
        return function(x, self.draw.choice([-1, 0]))

    def moved(self) -> object:
        x = self.any()
        wider = [*x.shape[:-1], 2 * x.shape[-1]]
        step = self.draw.choice([1, 2])
        return [x.expand(2, *x.shape).contiguous(), ATEN.slice_backward(x, wider, -1, 0, step * x.shape[-1], step)]

    def forget(self) -> None:
        del self.made[self.draw.randrange(len(self.made) - 1)]


def _bits(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.long)])
def test_random_programs_are_plain_pytorchs(seeds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for module in (pager, tile_buffers, elementwise):
        monkeypatch.setattr(module, "CHUNK", CHUNK_BYTES)
    monkeypatch.setattr(elementwise, "TILE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(element_copies, "_SHORTEST_RUN_BYTES", CHUNK_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(seeds):
            expected = Program(seed).run()
            with budget(tensors=random.Random(seed).choice(["4K", "24K", "64K"]), page_dir=tmp_path).resizing():
                assert Program(seed).run() == expected, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("seeds", [(0, 9), pytest.param(range(100), marks=pytest.mark.long)], ids=["two", "many"])
def test_random_programs_of_operands_larger_than_the_budget(
    seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On guarded memory: results begin evicted, and their addresses are those of tensors that
    were read-only at their end.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [str(SCRIPTS / "large_operands.py")]
    for seed in seeds:
        expected = computed(*words, str(seed), folder=tmp_path)
        done = followed(*words, str(seed), folder=tmp_path, bound=("--tensors", "9M"))
        assert (done.code, done.output) == (0, expected.output), f"seed {seed}: {done.said}"

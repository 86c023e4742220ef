"""Lists are taken apart on a device where that leaves the bits of the whole."""

from typing import Any

import torch

from port_agent.intercept.tiles.list_bits import list_bits

ATEN = torch.ops.aten


def _lists(count: int) -> list[list[torch.Tensor]]:
    return [[torch.ones(10, 7) for _ in range(count)] for _ in range(2)]


def test_what_loops_may_be_taken_apart_and_nothing_of_the_program_is_written() -> None:
    a, b = _lists(6)
    found = list_bits()
    assert found.has_bits_of_whole(ATEN._foreach_add_.List, [a, b], {})
    assert found.has_bits_of_whole(ATEN._foreach_mul.Scalar, [a, 3.0], {})
    steps = [torch.tensor(3.0) for _ in a]
    update = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    assert found.has_bits_of_whole(ATEN._fused_adamw_.default, [a, b, *_lists(6), [], steps], update)
    assert all(torch.equal(t, torch.ones(10, 7)) for t in (*a, *b))


class _SumsOfAll:
    """An operator that looks like one over lists, whose elements know of each other."""

    tags: tuple[torch.Tag, ...] = ()
    _schema = ATEN._foreach_add_.List._schema

    def __call__(self, a: list[torch.Tensor], b: list[torch.Tensor], **_: Any) -> None:
        for t in a:
            t += torch.stack([other.sum() for other in b]).sum()


def test_what_differs_runs_whole_and_is_tried_once() -> None:
    calls = []

    class Counted(_SumsOfAll):
        def __call__(self, a: list[torch.Tensor], b: list[torch.Tensor], **_: Any) -> None:
            calls.append(len(a))
            super().__call__(a, b)

    a, b = _lists(6)
    found, operator = list_bits(), Counted()
    assert not found.has_bits_of_whole(operator, [a, b], {}) and not found.has_bits_of_whole(operator, [a, b], {})
    assert calls == [4, 1, 1, 1, 1]

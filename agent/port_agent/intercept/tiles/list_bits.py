"""Whether an operator has the same bits on a device in parts: one over lists element by element,
one over numbers in tiles.

A GPU has special kernels for lists, and for tensors of some sizes, so there it is tested once for
each operator and data type.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from port_agent.intercept.residency.device_storages import plain_operators
from port_agent.intercept.residency.operands import tensors_in
from port_agent.intercept.tiles.lists import split_call
from port_planner.base.tensor_bytes import same_bits

_TENSORS = 4
"""Number of tensors in each tested list."""

_ELEMENTS = 4099
"""Elements of each tested tensor: more than a block of a GPU's threads processes, and not a multiple of that."""

SAMPLE_BYTES = 768 << 10
"""Approximate bytes of a test: twice four lists of 32 bits, and the results."""

_TILES = 3

_GOLDEN = 0.6180339887498949
"""Golden ratio: the fractions of its multiples fill the range from 0 to 1 evenly."""


class PartBits:
    """Tests operators, and remembers the results."""

    def __init__(self, test: Callable[..., bool], kind: Callable[..., Hashable]) -> None:
        """`test`: whether an operator with arguments has the bits of the whole.

        `kind`: of arguments, for which one test is enough.
        """
        self._test, self._kind = test, kind
        self._exact: dict[Hashable, bool] = {}

    def has_bits_of_whole(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a call may run in parts. No random numbers are drawn for the test."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        key = (func, self._kind(args, kwargs), *sorted(kwargs))
        if key not in self._exact:
            try:
                with plain_operators():
                    self._exact[key] = self._test(func, args, kwargs)
            except torch.OutOfMemoryError:  # the next call tries again
                return False
        return self._exact[key]


def tile_bits() -> PartBits:
    """Return the tests of elementwise operators whole and in three tiles."""
    return PartBits(
        _same_in_tiles,
        lambda args, kwargs: tuple((t.dtype, t.dim() > 0) for t in tensors_in((*args, *kwargs.values()))),
    )


def list_bits() -> PartBits:
    """Return the tests of operators over lists, at once and element by element."""
    return PartBits(
        _same_by_element, lambda args, kwargs: (*(t.dtype for t in tensors_in((*args, *kwargs.values()))), len(args))
    )


def _same_in_tiles(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    def sample(stop: int) -> tuple[list[Any], dict[str, Any]]:
        return [_alike(a, stop) for a in args], {k: _alike(v, stop) for k, v in kwargs.items()}

    def cut(value: Any, start: int) -> Any:
        cut_here = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() > 1
        return value[start : start + _ELEMENTS].clone() if cut_here else value

    whole, source = sample(_TILES * _ELEMENTS), sample(_TILES * _ELEMENTS)
    at_once = _all(func(*whole[0], **whole[1]), whole)
    for start in range(0, _TILES * _ELEMENTS, _ELEMENTS):
        tile = [cut(a, start) for a in source[0]], {k: cut(v, start) for k, v in source[1].items()}
        made = _all(func(*tile[0], **tile[1]), tile)
        if not all(same_bits(cut(a, start), b) for a, b in zip(at_once, made, strict=True)):
            return False
    return True


def _same_by_element(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    listed = next((len(a) for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a)), 0)
    whole, apart = (
        ([_sample(a, listed) for a in args], {k: _sample(v, listed) for k, v in kwargs.items()}) for _ in range(2)
    )
    at_once = func(*whole[0], **whole[1])
    one_by_one = split_call(func, apart[0], apart[1], lambda f, a, k: f(*a, **k))
    found = zip(_all(at_once, whole), _all(one_by_one, apart), strict=True)
    return all(same_bits(a, b) for a, b in found)


def _all(made: Any, arguments: tuple[list[Any], dict[str, Any]]) -> list[torch.Tensor]:
    """Return the results of a call and the contents of its operands after it, as rows."""
    values = (*arguments[0], *arguments[1].values(), made if isinstance(made, (list, tuple)) else [made])
    return [t.reshape(-1) for t in tensors_in(values)]


def _sample(value: Any, listed: int) -> Any:
    """Return an argument with lists of `listed` tensors replaced by fewer tensors of the same kind with other
    values; single numbers stay.
    """
    if isinstance(value, (list, tuple)):
        return [_alike(part, _ELEMENTS) for part in value[:_TENSORS]]
    numbers = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == listed
    return _alike(value, _TENSORS if numbers else _ELEMENTS)


def _alike(value: Any, most: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return torch.ones_like(value)
    places = torch.arange(1, min(value.numel(), most) + 1, dtype=torch.float32, device=value.device)
    return ((places * _GOLDEN) % 1 + 0.25).to(value.dtype)

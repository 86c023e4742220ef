"""Whether elementwise operators compute a number identically at any position.

A kernel of torch gives each thread a span of the elements (`parallel_for` in ATen/Parallel-inl.h). It computes the span
in pairs of vectors from its beginning, and the remainder number by number (`vectorized_loop` in
ATen/native/cpu/Loops.h). Some operators round differently in the two: the gradient of GELU in three of four float32
numbers, a scaled sum of bfloat16 in one of five. A tile has the bits of the whole if no number changes from one way to
the other.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from port_planner.base.tensor_bytes import same_bits
from port_planner.operators.row import VECTOR
from port_planner.torch_compat.modes import pytree

MIN_SHARE = 32768
"""Number of elements from which kernels use a further thread."""

_MIN_SHARES = (2048, 16384, MIN_SHARE)
"""The same for the vector math library, for GELU (which then uses all threads at once), and for the rest."""

_SAMPLES = 1 << 15
_APART = 3
"""Elements between two numbers of the sample if each must be computed separately."""
_SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan)
_SEED = 21

_LARGEST_FORMULA = 3.0
"""Multiples of a half up to this may select their own formula, as exponents do; other numbers are interchangeable."""
_FACTORS = {"below": 0.3, "above": 1.7}
"""Factors below and above a half, which decides how `lerp` rounds."""


def in_whole_vectors(elements: int, threads: int) -> bool:
    """Return whether every thread's share of a contiguous tensor, except the last, ends
    with a whole pair of vectors.
    """
    taken = {min(threads, math.ceil(elements / least)) for least in _MIN_SHARES}
    if elements > min(_MIN_SHARES):
        taken.add(threads)
    return all(count <= 1 or math.ceil(elements / count) % VECTOR == 0 for count in taken)


def rounds_apart(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an elementwise operator in this call rounds differently here in vectors than number by number.

    This is tested on synthetic numbers, once per process for each form of call. All NaNs count as equal. Tensors with
    one element are combined with all the others.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    return _rounds_apart(func, spec, tuple(_form(leaf) for leaf in leaves))


_Form = tuple[str, Any, int]


def _form(leaf: Any) -> _Form:
    """Return the properties of an argument that may select a kernel, or a formula within it."""
    if isinstance(leaf, torch.Tensor):
        return ("single" if leaf.numel() == 1 else "tensor", leaf.dtype, leaf.dim() if leaf.numel() == 1 else 1)
    if isinstance(leaf, float) and not ((2 * leaf).is_integer() and abs(leaf) <= _LARGEST_FORMULA):
        return ("number", "below" if leaf < 1 / 2 else "above", 0)
    return ("as it is", leaf, 0)


@functools.cache
def _rounds_apart(func: Any, spec: pytree.TreeSpec, forms: tuple[_Form, ...]) -> bool:
    found = []
    for apart in (1, _APART):
        made = [_stand_in(form, place, apart) for place, form in enumerate(forms)]
        args, kwargs = pytree.tree_unflatten(made, spec)
        result = func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        found.append([t.masked_fill(t.isnan(), math.nan) if t.is_floating_point() else t for t in tensors])
    return not all(same_bits(one, other) for one, other in zip(*found, strict=True))


def _stand_in(form: _Form, place: int, apart: int) -> Any:
    """Return an argument of a form; the numbers of a tensor are `apart` elements from each other."""
    kind, what, dim = form
    if kind == "as it is":
        return what
    if kind == "number":
        return _FACTORS[what]
    if kind == "single":
        return torch.full((1,) * dim, _FACTORS["below"]).to(what)
    numbers = torch.randn(_SAMPLES, generator=torch.Generator().manual_seed(_SEED + place))
    pairs = [(one, other)[place % 2] for one in _SPECIAL for other in _SPECIAL]
    numbers[: len(pairs)] = torch.tensor(pairs)
    numbers = numbers if what.is_floating_point or what.is_complex else numbers > 0
    return torch.empty(_SAMPLES, apart, dtype=what)[:, 0].copy_(numbers.to(what))

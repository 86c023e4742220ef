"""What torch itself holds for samples of its functions: values and gradients, followed, have
the bits of plain PyTorch.
"""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.follow_zoo.operators import torch_functions
from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError

SAMPLES = 10
NOT_REPEATED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "linalg.lstsq",
        "matrix_exp",
    )
)
"""Functions that read memory nobody wrote: in plain PyTorch, too, `lstsq` of some matrices and `matrix_exp` in half
precision give other numbers with each content of free memory.
"""

Bits = tuple[str, tuple[int, ...], bytes] | tuple[str, str] | None


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize(
    ("dtype", "autocast", "tensors"),
    [
        (torch.float32, False, "64M"),
        (torch.float32, False, "1K"),
        (torch.float32, True, "64M"),
        (torch.complex64, False, "64M"),
        (torch.bfloat16, False, "64M"),
    ],
    ids=["float32", "float32 in 1K", "float32 autocast", "complex64", "bfloat16"],
)
def test_every_function_with_torchs_own_samples(
    dtype: torch.dtype, autocast: bool, tensors: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    differing: list[str] = []
    compared = 0
    for info in torch_functions():
        name = f"{info.name}.{info.variant_test_name}".removesuffix(".")
        if dtype not in info.supported_dtypes("cpu") or info.name in NOT_REPEATED:
            continue
        samples = list(_samples(info, dtype))
        expected, again = (_run_all(info, samples, autocast=autocast) for _ in range(2))
        with budget(tensors=tensors, page_dir=tmp_path):
            followed = _run_all(info, samples, autocast=autocast)
        for plain, repeated, seen in zip(expected, again, followed, strict=True):
            if plain == repeated:  # of what was never written there is no right number
                compared += 1
                refused = seen[-1:] != [] and seen[-1] is not None and seen[-1][0] == UnsupportedError.__name__
                differing += [] if seen == plain or refused else [name]
    assert not set(differing)
    assert compared > 2000


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(0)
    learns = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    try:
        yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=learns), SAMPLES)
    except (RuntimeError, ImportError, ValueError, TypeError):
        return  # a sample that this machine cannot make


def _run_all(info: Any, samples: list[Any], *, autocast: bool) -> list[list[Bits]]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return [_run(info, sample) for sample in samples]


def _run(info: Any, sample: Any) -> list[Bits]:
    """Return the bits of a function's results and of its gradients, of second order too, or what it raised."""
    torch.manual_seed(1)
    found: list[Bits] = []
    try:
        results = _tensors(info.op(sample.input, *sample.args, **sample.kwargs))
        found += map(_bits, results)
        results = [t for t in results if t.requires_grad and t.numel()]
        operands = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
        if results and operands:
            first = _gradients(results, operands, again=info.supports_gradgrad)
            found += map(_bits, first)
            further = [t for t in first if t is not None and t.requires_grad]
            if further:
                found += map(_bits, _gradients(further, operands, again=False))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, UnsupportedError) as error:
        found.append((type(error).__name__, str(error)))
    return found


def _gradients(results: list[Tensor], operands: list[Tensor], *, again: bool) -> tuple[Tensor | None, ...]:
    weights = [torch.randn_like(t) for t in results]
    return torch.autograd.grad(results, operands, weights, create_graph=again, allow_unused=True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bits(tensor: Tensor | None) -> Bits:
    if tensor is None:
        return None
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    plain = dense.resolve_conj().resolve_neg().contiguous()
    return (
        str(plain.dtype),
        tuple(plain.shape),
        plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
    )

"""Compute singular values and eigenvalues without vectors if they are not differentiated, as plain PyTorch does.

`_may_require_fw_or_bw_grad` (BatchLinearAlgebra.cpp) is true under any dispatch mode. So `svdvals`, `eigvalsh`,
`eigvals` and operators based on them (`cond`, `matrix_norm`, `matrix_rank`) would also compute vectors, by other LAPACK
routines with different last digits.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from port_agent.intercept.dispatch.tangents import tangent_of
from port_planner.torch_compat.autograd import is_wrapped
from port_planner.torch_compat.modes import composite, remove_kernels

_aten: Any = torch.ops.aten

_VALUES_ALONE: dict[Any, Callable[..., Tensor]] = {
    _aten.linalg_svdvals.default: lambda a, *, driver=None: _aten._linalg_svd(a, False, False, driver=driver)[1],
    _aten.linalg_eigvalsh.default: lambda a, uplo="L": _aten._linalg_eigh(a, uplo, False)[0],
    _aten.linalg_eigvals.default: _aten._linalg_eigvals,
}
"""Composite operators, and what their kernels call if vectors are not needed."""


def composite_kernel(func: Any) -> Callable[..., Any]:
    """Return the kernel of a composite operator, with the decisions that it makes without a mode.

    This is torch's own kernel, except for the operators above. `decompose` would prefer decompositions in Python, which
    have different bits (gru).
    """
    return functools.partial(_differentiable_or_not if func in _VALUES_ALONE else composite, func)


def _differentiable_or_not(func: Any, a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    differentiated = torch.is_grad_enabled() and a.requires_grad
    plain = type(a) in (Tensor, torch.nn.Parameter) and not is_wrapped(a)
    if differentiated or not plain or tangent_of(a) is not None:
        result: Tensor = composite(func, a, *args, **kwargs)
        return result
    return _VALUES_ALONE[func](a, *args, **kwargs)


def compute_values_alone() -> Callable[[], None]:
    """Make these operators decide as they do without a mode; return a function that ends this."""
    library = torch.library.Library("aten", "IMPL")
    for func in _VALUES_ALONE:
        library.impl(func, composite_kernel(func), "AutogradCPU")
    return functools.partial(remove_kernels, library)

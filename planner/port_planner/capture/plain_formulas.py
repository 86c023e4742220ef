"""Gradients by the formulas that plain PyTorch uses, while a step is recorded.

`areAnyTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) is true under any dispatch mode, including a recorder. Some
nodes of autograd's graph then use a formula that is valid for every operand, while plain PyTorch inspects the operand
and uses another formula with different last digits. That formula is also recorded, with a choice between the two by the
same test. If the gradients themselves are differentiated, the result of the test is read and guarded instead, because
the unused formula must not be in that graph.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from port_planner.torch_compat.autograd import (
    ENGINE,
    NODES_THAT_ASK_FOR_MODES,
    differs_under_modes,
    is_wrapped,
    nodes_behind,
    saved_arguments,
    saved_as_they_were,
)
from port_planner.torch_compat.modes import current_modes

Gradients: TypeAlias = tuple[Tensor | None, ...]
Formula: TypeAlias = Callable[[Mapping[str, Any], Tensor, Gradients], Gradients | None]
"""Returns plain PyTorch's gradients from a node's saved tensors, its incoming gradient, and its gradients by the other
formula; None if it cannot.
"""


@contextmanager
def plain_formulas() -> Iterator[set[str]]:
    """Make backward passes in the block, including those inside the loss, give plain PyTorch's gradients under active
    modes.

    Yields a set that collects the names of nodes that may have given different gradients.
    """
    others, modes = set[str](), len(current_modes())
    original = getattr(torch.autograd, ENGINE)

    def backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        own_mode = len(current_modes()) > modes  # plain PyTorch also uses those other formulas under one
        asking = () if own_mode else (n for n in nodes_behind(roots) if n.name() in NODES_THAT_ASK_FOR_MODES)
        nodes = [_PlainNode(node, others) for node in asking]
        try:
            return original(roots, *args, **kwargs)
        finally:
            for node in nodes:
                node.close()

    setattr(torch.autograd, ENGINE, backward)
    try:
        yield others
    finally:
        setattr(torch.autograd, ENGINE, original)


class _PlainNode:
    """A node whose gradients become plain PyTorch's when it ends; its name goes to `others` if that is not possible."""

    def __init__(self, node: Node, others: set[str]) -> None:
        self._node, self._others = node, others
        self._saved: dict[str, Any] | None = None
        self._hooks = node.register_prehook(self._begin), node.register_hook(self._end)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, gradients: Gradients) -> None:
        name, kept = self._node.name(), list(saved_as_they_were(self._node))
        saved = [one.data for one in kept if isinstance(one.data, Tensor)]
        if not differs_under_modes(self._node, saved, gradients):
            return
        hooked = any(one.unpack_hook is not None for one in kept)  # they may return what they packed only once
        if name not in _FORMULAS or hooked or any(is_wrapped(t) for t in (*saved, *gradients) if t is not None):
            self._others.add(name)
            return
        self._saved = saved_arguments(self._node)

    def _end(self, made: Gradients, given: Gradients) -> Gradients | None:
        saved, self._saved = self._saved, None
        if saved is None or given[0] is None:
            return None
        gradients = _FORMULAS[self._node.name()](saved, given[0], made)
        if gradients is None:
            self._others.add(self._node.name())
        return gradients


def _of_product(saved: Mapping[str, Any], grad: Tensor, made: Gradients) -> Gradients:
    """Handle `prod_backward` of a product over everything: no zero, one zero, or several, in which
    case no derivative remains.
    """
    operand, (by_zeros,) = saved["self"], made
    if not operand.dim() or by_zeros is None:
        return made
    zeros = (operand == 0).sum()
    without = _chosen(zeros > 1, lambda: torch.zeros_like(operand), lambda: by_zeros)
    return (_chosen(zeros == 0, lambda: grad * (saved["result"] / operand).conj(), lambda: without),)


def _of_products(saved: Mapping[str, Any], grad: Tensor, made: Gradients) -> Gradients:
    """Handle `prod_backward` of products along a dimension."""
    operand, result, dim = saved["self"], saved["result"], saved["dim"]
    (by_zeros,) = made
    if not operand.dim() or by_zeros is None:
        return made
    if not saved["keepdim"]:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    return (_chosen((operand == 0).any(), lambda: by_zeros, lambda: grad * (result / operand).conj()),)


def _of_running_products(saved: Mapping[str, Any], grad: Tensor, made: Gradients) -> Gradients | None:
    """Handle `cumprod_backward` without zeros.

    Plain PyTorch's other formula does not consist of operators, and a guard excludes it.
    """
    operand, result, dim = saved["self"], saved["result"], saved["dim"]
    if not operand.dim() or operand.numel() <= 1 or operand.shape[dim] == 1 or made[0] is None:
        return made
    if (operand == 0).any().item():
        return None
    return ((result.conj() * grad).flip(dim).cumsum(dim).flip(dim) / operand.conj(),)


def _of_filling(saved: Mapping[str, Any], grad: Tensor, made: Gradients) -> Gradients:
    """Handle `masked_fill_backward` for the fill value."""
    rest, filled = made
    return made if filled is None else (rest, grad.masked_select(saved["mask"]).sum())


def _chosen(condition: Tensor, one: Callable[[], Tensor], other: Callable[[], Tensor]) -> Tensor:
    """Return `one` if a condition on a whole operand holds, otherwise `other`."""
    if torch.is_grad_enabled():
        return one() if condition.item() else other()
    return torch.where(condition, one(), other())


_FORMULAS: Mapping[str, Formula] = {
    "CumprodBackward0": _of_running_products,
    "MaskedFillBackward1": _of_filling,
    "ProdBackward0": _of_product,
    "ProdBackward1": _of_products,
}

"""Run those nodes of autograd's graph without a dispatch mode whose formulas depend on whether one is on.

`areAnyTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) is true under any mode, and the gradients named here are
then computed by other formulas, with different last digits: `prod` does not divide its result by the item,
`masked_fill` also adds zeros. Before such a node its saved tensors and gradients are made resident and memory is freed;
it runs without the mode; afterwards the mode is restored. If the program has a mode of its own, plain PyTorch also uses
those other formulas, and nothing is done.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.dispatch.tangents import tangent_of
from port_agent.intercept.residency.operands import tensors_in
from port_agent.intercept.residency.refusals import unsupported
from port_planner.torch_compat.autograd import (
    NODES_THAT_ASK_FOR_MODES,
    differs_under_modes,
    forward_differentiating,
    is_batch,
    is_wrapped,
    nodes_behind,
    saved_as_they_were,
    saved_as_used,
    unwrap_if_dead,
)
from port_planner.torch_compat.modes import current_modes, pop_mode, push_mode

_WORKSPACE = 6
"""Memory of a node as a multiple of its operands: `prod_safe_zeros_backward` makes two chains of three."""


@contextlib.contextmanager
def running_whole(interceptor: Interceptor, roots: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
    """Run such nodes without the mode in backward passes from these roots within the block."""
    if len(current_modes()) != 1:
        yield
        return
    nodes = [_WholeNode(interceptor, node) for node in nodes_behind(roots) if node.name() in NODES_THAT_ASK_FOR_MODES]
    try:
        yield
    finally:
        for node in nodes:
            node.close()


class _WholeNode:
    """A node that runs without the mode."""

    def __init__(self, interceptor: Interceptor, node: Node) -> None:
        self._interceptor, self._node = interceptor, node
        self._running = contextlib.ExitStack()
        self._mode: Any = None
        self._hooks = node.register_prehook(self._begin), node.register_hook(self._end)

    def close(self) -> None:
        """Remove the hooks, and release what a failed node held; autograd has restored the mode itself."""
        for hook in self._hooks:
            hook.remove()
        self._running.close()

    def _begin(self, gradients: tuple[Tensor | None, ...]) -> None:
        saved = [unwrap_if_dead(t) for t in _saved_tensors(self._node)]
        if not differs_under_modes(self._node, saved, gradients):
            return
        operands = [*saved, *(g for g in gradients if g is not None)]
        if any(is_batch(t) or is_wrapped(t) for t in operands):
            raise unsupported(
                f"the gradients of {self._node.name()} for a batch of gradients have different last digits while "
                "operators are intercepted",
                "ask for them one by one (is_grads_batched=False, vectorize=False), or run the program without a budget",
            )
        operands += _tangents(self._node, gradients)
        need_bytes = _WORKSPACE * sum(t.nbytes for t in operands)
        self._running.enter_context(self._interceptor.working_on(operands, need_bytes, self._node.name()))
        self._mode = pop_mode()

    def _end(self, made: tuple[Tensor | None, ...], _: object) -> None:
        if self._mode is None:
            return
        push_mode(self._mode)
        self._mode = None
        self._running.close()
        for tensor in made:
            for one in (tensor, None if tensor is None else tangent_of(tensor)):
                if one is not None:
                    self._interceptor.meet(one)


def _saved_tensors(node: Node) -> Iterator[Tensor]:
    """Yield a node's saved tensors; yield nothing if they are gone, which autograd itself reports."""
    for one in saved_as_they_were(node):
        if one.unpack_hook is not None:
            raise unsupported(
                f"the gradient of {node.name()} has different last digits while operators are intercepted and saved "
                "tensors are hooked",
                "leave the operator out of checkpoints and of saved_tensors_hooks, or run the program without a budget",
            )
        if isinstance(one.data, Tensor):
            yield one.data


def _tangents(node: Node, gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Yield the tangents of a node's saved tensors, which are stored separately, and those of its gradients."""
    if not forward_differentiating():
        return
    for tensor in tensors_in((*saved_as_used(node), *gradients)):
        if (tangent := tangent_of(tensor)) is not None:
            yield tangent

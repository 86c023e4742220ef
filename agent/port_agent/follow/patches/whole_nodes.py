"""Nodes of autograd's graph whose formulas ask whether a dispatch mode is on: each runs without one, like one operator.

`areAnyTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) is true under any mode, and the gradients named here then come from
other formulas, with other last digits: `prod` does not divide its result by the item, `masked_fill` adds zeros, too. Before such
a node what it saved and its gradients are brought and room is made; it runs without the mode; after it all is as before. Where the
program has a mode of its own, plain PyTorch takes those other formulas, too, and nothing is done.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from port_agent.follow.mode import Follower
from port_agent.follow.operands import tensors_in
from port_agent.follow.patches.refusals import not_followed
from port_agent.follow.patches.tangents import forward_differentiating, tangent_of

_NODES = frozenset({
    "CumprodBackward0", "LinalgDetBackward0", "LinalgEigBackward0", "LinalgEighBackward0", "MaskedFillBackward1",
    "OrmqrBackward0", "ProdBackward0", "ProdBackward1",
})  # fmt: skip
_ASK_WHAT_IS_SAVED = frozenset({"ProdBackward0", "ProdBackward1"})
"""Those whose formula asks this of their operand alone, the others of their gradients, too."""
_WORKSPACE = 6
"""Times its operands that a node takes: `prod_safe_zeros_backward` makes two chains of three."""
_SAVED, _UNPACKED = "_raw_saved_", "_saved_"
"""How the names of a node's saved tensors begin, as they were saved and as it will use them."""


@contextlib.contextmanager
def running_whole(follower: Follower, roots: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
    """Run such nodes without the mode in a backward pass from these roots inside the block."""
    if len(_get_current_dispatch_mode_stack()) != 1:
        yield
        return
    nodes = [_WholeNode(follower, node) for node in _graph(roots) if node.name() in _NODES]
    try:
        yield
    finally:
        for node in nodes:
            node.close()


class _WholeNode:
    """A node that is kept from the mode while it runs."""

    def __init__(self, follower: Follower, node: Node) -> None:
        self._follower, self._node = follower, node
        self._running = contextlib.ExitStack()
        self._mode: Any = None
        self._hooks = node.register_prehook(self._begin), node.register_hook(self._end)

    def close(self) -> None:
        """Take the hooks away, and let go what a node held that failed: autograd has put the mode back itself."""
        for hook in self._hooks:
            hook.remove()
        self._running.close()

    def _begin(self, gradients: tuple[Tensor | None, ...]) -> None:
        saved = [functorch.unwrap_if_dead(t) for t in _saved_tensors(self._node)]
        operands = [*saved, *(g for g in gradients if g is not None)]
        batched = any(map(functorch.is_legacy_batchedtensor, operands))
        asked = saved if self._node.name() in _ASK_WHAT_IS_SAVED else operands
        if not batched and any(map(functorch.is_functorch_wrapped_tensor, asked)):
            return  # plain PyTorch takes those other formulas for what `torch.func` wraps, too
        if batched or any(map(functorch.is_functorch_wrapped_tensor, operands)):
            raise not_followed(
                f"the gradients of {self._node.name()} for a batch of gradients have other last digits while operators are followed",
                "ask for them one by one (is_grads_batched=False, vectorize=False), or run the program without a budget",
            )
        operands += _tangents(self._node, gradients)
        need_bytes = _WORKSPACE * sum(t.nbytes for t in operands)
        self._running.enter_context(self._follower.working_on(operands, need_bytes, self._node.name()))
        self._mode = _pop_mode()

    def _end(self, made: tuple[Tensor | None, ...], _: object) -> None:
        if self._mode is None:
            return
        _push_mode(self._mode)
        self._mode = None
        self._running.close()
        for tensor in made:
            for one in (tensor, None if tensor is None else tangent_of(tensor)):
                if one is not None:
                    self._follower.meet(one)


def _graph(roots: Sequence[Tensor | GradientEdge]) -> Iterator[Node]:
    waiting = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += (before for before, _ in node.next_functions)


def _saved_tensors(node: Node) -> Iterator[Tensor]:
    """Give what a node saved; nothing where that is gone, which autograd says itself."""
    for name in dir(node):
        saved = getattr(node, name) if name.startswith(_SAVED) else ()
        for one in saved if isinstance(saved, tuple) else (saved,):
            if one.unpack_hook is not None:
                raise not_followed(
                    f"the gradient of {node.name()} has other last digits while operators are followed and saved tensors are hooked",
                    "leave the operator out of checkpoints and of saved_tensors_hooks, or run the program without a budget",
                )
            if isinstance(one.data, Tensor):
                yield one.data


def _tangents(node: Node, gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Give the tangents of what a node saved, which are kept apart, and of its gradients."""
    if not forward_differentiating():
        return
    saved = [getattr(node, name) for name in dir(node) if name.startswith(_UNPACKED)]
    for tensor in tensors_in((*saved, *gradients)):
        if (tangent := tangent_of(tensor)) is not None:
            yield tangent

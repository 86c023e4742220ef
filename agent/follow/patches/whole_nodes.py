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
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from agent.follow.mode import Follower
from agent.follow.patches.refusals import not_followed

_NODES = frozenset({
    "CumprodBackward0", "LinalgDetBackward0", "LinalgEigBackward0", "LinalgEighBackward0", "MaskedFillBackward1",
    "OrmqrBackward0", "ProdBackward0", "ProdBackward1",
})  # fmt: skip
_WORKSPACE = 6
"""Times its operands that a node takes: `prod_safe_zeros_backward` makes two chains of three."""
_SAVED = "_raw_saved_"
"""How the names of a node's saved tensors begin."""


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
        operands = [*_saved_tensors(self._node), *(g for g in gradients if g is not None)]
        need_bytes = _WORKSPACE * sum(t.nbytes for t in operands)
        self._running.enter_context(self._follower.working_on(operands, need_bytes, self._node.name()))
        self._mode = _pop_mode()

    def _end(self, made: tuple[Tensor | None, ...], _: object) -> None:
        _push_mode(self._mode)
        self._running.close()
        for tensor in made:
            if tensor is not None:
                self._follower.meet(tensor)


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

"""Autograd's graph: names of its nodes, what they saved, tangents, and the wrappers of `torch.func`."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node

from port_planner.torch_compat.parts import require, use_part, uses

ENGINE = "_engine_run_backward"
"""Functions that backward() and grad() of `torch.autograd` call for the pass itself, looked up there each time."""

NODES_THAT_ASK_FOR_MODES = {
    "CumprodBackward0": "aten::cumprod", "LinalgDetBackward0": "aten::_linalg_det", "LinalgEigBackward0": "aten::linalg_eig",
    "LinalgEighBackward0": "aten::_linalg_eigh", "MaskedFillBackward1": "aten::masked_fill.Tensor", "OrmqrBackward0": "aten::ormqr",
    "ProdBackward0": "aten::prod", "ProdBackward1": "aten::prod.dim_int",
}  # fmt: skip
"""Operators that create nodes whose formula asks `areAnyTensorSubclassLike`.

It is true under any mode, and the node then uses another formula.
"""
ASK_WHAT_IS_SAVED = frozenset({"ProdBackward0", "ProdBackward1"})
"""Nodes whose formula asks this only about their operand; the others also ask it about their gradients."""

_SAVED, _UNPACKED = "_raw_saved_", "_saved_"
"""Prefixes of a node's saved tensors: as they were saved, and as it will use them."""

is_batch: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""Tests for wrappers of `torch.func`, in this order: a batch of gradients (is_grads_batched), any wrapper, and one
whose level has ended."""


SAVED_TENSORS = "saved_tensors"
"""Attribute by which the backward pass of a program's own function asks for what its forward pass saved."""


@uses(
    "torch._C._FunctionBase.saved_tensors",
    "kernels in C++ of a program's own functions find nothing of a GPU's that was evicted",
)
def saved_tensors(context: Any) -> tuple[Tensor, ...]:
    """Return what the context of a program's own function saved."""
    found: tuple[Tensor, ...] = torch._C._FunctionBase.saved_tensors.__get__(context)  # type: ignore[attr-defined]
    return found


def differs_under_modes(node: Node, saved: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> bool:
    """Return whether a node of `NODES_THAT_ASK_FOR_MODES` uses another formula under a mode than without one.

    If `torch.func` wraps a tensor, the node uses that formula anyway; for a batch of gradients (is_grads_batched) it never does.
    """
    operands = [*saved, *(g for g in gradients if g is not None)]
    asked = saved if node.name() in ASK_WHAT_IS_SAVED else operands
    return any(map(is_batch, operands)) or not any(map(is_wrapped, asked))


def nodes_behind(roots: Iterable[Tensor | GradientEdge]) -> Iterator[Node]:
    """Yield the nodes of the graph that a backward pass from these roots may run, each once."""
    waiting = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += (before for before, _ in node.next_functions)


def saved_as_they_were(node: Node) -> Iterator[Any]:
    """Yield what a node saved, each with `data` and the `unpack_hook` that a program may have set."""
    for name in dir(node):
        saved = getattr(node, name) if name.startswith(_SAVED) else ()
        yield from saved if isinstance(saved, tuple) else (saved,)


def saved_as_used(node: Node) -> list[Any]:
    """Return what a node saved, in the form that its formula will use."""
    return [getattr(node, name) for name in dir(node) if name.startswith(_UNPACKED)]


def saved_arguments(node: Node) -> dict[str, Any]:
    """Return what a node saved, in the form that its formula will use, by argument name; dimensions as torch counts them."""
    found = {name.removeprefix(_UNPACKED): getattr(node, name) for name in dir(node) if name.startswith(_UNPACKED)}
    return {name: _signed(value) if type(value) is int else value for name, value in found.items()}


def _signed(number: int) -> int:
    """Return as signed a number that autograd reports as unsigned."""
    return number - (1 << 64) if number >> 63 else number


@uses("torch.autograd.forward_ad._current_level", "tangents of norms and prod have other last digits without an error")
def forward_differentiating() -> bool:
    """Return whether the program is inside a level of forward-mode differentiation."""
    return forward_ad._current_level >= 0


@uses("torch.Tensor._version", "what was saved on the host is not told from what came after it in the same memory")
def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written, according to autograd."""
    return int(tensor._version)


class LinesOfNodes:
    """The lines of a program that made the nodes of autograd's graph, by the numbers that nodes have in the order of creation."""

    def __init__(self, program_line: Callable[[str], str]) -> None:
        """`program_line`: returns the program's line inside calls of the function with this name, of all if it is ""."""
        self._program_line = program_line
        self._numbers: list[int] = []
        self._lines: list[str] = []

    def note(self) -> None:
        """Record the line of the program that made the nodes since the last note, if there are any; for a mode's calls."""
        number = _nodes_made()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._lines.append(self.line())

    def line(self) -> str:
        """Return the program's line, or in a backward pass the line that made the node whose formula runs; "" if unknown."""
        number = _number_of_running_node()
        own = self._program_line("" if number is None else ENGINE)
        if number is None or own:
            return own
        at = bisect_right(self._numbers, number)
        return self._lines[at] if at < len(self._numbers) else ""


@uses("torch._C._autograd._get_sequence_nr", "refusals name no line for the backward pass")
def _nodes_made() -> int:
    """Return how many nodes this thread has made."""
    return int(torch._C._autograd._get_sequence_nr())


def _numbers_of_nodes_are_as_known() -> None:
    found: list[int | None] = []
    x = torch.ones(1, requires_grad=True)
    before = _nodes_made()
    y = x * 2
    y.register_hook(lambda _: found.append(_number_of_running_node()))
    (y * 3).sum().backward()
    require(_nodes_made() == before + 3, "nodes are numbered in another way")
    require(found in ([before], [before + 1]), "the running node has another number")


@uses(
    "torch._C._current_autograd_node, torch.autograd.graph.Node._sequence_nr",
    "refusals name no line for the backward pass",
    _numbers_of_nodes_are_as_known,
)
def _number_of_running_node() -> int | None:
    """Return how many nodes this thread had made before the node that runs; None if none runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def _hooks_on_gradients_are_seen() -> None:
    leaf = torch.zeros(1, requires_grad=True)
    registers: tuple[Callable[..., Any], ...] = (leaf.register_hook, leaf.register_post_accumulate_grad_hook)
    for register in registers:
        handle = register(lambda _: None)
        require(has_gradient_hooks(leaf), "hooks on gradients are kept elsewhere")
        handle.remove()
        require(not has_gradient_hooks(leaf), "removed hooks on gradients are kept")


@uses(
    "torch.Tensor._backward_hooks, _post_accumulate_grad_hooks",
    "a board silently trains without what a hook does to a gradient",
    _hooks_on_gradients_are_seen,
)
def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that run when its gradient is computed, or when it has been accumulated."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _nodes_are_as_known() -> None:
    x, one = torch.eye(2, requires_grad=True), torch.ones(())
    results = (
        *(x.cumprod(0), torch.linalg.det(x), torch.linalg.eig(x)[0], torch.linalg.eigh(x)[0], x.prod(), x.prod(0)),
        *(x.masked_fill(torch.eye(2) > 0, one.requires_grad_()), torch.ormqr(x, torch.ones(2), torch.eye(2))),
    )
    nodes = [node for node in (result.grad_fn for result in results) if node is not None]
    other = {node.name() for node in nodes} ^ NODES_THAT_ASK_FOR_MODES.keys()
    require(not other, f"nodes have other names: {', '.join(sorted(other))}")
    for node in nodes:
        saved = list(saved_as_they_were(node))
        readable = saved_as_used(node) and all(hasattr(one, "unpack_hook") and hasattr(one, "data") for one in saved)
        require(saved and readable, f"what {node.name()} saved cannot be read")


use_part(
    f"autograd's names of nodes, {_SAVED} and {_UNPACKED}",
    "formulas that ask whether a mode is on run without it, beside what they saved",
    "gradients of prod, cumprod, det, eig, eigh, masked_fill and ormqr have other last digits without an error",
    _nodes_are_as_known,
)
use_part(f"torch.autograd.{ENGINE}", "its end ends a segment", "steps are not recognised, nothing is planned")
for _name in ("is_legacy_batchedtensor", "is_functorch_wrapped_tensor", "unwrap_if_dead"):
    use_part(f"torch._C._functorch.{_name}", "formulas differ for what `torch.func` wraps", "following cannot begin")

"""Check an imported graph against its module, which is traced, run on samples and compared.

However the importer interprets a layer, a graph whose results differ from the module's is rejected. The error names the
first node at which the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx, nn

from port_planner.mcu.ir import Graph, McuCompileError
from port_planner.mcu.quantize import run_float
from port_planner.mcu.torch_axes import TorchAxes

TOLERANCE = 1e-3
"""Relative to a tensor's largest value: a quarter of an int8 step. Folding a batch norm in fp32 stays below it."""
CHUNK_SAMPLES = 64


def node_place(node: fx.Node) -> str:
    """Return where a node is in the module: a layer's path, or a function and the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.name))
    inside = list(node.meta.get("nn_module_stack", ()))
    return f"{name} in {inside[-1]}" if inside else name


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a module and its submodules to eval mode without gradients; restore each afterwards."""
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for inner, training in modes:
            inner.training = training


def refuse_parameters(module: nn.Module) -> None:
    """Raise McuCompileError for parameters that are not float32, and for different ones that share memory.

    Where PyTorch changes both at once, such as a weight that is the transpose of another, a
    board would train two copies.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise McuCompileError(name, f"it is of type {kind}", "convert the module to float32: module.float()")
    trained = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
    for number, (name, tensor) in enumerate(trained):
        for earlier, other in trained[:number]:
            if _overlap(tensor, other):
                raise McuCompileError(
                    name,
                    f"it shares its memory with {earlier}; on a board the two copies would be trained separately",
                    "give it memory of its own, or train neither: requires_grad_(False)",
                )


def shared_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of a module's state_dict that stand for one tensor, together."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the memory of two tensors overlaps."""
    begins = left.data_ptr(), right.data_ptr()
    ends = [begin + tensor.element_size() * _reach(tensor) for begin, tensor in zip(begins, (left, right), strict=True)]
    return begins[0] < ends[1] and begins[1] < ends[0]


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


class PlacedGraph(fx.GraphModule):
    """A graph of torch layers made by a front end other than torch.fx; its nodes tell their place in the source."""


def trace_module(module: nn.Module, name: str) -> fx.GraphModule:
    """Return the traced module.

    Raises McuCompileError if its control flow depends on values, if torch cannot trace it, or if
    it is one layer by itself.
    """
    if isinstance(module, PlacedGraph):
        return module
    if fx.Tracer().is_leaf_module(module, name):
        kind = type(module).__name__
        raise McuCompileError(
            name,
            f"{kind} is one layer by itself, without a name in a state_dict",
            f"wrap it: nn.Sequential({kind}(...))",
        )
    try:
        return fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, NameError) as error:
        first_line = str(error).partition("\n")[0]
        raise McuCompileError(
            name, f"cannot be traced ({first_line})", "remove control flow on tensor values"
        ) from error


class NodeRun(fx.Interpreter):
    """One run of a traced module that keeps a copy of every node's result."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # fx would add it to this project's own error messages
        self.results: dict[fx.Node, object] = {}

    def run_node(self, n: fx.Node) -> object:
        """Run a node and keep a copy of its result, which a later node may change in place.

        Raises McuCompileError if torch rejects the node's inputs.
        """
        try:
            result = super().run_node(n)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            shapes = [
                list(self.env[source].shape) for source in n.all_input_nodes if hasattr(self.env[source], "shape")
            ]
            first_line = str(error).partition("\n")[0]
            raise McuCompileError(
                node_place(n), f"torch rejects its inputs {shapes} ({first_line})", "check the shape of the samples"
            ) from error
        self.results[n] = result.clone() if isinstance(result, torch.Tensor) else result
        return result


def run_nodes(traced: fx.GraphModule, samples: torch.Tensor) -> dict[fx.Node, object]:
    """Return the result of every node of a traced module for samples [N, ...].

    Raises McuCompileError, with the layer, if torch rejects its inputs.
    """
    run = NodeRun(traced)
    run.run(samples.clone())
    return run.results


def logits_node(output: fx.Node) -> fx.Node:
    """Return the node with the logits: the input of a softmax at the end of a module, or the end itself."""
    owner = output.graph.owning_module
    layer = owner.get_submodule(str(output.target)) if owner is not None and output.op == "call_module" else None
    function = getattr(output.target, "__name__", output.target) if layer is None else ""
    if isinstance(layer, nn.Softmax | nn.LogSoftmax) or function in ("softmax", "log_softmax"):
        return output.all_input_nodes[0]
    return output


def refuse_difference(
    module: nn.Module,
    traced: fx.GraphModule,
    graph: Graph,
    values: Mapping[fx.Node, tuple[str, TorchAxes]],
    samples: torch.Tensor,
) -> None:
    """Raise McuCompileError, with the first node that differs, unless graph and module agree on `samples`.

    `values`: the nodes that stand for a tensor in its op's final form, and its axes as torch sees them.
    """
    (output,) = traced.graph.output_node().all_input_nodes
    logits = logits_node(output)
    last, axes = values[logits]
    for chunk in samples.split(CHUNK_SAMPLES):
        expected, tensors = run_nodes(traced, chunk), run_float(graph, chunk)
        for node, (name, seen) in values.items():
            _refuse_node(node_place(node), expected[node], seen.as_torch(tensors[name]))
        answer, found = module(chunk.clone()), axes.as_torch(tensors[last])
        if logits is not output and isinstance(answer, torch.Tensor):
            found = softmax_as(answer, found)
        _refuse_node("output", answer, found)


def softmax_as(answer: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Apply the softmax at the end of a module to logits; a logarithmic softmax has no positive results."""
    return logits.softmax(1) if float(answer.detach().max()) > 0 else logits.log_softmax(1)


def _refuse_node(place: str, expected: object, found: torch.Tensor) -> None:
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        shape = list(expected.shape) if isinstance(expected, torch.Tensor) else type(expected).__name__
        raise McuCompileError(
            place, f"the compiled network has {list(found.shape)}, the module {shape}", "write this part in another way"
        )
    difference, peak = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= TOLERANCE * peak + TOLERANCE**3:
        raise McuCompileError(
            place,
            f"the compiled network differs from the module here by {difference:.3g}, with values up to {peak:.3g}",
            "write this part in another way",
        )

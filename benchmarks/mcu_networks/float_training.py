"""The same sparse update in fp32 PyTorch: the yardstick for the int8 rules.

Batch 1, plain SGD, batch norm folded, exactly the scheme's parameters: what the firmware does, without quantisation.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from port_planner.mcu.autodiff import SparseScheme
from port_planner.mcu.ir import WEIGHTED, Graph, KernelCall
from port_planner.mcu.quantize import float_op, torch_weight, weights_of


class FloatSparseModel:
    """A float graph in which the scheme's parameters learn; rows that the scheme freezes stay exactly as they were."""

    def __init__(self, graph: Graph, scheme: SparseScheme) -> None:
        self.graph = graph
        self.scheme = scheme
        self.trained: dict[str, torch.Tensor] = {}
        self.frozen: dict[str, torch.Tensor] = {}
        self.bias: dict[str, torch.Tensor] = {}
        for op in graph.weighted():
            weight, bias = weights_of(op)
            update = scheme.of(op.name)
            full = torch_weight(op, weight).contiguous().clone()
            self.trained[op.name] = full[: update.rows].clone().requires_grad_(update.rows > 0)
            self.frozen[op.name] = full[update.rows :].clone()
            self.bias[op.name] = torch.from_numpy(bias.copy()).requires_grad_(update.bias)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The tensors that learn."""
        return [p for p in (*self.trained.values(), *self.bias.values()) if p.requires_grad]

    def logits(self, samples: torch.Tensor) -> torch.Tensor:
        """Return logits [N, classes] of samples [N, C, H, W] or [N, C, W]."""
        shape = self.graph.input_shape
        tensors = {self.graph.input_name: samples.reshape(-1, shape.channels, shape.height, shape.width)}
        for op in self.graph.ops:
            tensors[op.name] = self._run(op, [tensors[name] for name in op.inputs])
        return tensors[self.graph.ops[-1].name].flatten(1)

    def _run(self, op: KernelCall, inputs: list[torch.Tensor]) -> torch.Tensor:
        if op.kind not in WEIGHTED:
            return float_op(op, inputs)
        weight = torch.cat([self.trained[op.name], self.frozen[op.name]])
        return float_op(op, inputs, (weight, self.bias[op.name]))

    def train(
        self, inputs: NDArray[np.float32], labels: NDArray[np.int64], order: NDArray[np.int64], learning_rate: float
    ) -> float:
        """Train on samples one by one in `order`; return the mean loss in nats."""
        data, targets = torch.from_numpy(inputs), torch.from_numpy(labels)
        total = 0.0
        for index in order.tolist():
            loss = F.cross_entropy(self.logits(data[index : index + 1]), targets[index : index + 1])
            gradients = torch.autograd.grad(loss, self.parameters)
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=learning_rate)
            total += float(loss.detach())
        return total / max(1, len(order))

    def accuracy(self, inputs: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Return the share of samples classified right."""
        with torch.no_grad():
            predicted = self.logits(torch.from_numpy(inputs)).argmax(1).numpy()
        return float((predicted == labels).mean())

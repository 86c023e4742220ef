"""Run operator by operator on the CPU alone, a recorded step gives plain PyTorch's numbers."""

import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare.placement.eager import EagerStep, eager_contents
from port_planner.capture.step import Fill, capture_step
from port_planner.ir.device_kinds import CPU
from port_planner.ir.lowering.optimizer_scalars import StepScalars
from tests.agent.exactness import OPTIMIZERS, bits, plain


def test_all_on_the_cpu_it_is_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    loss = lambda m, x, y: functional.cross_entropy(m(x), y)  # noqa: E731
    batches = [(torch.randn(5, 8), torch.randint(0, 3, (5,))) for _ in range(3)]
    expected = plain(model, loss, OPTIMIZERS["adamw"], batches)
    capture = capture_step(model, loss, OPTIMIZERS["adamw"](model.parameters()), batches[0])
    assert capture.optimizer is not None
    graph, scalars = capture.graphs["step"], StepScalars(capture.optimizer)
    tensors = {
        k: torch.full(t.shape, t.value, dtype=getattr(torch, t.dtype)) if isinstance(t, Fill) else t
        for k, t in capture.tensors.items()
    }
    step = EagerStep(graph, [CPU] * len(graph.ops), eager_contents(tensors))
    torch.manual_seed(0)
    assert [bits(step.run(b, scalars.advance())) for b in batches] == [bits(one) for one in expected.losses]
    for key, tensor in expected.contents.items():
        assert bits(step.contents[key])[: tensor.numel() * tensor.itemsize] == bits(tensor), key

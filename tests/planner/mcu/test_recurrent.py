"""Recurrent layers as they are written: what is imported, what is refused by name, and what less memory changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, compile_model, last_layers
from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, StepKind, training_program
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import choose_channels, recompile
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, McuCompileError, OpKind
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.quantize import run_float
from tests.planner.mcu.networks import recurrent

Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A layer of 6 features and 8 values of state, what a test reads of it, and three classes."""

    def __init__(self, forward: Forward, features: int = 6, outputs: int = 8, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.fc = nn.GRU(features, 8, **{"batch_first": True} | options), nn.Linear(outputs, 3)
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm1d(8)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        self.read = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, x)


def of_last(view: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    return lambda m, x: m.fc(view(m.gru(x)[1]))


def of_states(view: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    return lambda m, x: m.fc(view(m.gru(x)[0]))


def imported(module: nn.Module, shape: tuple[int, ...]) -> Graph:
    """Return the graph, which computes what the module computes."""
    module.eval()
    graph, data = import_module(module, shape), torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = run_float(graph, data)[graph.ops[-1].name].flatten(1)
        torch.testing.assert_close(found, module(data), rtol=1e-4, atol=1e-5)
    return graph


STEPS = (12, 6)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Net(of_last(lambda h: h[-1])), STEPS),
        (Net(of_last(lambda h: h.squeeze(0)), bias=False), STEPS),
        (Net(of_last(lambda h: h.transpose(0, 1).flatten(1))), STEPS),
        (Net(of_last(lambda h: h.mean(0))), STEPS),
        (Net(of_states(lambda y: y[:, -1])), STEPS),
        (Net(of_states(lambda y: y[:, 3, :])), (5, 6)),
        (Net(of_states(lambda y: y.mean(1))), STEPS),
        (Net(of_states(lambda y: y.flatten(1)), outputs=96), STEPS),
        (Net(of_states(lambda y: y.relu()[:, -1]), features=1), (4, 1)),
        (Net(lambda m, x: m.fc(m.norm(m.gru(x)[0].transpose(1, 2)).mean(2))), STEPS),
        (Net(lambda m, x: m.fc(m.gru(x.transpose(1, 2))[0].mean(1))), (6, 12)),
        (Net(lambda m, x: m.fc(m.gru(x.squeeze(1))[1][0])), (1, 9, 6)),
        (Net(lambda m, x: m.fc(m.gru(x.squeeze(1).transpose(1, 2))[1][0])), (1, 6, 9)),
        (Net(lambda m, x: m.fc(m.gru(m.conv(x).permute(0, 3, 1, 2).flatten(2))[1][0]), 10), (1, 5, 7)),
        (Net(lambda m, x: m.fc(m.gru(m.conv(x).permute(0, 2, 1, 3).flatten(2))[1][0]), 14), (1, 5, 7)),
        (Net(lambda m, x: m.fc(m.gru(m.conv(x).permute(0, 2, 3, 1).flatten(2))[1][0]), 14), (1, 5, 7)),
    ],
)
def test_a_layer_is_what_the_module_computes(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Wherever its steps come from, and whatever is read of its states."""
    assert [op.kind for op in imported(module, shape).ops].count(OpKind.GRU) == 1


def test_names_are_those_of_the_state_dict_and_a_function_behind_stays_outside() -> None:
    graph = imported(Net(of_states(lambda y: y.relu()[:, -1])), STEPS)
    origins = [op.origin for op in graph.ops if op.origin]
    assert [origin.weight for origin in origins] == ["gru.weight_ih_l0", "gru.weight_hh_l0", "fc.weight"]
    assert [origin.bias for origin in origins] == ["gru.bias_ih_l0", "gru.bias_hh_l0", "fc.bias"]
    assert [op.name for op in graph.ops] == ["gru_ih", "gru_hh", "relu", "getitem_1", "fc"]


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (Net(of_last(lambda h: h[-1]), num_layers=2), "gru: 2 layers in one; use an nn.GRU for each"),
        (Net(of_last(lambda h: h[-1]), bidirectional=True), "gru: two directions; use bidirectional=False"),
        (Net(of_last(lambda h: h[-1]), batch_first=False), "gru: the batch as its second axis; use batch_first=True"),
        (Net(lambda m, x: m.fc(m.gru(x, x[:, 0, :1].unsqueeze(0).expand(1, -1, 8).contiguous())[1][0])), "unsqueeze"),
        (Net(of_last(lambda h: h.relu()[0])), r"relu: reads the last state .* as \[1, N, C\]; take h\[-1\] first"),
        (Net(of_last(lambda h: h.square().sum(0))), "square: reads the last state"),
        (Net(of_last(lambda h: h.norm(dim=0))), "norm: reads the last state"),
        (Net(lambda m, x: m.gru(x)), "output: gru is not a tensor"),
        (Net(lambda m, x: m.gru(x)[1]), "output: getitem is not a tensor"),
        (Net(lambda m, x: m.fc(m.gru(m.conv(x).flatten(2))[1][0]), 84), r"gru: its input .* is not \[N, steps, features\]"),
    ],
)  # fmt: skip
def test_what_a_board_cannot_run_is_refused_by_name(module: nn.Module, problem: str) -> None:
    shape = (1, 7, 12) if "conv" in problem or "its input" in problem else STEPS
    with pytest.raises(McuCompileError, match=problem):
        import_module(module.eval(), shape)


def test_weights_that_are_made_of_others_and_layers_used_twice_are_refused() -> None:
    module = Net(of_last(lambda h: h[-1]))
    parametrizations.weight_norm(module.gru, "weight_hh_l0")
    with pytest.raises(McuCompileError, match="gru: its weight is made of other parameters"):
        import_module(module.eval(), STEPS)
    graph = imported(Net(lambda m, x: m.fc(m.gru(x)[1][0] + m.gru(x * 0.5)[1][0])), STEPS)
    with pytest.raises(McuCompileError, match="gru_ih_2: the module uses the weights of gru_ih here as well"):
        training_program(graph, SparseScheme({"gru_ih": LayerUpdate(rows=24)}))


def test_gates_are_trained_together_or_not_at_all() -> None:
    graph = imported(Net(of_last(lambda h: h[-1])), STEPS)
    with pytest.raises(McuCompileError, match="gru_hh: cannot train 8 of 24 channels"):
        training_program(graph, SparseScheme({"gru_hh": LayerUpdate(rows=8)}))
    with pytest.raises(McuCompileError, match="gru_hh: a dynamic update chooses channels"):
        choose_channels(compiled(), 0.5)
    alone = training_program(graph, SparseScheme({"gru_hh": LayerUpdate(bias=True)}))
    assert [step.kind for step in alone.backward if step.op == "gru_hh"] == [StepKind.INPUT, StepKind.BIAS]
    head = training_program(graph, last_layers(graph, 1))
    assert {step.op for step in head.backward} == {"fc"}


def compiled() -> CompiledModel:
    rows = np.random.default_rng(1).normal(size=(24, *STEPS)).astype(np.float32)
    return compile_model(Net(of_last(lambda h: h[-1])).eval(), rows)


@pytest.mark.process
def test_less_memory_gives_the_same_bits() -> None:
    module, data = recurrent()[0], np.random.default_rng(1).normal(size=(12, 2, 8, 65)).astype(np.float32)
    kept = compile_model(module, data)
    inputs, labels, trained = kept.quantize_input(data), np.arange(len(data)) % 4, []
    less = FitOptions(kept.ram_bytes * 9 // 10), FitOptions(kept.ram_bytes * 8 // 10, page=PageMedium.PSRAM)
    for model in (kept, *(recompile(kept, limits)[0] for limits in less)):
        assert model is kept or model.memory.recomputed
        engine = HostEngine(model)
        engine.set_options(UpdateOptions(0.02))
        losses = engine.train_many(inputs, labels), engine.evaluate(inputs, labels)
        trained.append((losses, [engine.values(op.name) for op in model.quantized.graph.weighted()]))
    assert trained[0] == trained[1] == trained[2]


@pytest.mark.process
def test_a_slow_gate_moves_the_state_by_less_than_a_code() -> None:
    """An update gate of 0.999 moves the state by 1/1000 a step, an eighth of a code; after 200
    steps it has moved by 0.18.
    """
    module = Net(of_last(lambda h: h[-1]), features=1).eval()
    with torch.no_grad():
        for name, parameter in module.gru.named_parameters():
            parameter.zero_()
            if name == "bias_hh_l0":
                parameter[8:16] = float(np.log(999))
            elif name == "bias_ih_l0":
                parameter[16:] = 5.0
    data = np.random.default_rng(0).normal(size=(4, 200, 1)).astype(np.float32)
    model = compile_model(module, data)
    engine = HostEngine(model)
    with torch.no_grad():
        wanted, still = module(torch.from_numpy(data)).numpy(), module.fc(torch.zeros(1, 8)).numpy()
    found = np.stack([engine.infer(row)[1] for row in model.quantize_input(data)])
    assert np.abs(found - wanted).max() < 0.1 * np.abs(still - wanted).max()

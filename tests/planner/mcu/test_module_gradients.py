"""What the module trains, a board trains, with the module's gradients; all else is left alone, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, full_scheme, last_layers, training_program
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, McuCompileError
from port_planner.mcu.module_gradients import trained_as_module
from port_planner.mcu.schemes.contributions import analyse_contributions
from port_planner.mcu.torch_axes import TorchAxes
from tests.planner.mcu.networks import BUILDS, settled

SHAPE = (3, 6, 6)


class Net(nn.Module):
    """A convolution with a batch norm, one without a bias, a batch norm of its own, and a head."""

    def __init__(self, untracked: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.second, self.alone, self.head = nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(16, 3)
        self.untracked = untracked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.untracked):
            x = self.norm(self.first(x)).relu()
        x = self.alone(self.second(x).relu())
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits


@pytest.fixture
def net() -> Iterator[Net]:
    torch.manual_seed(0)
    yield cast(Net, settled(Net(), np.random.default_rng(0).normal(size=(32, *SHAPE)).astype(np.float32)))


def trained(graph: Graph) -> dict[str, tuple[bool, bool]]:
    """Return which layers train a weight and a bias in the full scheme."""
    return {name: (update.rows > 0, update.bias) for name, update in full_scheme(graph).updates.items()}


def test_a_bias_that_the_module_does_not_have_is_not_trained(net: Net) -> None:
    graph = import_module(net, SHAPE)
    assert trained(graph) == {name: (True, name != "second") for name in ("first", "second", "alone", "head")}
    assert not last_layers(graph, 3).of("second").bias and not graph.notes
    with pytest.raises(McuCompileError, match="second: the scheme trains its bias, but the module does not"):
        training_program(graph, SparseScheme({"second": LayerUpdate(True, 4)}))


def test_frozen_layers_stay_frozen(net: Net) -> None:
    net.first.requires_grad_(False)
    net.norm.weight.requires_grad_(False)
    net.alone.requires_grad_(False)
    graph = import_module(net, SHAPE)
    assert trained(graph) == {"first": (False, True), "second": (True, False), "head": (True, True)}
    assert graph.notes == ("not trained, because the module does not train them: alone",)
    with pytest.raises(McuCompileError, match="first: the scheme trains its weight, but the module does not"):
        training_program(graph, SparseScheme({"first": LayerUpdate(False, 1)}))
    assert not trained(import_module(net.requires_grad_(False), SHAPE))
    table = analyse_contributions(graph, lambda scheme, draws: [0.5 for _ in draws], ratios=(1.0,))
    assert [choice.layer for choice in table.weights] == ["second", "head"]
    assert table.predict(graph, full_scheme(graph)) == 0.5


def test_what_torch_does_not_track_is_not_trained() -> None:
    graph = import_module(Net(untracked=True).eval(), SHAPE)
    assert set(trained(graph)) == {"second", "alone", "head"}


@pytest.mark.parametrize("name", list(BUILDS))
def test_gradients_of_every_kernel_are_the_modules(name: str) -> None:
    module, data = BUILDS[name]()
    graph = import_module(module, data.shape[1:], samples=torch.from_numpy(data))
    assert all(op.trains_bias for op in graph.weighted())
    assert all(op.trains_weight for op in graph.weighted())


@pytest.mark.parametrize(
    ("layer", "refused"), [("head", r"norm\.bias"), ("second", r"norm\.bias"), ("alone", r"norm\.bias")]
)
def test_a_gradient_of_its_own_is_refused(net: Net, layer: str, refused: str) -> None:
    def scaled(
        layer: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor]:
        return (1.3 * inputs[0],)

    getattr(net, layer).register_full_backward_hook(scaled)
    with pytest.raises(
        McuCompileError, match=rf"{refused}: its gradient in the compiled network differs from the module.s by \d+%"
    ):
        import_module(net, SHAPE)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_parameter_is_refused(net: Net, kind: str) -> None:
    handle = getattr(net.second.weight, kind)(lambda gradient: None)
    with pytest.raises(
        McuCompileError, match=r"second\.weight: a hook is registered on its gradient.*handle\.remove\(\)"
    ):
        import_module(net, SHAPE)
    net.second.weight.requires_grad_(False)
    assert "second" not in trained(import_module(net, SHAPE))
    net.second.weight.requires_grad_(True)
    handle.remove()
    assert trained(import_module(net, SHAPE))["second"] == (True, False)


def test_the_graph_is_judged_whatever_made_it(net: Net) -> None:
    graph, samples = import_module(net, SHAPE), torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(1))
    logits = "head", TorchAxes.of(graph.ops[-1].out_shape, "C")
    assert trained(trained_as_module(net, graph, logits, False, samples)) == trained(graph)
    ops = [replace(op, bias=np.array(op.bias) - np.float32(0.3)) if op.name == "first" else op for op in graph.ops]
    with pytest.raises(McuCompileError, match="its gradient in the compiled network differs from the module"):
        trained_as_module(net, replace(graph, ops=tuple(ops)), logits, False, samples)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "derive",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_weights_that_are_made_of_others_are_refused(derive: Callable[[nn.Module], nn.Module]) -> None:
    layer = derive(nn.Conv2d(3, 4, 3))
    with pytest.raises(McuCompileError, match="0: its weight is made of other parameters"):
        import_module(nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), SHAPE)


def test_a_module_that_torch_cannot_train_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.first(x).sigmoid().mul_(2).flatten(1))
            return logits

    with pytest.raises(McuCompileError, match="module: torch cannot train it"):
        import_module(InPlace(), SHAPE)


def test_a_network_without_weights_is_refused() -> None:
    with pytest.raises(McuCompileError, match=r"^model: no layer has weights; give it one"):
        import_module(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Softmax(1)), (6,))

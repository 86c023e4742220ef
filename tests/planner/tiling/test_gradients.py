"""The halves of a convolution's backward pass: the same bits, fewer bytes at once, apart where that helps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import workload
from port_planner.capture.step import Capture, capture_step
from port_planner.exactness.replacements import differing
from port_planner.ir.graph import Ref, StepGraph, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.tiling.gradients import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    saved_bytes,
    split_gradients,
    split_gradients_by_mask,
)
from port_planner.tiling.rewriting import RewrittenGraph
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.planner.steps import tiny_step


class Convolutions(nn.Module):
    """Strides that leave rows over, groups, dilation, a transposed one, one whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, groups=4),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1),
            nn.Conv2d(6, 4, 3, dilation=2, padding=2),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1, stride=3),
        )
        self.layers[5].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def captured() -> tuple[Convolutions, Capture, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    model = Convolutions()
    batches: list[tuple[torch.Tensor, ...]] = [(torch.randn(4, 3, 33, 32),) for _ in range(2)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    capture = capture_step(model, lambda m, x: m(x), torch.optim.SGD(parameters, lr=0.1, momentum=0.9), batches[0])
    return model, capture, batches


def names(graph: StepGraph) -> list[str]:
    return [op.name for op in graph.ops]


def test_every_convolution_is_halved_and_the_graph_stays_one() -> None:
    _, capture, _ = captured()
    graph = capture.graphs["step"]
    rewritten = split_gradients(graph)
    verify_graph(rewritten.graph)
    verify_operands(rewritten.graph)
    assert len(rewritten.replacements) == 4  # the first one's input wants no gradient
    assert names(rewritten.graph).count(CONVOLUTION) == names(graph).count(CONVOLUTION) + 4
    assert names(rewritten.graph).count(CONVOLUTION_BACKWARD) == names(graph).count(CONVOLUTION_BACKWARD)
    assert rewritten.graph.storages == graph.storages
    for replacement in rewritten.replacements:
        tiles = [tile for i in replacement.new if (tile := rewritten.graph.ops[i].tile)]
        assert [(tile.index, tile.count) for tile in tiles] == [(0, 2), (1, 2)]
    assert len(rewritten.graph.tiles) == 4


@pytest.mark.parametrize("split", [split_gradients, split_gradients_by_mask])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_halves_have_the_bits_of_the_whole(threads: int, split: Callable[[StepGraph], RewrittenGraph]) -> None:
    graph = captured()[1].graphs["step"]
    torch.set_num_threads(threads)
    try:
        assert differing(graph, split(graph)) == ()
    finally:
        torch.set_num_threads(1)


def test_halves_that_are_both_the_backward_pass_do_not_read_the_input_for_its_own_gradient() -> None:
    graph = captured()[1].graphs["step"]
    rewritten = split_gradients_by_mask(graph)
    verify_graph(rewritten.graph)
    verify_operands(rewritten.graph)
    assert len(rewritten.replacements) == 4
    for replacement in rewritten.replacements:
        source = graph.ops[replacement.old[0]].args[1]
        assert isinstance(source, Ref)
        by_weight, by_input = (rewritten.graph.ops[i] for i in replacement.new)
        assert (by_weight.args[-1][0], by_input.args[-1]) == (False, (True, False, False))  # type: ignore[index]
        assert graph.values[source.value].storage not in rewritten.graph.reads[replacement.new[1]]
    assert split_gradients_by_mask(split_gradients(graph).graph).replacements == (), "what is in halves stays so"


@pytest.mark.slow
def test_they_train_as_plain_pytorch_does_under_random_plans(tmp_path: Path) -> None:
    model, capture, batches = captured()
    make = OPTIMIZERS["sgd"]
    expected = plain(model, lambda m, x: m(x), make, batches)
    capture = capture_step(model, lambda m, x: m(x), make(model.parameters()), batches[0])
    for seed, split in enumerate((split_gradients, split_gradients, split_gradients, split_gradients_by_mask)):
        graph = split(capture.graphs["step"]).graph
        plan = random_plan(graph, seed)
        actual = planned(replace(capture, graphs={"step": graph}), {"step": plan}, batches, tmp_path / str(seed))
        assert not differences(expected, actual), seed


@pytest.mark.slow
def test_the_halves_hold_less_at_once() -> None:
    made = workload("resnet18", small=True)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    graph = capture_step(made.model, made.loss_fn, optimizer, made.batch(0)).graphs["step"]
    rewritten = split_gradients(graph)
    saved = [saved_bytes(graph, rewritten, replacement) for replacement in rewritten.replacements]
    assert len(saved) > 5
    assert min(saved) > 0
    for replacement in rewritten.replacements:
        source = graph.ops[replacement.old[0]].args[1]
        assert isinstance(source, Ref)
        assert graph.values[source.value].storage not in rewritten.graph.reads[replacement.new[1]]


def test_what_is_to_be_left_whole_is() -> None:
    graph = captured()[1].graphs["step"]
    rewritten = split_gradients(graph)
    victim = rewritten.replacements[0]
    again = split_gradients(graph, frozenset(victim.old))
    assert len(again.replacements) == len(rewritten.replacements) - 1
    assert graph.ops[victim.old[0]] in again.graph.ops


def test_a_convolution_in_another_layout_is_left_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x: functional.relu(m(x)).sum(), optimizer, (x,)).graphs["step"]
    assert split_gradients(graph).replacements == ()


def test_a_step_without_an_input_gradient_stays_as_it_is() -> None:
    graph = tiny_step().graphs["step"]
    rewritten = split_gradients(graph)
    first = min(i for i, name in enumerate(reversed(names(graph))) if name == CONVOLUTION_BACKWARD)
    assert len(graph.ops) - 1 - first not in {i for r in rewritten.replacements for i in r.old}

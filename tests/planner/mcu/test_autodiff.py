"""The passes: what they keep, what they drop, and what each saves."""

from __future__ import annotations

import pytest

from port_planner.mcu.arena import lower_bound
from port_planner.mcu.autodiff import (
    LayerUpdate,
    ProgramError,
    SampleProgram,
    SparseScheme,
    Step,
    StepKind,
    alias,
    differentiate,
    full_scheme,
    fuse_updates,
    last_layers,
    prune,
    training_program,
    verify_program,
)
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, McuCompileError
from port_planner.mcu.memory import buffers_of
from tests.planner.mcu.networks import every_layer


@pytest.fixture(scope="module")
def graph() -> Graph:
    module, data = every_layer(2)
    return import_module(module, data.shape[1:], "every_layer")


def bytes_of(program: SampleProgram, scheme: SparseScheme) -> int:
    return lower_bound(buffers_of(program, scheme))


def test_each_pass_needs_less_memory(graph: Graph) -> None:
    scheme = last_layers(graph, 2, biases=4)
    full = differentiate(graph)
    sparse = prune(full, scheme)
    fused = fuse_updates(sparse)
    sizes = [
        bytes_of(full, full_scheme(graph)),
        bytes_of(sparse, scheme),
        bytes_of(fused, scheme),
        bytes_of(alias(fused), scheme),
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2]


def test_pruning_stops_at_the_first_trained_layer(graph: Graph) -> None:
    scheme = SparseScheme({"wide": LayerUpdate(True, 0), "head": LayerUpdate(True, 7)})
    backward = training_program(graph, scheme).backward
    touched = {step.op for step in backward}
    assert touched == {"wide", "depthwise", "average", "head"}
    assert not [step for step in backward if step.kind is StepKind.INPUT and step.op == "wide"]
    assert [step.op for step in backward if step.kind is StepKind.WEIGHT] == ["head"]
    assert [step.op for step in backward if step.kind is StepKind.BIAS] == ["head", "wide"]


def test_an_empty_scheme_leaves_no_backward(graph: Graph) -> None:
    assert prune(differentiate(graph), SparseScheme({})).backward == ()


def test_updates_follow_the_input_gradient_of_their_layer(graph: Graph) -> None:
    steps = training_program(graph, full_scheme(graph)).backward
    for op in graph.weighted():
        kinds = [step.kind for step in steps if step.op == op.name]
        if StepKind.INPUT in kinds:
            assert kinds.index(StepKind.INPUT) < kinds.index(StepKind.WEIGHT)


def test_a_residual_accumulates_and_its_second_copy_is_free(graph: Graph) -> None:
    steps = training_program(graph, full_scheme(graph)).backward
    copies = [step for step in steps if step.kind is StepKind.COPY]
    assert len(copies) == 1
    adding = [step for step in steps if step.accumulate]
    assert [(step.kind, step.op) for step in adding] == [(StepKind.INPUT, "expand_0_0")]
    assert adding[0].target == copies[0].target


def test_the_verifier_sees_weights_read_after_their_update(graph: Graph) -> None:
    steps = list(training_program(graph, full_scheme(graph)).steps)
    at = next(i for i, s in enumerate(steps) if s.kind is StepKind.INPUT and s.op == "wide")
    steps[at], steps[at + 1] = steps[at + 1], steps[at]
    with pytest.raises(ProgramError, match="after their update"):
        verify_program(SampleProgram(graph, tuple(steps)))


def test_the_verifier_sees_a_missing_gradient(graph: Graph) -> None:
    steps = [s for s in training_program(graph, full_scheme(graph)).steps if s.kind is not StepKind.LOSS]
    with pytest.raises(ProgramError, match="before it is written"):
        verify_program(SampleProgram(graph, tuple(steps)))
    with pytest.raises(ProgramError):
        verify_program(SampleProgram(graph, (Step(StepKind.FORWARD, "head"),)))


@pytest.mark.parametrize(
    ("updates", "problem"),
    [
        ({"nowhere": LayerUpdate(True)}, "does not have"),
        ({"wide": LayerUpdate(True, 14)}, "14 of 13"),
        ({"depthwise": LayerUpdate(True, 4)}, "4 of 13"),
    ],
)
def test_impossible_schemes_are_refused(graph: Graph, updates: dict[str, LayerUpdate], problem: str) -> None:
    with pytest.raises(McuCompileError, match=problem):
        training_program(graph, SparseScheme(updates))

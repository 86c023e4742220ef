"""Backward in bands: the same bits as undivided, less memory, and a verifier that finds a wrong line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, UpdateRounding, compile_model
from port_planner.mcu.autodiff import SampleProgram, StepKind, TableRow, full_scheme, last_layers
from port_planner.mcu.emit import emit_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import FAST
from port_planner.mcu.memory import plan_memory, program_of
from port_planner.mcu.tiles import (
    TileError,
    TileGroup,
    TileVerifier,
    group_rows,
    group_tensors,
    lines_reached,
    lines_read,
    make_group,
    tile_groups,
)
from port_planner.mcu.zoo import DigitsNet
from tests.planner.mcu.networks import every_layer, settled

Net = tuple[CompiledModel, np.ndarray]


def digits() -> Net:
    data = np.random.default_rng(0).random((6, 1, 8, 8), np.float32)
    return compile_model(settled(DigitsNet(), data), data, name="digits", q88=True), data


def layers() -> Net:
    module, data = every_layer(4)
    return compile_model(module, data, name="layers", q88=True), data


@pytest.fixture(scope="module", params=[digits, layers], ids=lambda make: make.__name__)
def net(request: pytest.FixtureRequest) -> Net:
    return request.param()


def groups_of(program: SampleProgram, lines: int, forward: bool) -> list[TileGroup]:
    """Every group of the program's runs: each part of a run of two operators or more."""
    found = []
    for run in tile_groups(program):
        for low in range(len(run) - 1):
            for high in range(low + 2, len(run) + 1):
                made = make_group(program, run[low:high], lines, forward)
                assert made is not None
                found.append(made)
    return found


def banded(model: CompiledModel, group: TileGroup) -> CompiledModel:
    memory = plan_memory(model.quantized.graph, model.scheme, simd=model.simd, groups=[group])
    return replace(model, memory=memory, generated=emit_model(model.quantized, memory, model.scheme, model.name))


def trained(model: CompiledModel, data: np.ndarray, rule: UpdateRounding, flags: tuple[str, ...]) -> tuple[bytes, int]:
    engine = HostEngine(model, flags)
    engine.set_options(UpdateOptions(0.02, rule))
    labels = np.arange(len(data)) % model.quantized.graph.classes
    engine.train_many(model.quantize_input(data), labels)
    return engine.parameters, engine.state.generator


@pytest.mark.process
@pytest.mark.parametrize("lines", [1, 3])
def test_every_group_trains_to_the_bits_of_the_whole(net: Net, lines: int) -> None:
    model, data = net
    program = program_of(model.quantized.graph, model.scheme)
    for rule, flags in ((UpdateRounding.STOCHASTIC, ()), (UpdateRounding.Q88, FAST)):
        whole = trained(model, data, rule, flags)
        for group in groups_of(program, lines, forward=rule is UpdateRounding.STOCHASTIC)[::2]:
            assert trained(banded(model, group), data, rule, flags) == whole, group


def test_bands_take_less_memory_where_gradients_are_large() -> None:
    model, _ = layers()
    program = program_of(model.quantized.graph, model.scheme)
    group = make_group(program, ("expand_0_0", "expand_1_0"), 1, False)
    assert group is not None
    assert banded(model, group).memory.arena.peak_bytes < 0.9 * model.memory.arena.peak_bytes


def test_what_is_not_differentiated_through_is_no_group() -> None:
    module, data = every_layer(2)
    graph = import_module(module, data.shape[1:])
    run = tile_groups(program_of(graph, full_scheme(graph)))[0]
    assert make_group(program_of(graph, last_layers(graph, 1)), run, 2, False) is None
    assert make_group(program_of(graph, full_scheme(graph)), run[:1], 2, False) is None


def test_lines_read_and_lines_reached_are_each_others_inverse(net: Net) -> None:
    for op in net[0].quantized.graph.weighted()[:-1]:
        for line in range(op.out_shape.height):
            low, high = lines_read(op, (line, line + 1))
            for source in range(op.in_shape.height):
                first, last = lines_reached(op, (source, source + 1))
                assert (first <= line < last) == (low <= source < high), (op.name, line, source)


def verified(program: SampleProgram, group: TileGroup, rows: tuple[TableRow, ...]) -> None:
    read, written = group_tensors(program, group)
    TileVerifier(program, group, {name: name for name in (*read, *written)}).run(rows)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [False, True])
def test_a_row_left_out_or_moved_by_a_line_is_found(net: Net, forward: bool) -> None:
    program = program_of(net[0].quantized.graph, net[0].scheme)
    for group in groups_of(program, 2, forward):
        read, written = group_tensors(program, group)
        rows = group_rows(program, group, {name: name for name in (*read, *written)}, simd=True).rows
        verified(program, group, rows)
        for index, row in enumerate(rows):
            before = [r for r in rows[:index] if (r.kind, r.op) == (StepKind.FORWARD, row.op)]
            if row.kind is not StepKind.FORWARD or not before or before[-1].lines.output != row.lines.output:
                with pytest.raises(TileError):  # lines that still lie there from the band before need no row
                    verified(program, group, rows[:index] + rows[index + 1 :])
            if row.span is None or row.span[0] == row.span[1] or row.kind is StepKind.FORWARD:
                continue
            shorter = replace(row, span=(row.span[0], row.span[1] - 1))
            with pytest.raises(TileError):
                verified(program, group, (*rows[:index], shorter, *rows[index + 1 :]))

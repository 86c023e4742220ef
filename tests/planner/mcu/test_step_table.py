"""The step table: rows with the places of their operands, and a verifier that believes nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from port_planner.mcu.autodiff import SampleProgram, StepKind, TableRow, full_scheme, training_program
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import OpKind
from port_planner.mcu.step_table import (
    RepeatedOps,
    TableError,
    forward_rows,
    home,
    table_rows,
    tensor_of,
    verify_table,
)
from tests.planner.mcu.networks import every_layer


@pytest.fixture(scope="module")
def program() -> SampleProgram:
    module, data = every_layer(2)
    graph = import_module(module, data.shape[1:], "every_layer")
    return training_program(graph, full_scheme(graph))


def mask_of(program: SampleProgram, op: str) -> int:
    return next(i for i, step in enumerate(program.steps) if step.kind is StepKind.MASK and step.op == op)


def first_convolution(program: SampleProgram) -> str:
    return next(op.name for op in program.graph.ops if op.kind is OpKind.CONV)


def test_a_table_that_keeps_everything_has_one_row_per_step_and_one_residency_per_tensor(
    program: SampleProgram,
) -> None:
    rows = table_rows(program).rows
    assert [(row.kind, row.op) for row in rows] == [(step.kind, step.op) for step in program.steps]
    assert not any("@" in name for row in rows for name in row.touched)
    assert forward_rows(rows) == len(program.graph.ops) and rows[forward_rows(rows)].kind is StepKind.LOSS


def test_an_operator_that_runs_again_writes_a_residency_of_its_own(program: SampleProgram) -> None:
    op = first_convolution(program)
    rows = table_rows(program, RepeatedOps({mask_of(program, op): (op,)})).rows
    again = [row for row in rows if row.again]
    assert [(row.kind, row.op, row.output) for row in again] == [(StepKind.FORWARD, op, f"{op}@2")]
    assert tensor_of(f"{op}@2") == tensor_of(op) == op
    mask = next(row for row in rows if row.kind is StepKind.MASK and row.op == op)
    assert mask.output == f"{op}@2" and RepeatedOps({3: ("a", "b")}).count == 2


def test_without_simd_no_row_has_scratch(program: SampleProgram) -> None:
    assert not any(row.scratch for row in table_rows(program, simd=False).rows)
    assert any(row.scratch for row in table_rows(program).rows)


def test_the_classifiers_gradient_has_the_home_of_its_logits(program: SampleProgram) -> None:
    last = program.graph.ops[-1].name
    assert home(program.graph, f"d:{last}") == last and home(program.graph, "d:x") == "d:x"


def test_an_operator_that_runs_again_after_its_update_is_found(program: SampleProgram) -> None:
    op = first_convolution(program)
    update = next(i for i, s in enumerate(program.steps) if s.kind is StepKind.WEIGHT and s.op == op)
    with pytest.raises(TableError, match="runs again after its weights were updated"):
        table_rows(program, RepeatedOps({update + 1: (op,)}))


def test_a_row_left_out_swapped_or_aimed_elsewhere_is_found(program: SampleProgram) -> None:
    rows = list(table_rows(program).rows)
    for index in range(0, len(rows), 7):
        with pytest.raises(TableError):
            verify_table(program, rows[:index] + rows[index + 1 :])
    names = {name for row in rows for name in row.touched}
    for index, row in enumerate(rows):
        for field in ("source", "other", "gradient"):
            for wrong in sorted(names - {getattr(row, field)})[:3] if getattr(row, field) else ():
                broken = [*rows[:index], _aimed(row, field, wrong), *rows[index + 1 :]]
                with pytest.raises(TableError):
                    verify_table(program, broken)


def _aimed(row: TableRow, field: str, name: str) -> TableRow:
    return replace(row, **dict[str, Any]({field: name}))

"""Pages: tables that move them are verified, train to the same bits, and a medium that fails is an error by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from port_planner.mcu import CompiledModel, HostEngine, LayerUpdate, SparseScheme, UpdateOptions, compile_model
from port_planner.mcu.autodiff import (
    PAGE_KINDS,
    SampleProgram,
    StepKind,
    TableRow,
    full_scheme,
    reads,
    training_program,
)
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.frontend import import_module
from port_planner.mcu.host import EngineError
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.pages import (
    UPDATES,
    BoardPageError,
    BoardPaging,
    PageTransfer,
    is_parameters,
    parameter_name,
    transfers,
    wait_of,
    with_transfer_beside,
)
from port_planner.mcu.step_table import RepeatedOps, TableError, table_rows, verify_table
from tests.planner.mcu.networks import NETWORKS

RATE = UpdateOptions(0.02)
MEDIUM_FAILED, DAMAGED, TORN = 6, 7, 8
SHARES = {"every_layer": 0.5, "hidden_linear": 0.75, "stream": 0.75}


@pytest.fixture(scope="module", params=list(NETWORKS))
def kept(request: pytest.FixtureRequest) -> tuple[CompiledModel, np.ndarray]:
    module, data = NETWORKS[request.param]()
    return compile_model(module, data, name=request.param), data


@pytest.fixture(scope="module")
def paged(kept: tuple[CompiledModel, np.ndarray]) -> CompiledModel:
    """The net with everything it trains on the medium."""
    model, _ = kept
    found, plan = recompile(model, FitOptions(int(SHARES[model.name] * model.ram_bytes), page=PageMedium.PSRAM))
    assert plan.memory.paged and plan.memory.parameters.pages
    return found


@pytest.fixture(scope="module")
def activations() -> tuple[CompiledModel, CompiledModel, np.ndarray]:
    """A net that keeps everything, and one that pages an activation while its parameters stay in RAM."""
    module, data = NETWORKS["every_layer"]()
    model = compile_model(module, data, name="every_layer")
    found, plan = recompile(model, FitOptions(int(0.8 * model.ram_bytes), page=PageMedium.PSRAM))
    assert plan.memory.paged and not plan.memory.parameters.pages
    return model, found, data


def train(engine: HostEngine, model: CompiledModel, data: np.ndarray, repeats: int = 1) -> None:
    inputs, labels = model.quantize_input(data), np.arange(len(data)) % model.quantized.graph.classes
    engine.set_options(RATE)
    engine.train_many(np.repeat(inputs, repeats, axis=0), np.repeat(labels, repeats))


def same_values(model: CompiledModel, one: HostEngine, other: HostEngine) -> bool:
    layers = [op.name for op in model.quantized.graph.weighted()]
    return one.state == other.state and all(one.values(name) == other.values(name) for name in layers)


@pytest.mark.process
def test_paging_trains_evaluates_and_predicts_to_the_same_bits(
    kept: tuple[CompiledModel, np.ndarray], paged: CompiledModel
) -> None:
    model, data = kept
    engines = [HostEngine(compiled) for compiled in (model, paged)]
    for engine in engines:
        train(engine, model, data, 3)
    assert same_values(model, *engines)
    inputs, labels = model.quantize_input(data), np.arange(len(data)) % model.quantized.graph.classes
    assert engines[0].evaluate(inputs, labels) == engines[1].evaluate(inputs, labels)
    assert engines[0].infer(inputs[0])[0] == engines[1].infer(inputs[0])[0]
    counted = engines[1].pages
    assert paged.memory.medium is not None
    assert counted.written_bytes == 3 * len(data) * paged.memory.medium.written_bytes
    assert (counted.failed, counted.damaged) == (0, 0) and counted.read_bytes > counted.written_bytes / 2


@pytest.mark.process
def test_a_sparse_update_pages_too() -> None:
    module, data = NETWORKS["hidden_linear"]()
    layers = [op.name for op in compile_model(module, data).quantized.graph.weighted()]
    scheme = SparseScheme(
        {layers[0]: LayerUpdate(True), layers[1]: LayerUpdate(True, 9), layers[2]: LayerUpdate(True, 3)}
    )
    model = compile_model(module, data, scheme=scheme)
    with_pages, plan = recompile(model, FitOptions(int(0.75 * model.ram_bytes), page=PageMedium.PSRAM))
    assert plan.memory.paged
    engines = [HostEngine(compiled) for compiled in (model, with_pages)]
    for engine in engines:
        train(engine, model, data, 2)
    assert same_values(model, *engines)


@pytest.mark.process
def test_parameters_are_set_and_read_wherever_they_live(
    kept: tuple[CompiledModel, np.ndarray], paged: CompiledModel
) -> None:
    model, data = kept
    engine = HostEngine(paged)
    train(engine, model, data[:3])
    image, state = engine.parameters, engine.state
    train(engine, model, data)
    assert engine.parameters != image
    engine.parameters, engine.state = image, state
    again = HostEngine(paged)
    again.parameters, again.state = image, state
    for one in (engine, again):
        train(one, model, data)
    assert engine.parameters == again.parameters


def flip(engine: HostEngine, page: int) -> None:
    medium = engine.model.memory.medium
    assert medium is not None
    engine.medium[medium.pages[page].offset + 5] ^= 4


@pytest.mark.process
def test_a_flipped_bit_in_parameters_is_found_before_anything_is_trained(
    kept: tuple[CompiledModel, np.ndarray], paged: CompiledModel
) -> None:
    model, data = kept
    engine = HostEngine(paged)
    train(engine, model, data[:2])
    state = engine.state
    flip(engine, read_again(paged))  # of the copy that counts: two steps came back to the first
    with pytest.raises(EngineError) as raised:
        train(engine, model, data[:1])
    assert (raised.value.status, engine.torn, engine.state, engine.pages.damaged) == (DAMAGED, False, state, 1)


def read_again(model: CompiledModel) -> int:
    """Return a page of parameters that a step reads even right behind another."""
    medium = model.memory.medium
    assert medium is not None
    return next(
        medium.index(row.page)
        for row in model.memory.rows
        if row.kind is StepKind.PAGE_IN and is_parameters(row.page) and not row.carried
    )


@pytest.mark.process
def test_parameters_that_stay_in_the_arena_are_read_once(
    kept: tuple[CompiledModel, np.ndarray], paged: CompiledModel
) -> None:
    """Right behind a training sample; after anything else that may have used the arena they are
    read again, to the same bits.
    """
    model, data = kept
    medium, carried = paged.memory.medium, [row.page for row in paged.memory.rows if row.carried]
    assert medium is not None and carried
    spared = sum(medium.pages[medium.index(page)].size_bytes for page in carried)
    engine, whole = HostEngine(paged), HostEngine(model)
    inputs = model.quantize_input(data)

    def step(index: int) -> int:
        before = engine.pages.read_bytes
        for one in (engine, whole):
            train(one, model, data[index : index + 1])
        return engine.pages.read_bytes - before

    first = step(0)
    assert step(1) == step(2) == first - spared
    assert engine.infer(inputs[3])[0] == whole.infer(inputs[3])[0]
    assert step(3) == first and step(4) == first - spared
    image, state = engine.parameters, engine.state
    for one in (engine, whole):
        train(one, model, data)
    engine.parameters, engine.state = image, state
    assert step(4) == first
    again = HostEngine(paged)
    again.parameters, again.state = image, state
    train(again, model, data[4:5])
    assert again.parameters == engine.parameters and again.state == engine.state


def flip_when_written(engine: HostEngine, model: CompiledModel, page: int) -> None:
    """Damage an activation's page between its way out and its way back."""
    name = model.memory.medium.pages[page].name  # type: ignore[union-attr]
    row = next(
        i for i, r in enumerate(model.memory.rows) if r.kind is StepKind.PAGE_WAIT and r.page == name and r.source
    )
    engine.observe(lambda step: flip(engine, page) if step == row else None)


@pytest.mark.process
def test_a_damaged_page_leaves_the_model_of_the_last_finished_step() -> None:
    """With parameters on the medium, the copy of the step before still counts: the same sample
    again gives the same bits.
    """
    module, data = NETWORKS["every_layer"]()
    model = compile_model(module, data, name="every_layer")
    found, plan = recompile(model, FitOptions(model.ram_bytes // 2, page=PageMedium.PSRAM))
    medium = plan.memory.medium
    assert medium is not None and len(medium.pages) > medium.parameter_pages > 0
    engine, whole = HostEngine(found), HostEngine(found)
    for one in (engine, whole):
        train(one, model, data[:3])
    before = engine.parameters, engine.state
    flip_when_written(engine, found, medium.parameter_pages)
    with pytest.raises(EngineError) as raised:
        train(engine, model, data[3:4])
    assert raised.value.status == DAMAGED and not engine.torn and (engine.parameters, engine.state) == before
    engine.observe(None)
    for one in (engine, whole):
        train(one, model, data[3:])
    assert (engine.parameters, engine.state) == (whole.parameters, whole.state)


@pytest.mark.process
def test_a_model_half_updated_in_ram_is_refused_until_it_is_restored(
    activations: tuple[CompiledModel, CompiledModel, np.ndarray],
) -> None:
    model, found, data = activations
    engine, whole = HostEngine(found), HostEngine(model)
    for one in (engine, whole):
        train(one, model, data[:3])
    image, state = engine.parameters, engine.state
    flip_when_written(engine, found, 0)
    with pytest.raises(EngineError) as raised:
        train(engine, model, data[3:4])
    assert (raised.value.status, engine.torn, engine.state) == (DAMAGED, True, state)
    engine.observe(None)
    with pytest.raises(EngineError) as raised:
        engine.infer(model.quantize_input(data)[0])
    assert raised.value.status == TORN
    engine.parameters, engine.state = image, state
    for one in (engine, whole):
        train(one, model, data[3:])
    assert same_values(model, engine, whole)


@pytest.fixture(scope="module")
def moved() -> tuple[SampleProgram, list[TableRow], str]:
    """The table of a net whose first activation is away between its last forward and its first backward use."""
    module, data = NETWORKS["every_layer"]()
    graph = import_module(module, data.shape[1:], "every_layer")
    program = training_program(graph, full_scheme(graph))
    name = graph.ops[0].name
    used = [i for i, step in enumerate(program.steps) if name in reads(graph, step)]
    before = max(i for i in used if program.steps[i].kind is StepKind.FORWARD)
    after = min(i for i in used if i > before)
    transfer = PageTransfer(name, (before + 1, before + 3), (after - 2, after))
    return program, list(table_rows(program, paging=BoardPaging((transfer,), parameters=True)).rows), name


@pytest.mark.slow
def test_no_page_row_can_be_left_out_or_aimed_elsewhere(moved: tuple[SampleProgram, list[TableRow], str]) -> None:
    program, rows, name = moved
    assert [row.kind for row in rows if row.page == name] == [
        StepKind.PAGE_OUT,
        StepKind.PAGE_WAIT,
        StepKind.PAGE_IN,
        StepKind.PAGE_WAIT,
    ]
    names = sorted({residency for row in rows for residency in row.touched})
    for index, row in enumerate(rows):
        if not row.page:
            continue
        with pytest.raises((BoardPageError, TableError)):
            verify_table(program, rows[:index] + rows[index + 1 :])
        if row.kind is not StepKind.PAGE_WAIT or not is_parameters(row.page):
            side = "source" if row.source else "output"
            wrong = next(other for other in names if other != getattr(row, side))
            with pytest.raises((BoardPageError, TableError)):
                verify_table(
                    program, [*rows[:index], replace(row, **dict[str, Any]({side: wrong})), *rows[index + 1 :]]
                )


def test_carried_parameters_must_still_be_there_at_the_end(moved: tuple[SampleProgram, list[TableRow], str]) -> None:
    program, _, _ = moved
    layers = [op.name for op in program.graph.weighted()][:3]
    pages = [parameter_name(layer) for layer in layers]
    updates = [next(i for i, s in enumerate(program.steps) if s.kind in UPDATES and s.op == layer) for layer in layers]
    again = RepeatedOps({step: (page,) for step, page in zip(updates, pages, strict=True)})
    paging = BoardPaging(parameters=True, carried=frozenset(layers[:2]))
    rows = list(table_rows(program, again, paging=paging).rows)
    assert [row.page for row in rows if row.carried] == pages[:2]
    index = next(i for i, row in enumerate(rows) if row.kind is StepKind.PAGE_IN and row.page == pages[2])
    with pytest.raises(BoardPageError, match="ends with"):
        verify_table(program, [*rows[:index], replace(rows[index], carried=True), *rows[index + 1 :]])


def test_a_transfer_goes_on_beside_the_operators_next_to_it(moved: tuple[SampleProgram, list[TableRow], str]) -> None:
    program, _, _ = moved
    plain = list(table_rows(program, paging=BoardPaging(parameters=True)).rows)
    moved_rows = list(plain)
    for transfer, start in transfers(plain).items():
        before, after = plain, with_transfer_beside(plain, transfer)
        verify_table(program, after)
        assert sorted(map(str, before)) == sorted(map(str, after))
        begun = transfers(after)[transfer]
        between = after[begun + 1 : wait_of(after, begun)]
        ends = start == 0 or wait_of(plain, start) == len(plain) - 1
        assert sum(row.kind not in PAGE_KINDS for row in between) == (0 if ends else 1)
        moved_rows = with_transfer_beside(moved_rows, transfer)
    verify_table(program, moved_rows)


@pytest.mark.process
def test_inference_leaves_out_what_only_training_pages(
    kept: tuple[CompiledModel, np.ndarray], paged: CompiledModel
) -> None:
    model, data = kept
    engine = HostEngine(paged)
    engine.infer(model.quantize_input(data)[0])
    assert engine.pages.written_bytes == 0
    loss = next(i for i, row in enumerate(paged.memory.rows) if row.kind is StepKind.LOSS)
    assert all(row.training or is_parameters(row.page) for row in paged.memory.rows[:loss] if row.page)


@pytest.mark.slow
def test_every_byte_of_the_parameters_is_in_a_page(paged: CompiledModel) -> None:
    pages = list(paged.memory.parameters.pages.values())
    assert [page.offset for page in pages] == [0, *(page.offset + page.size_bytes for page in pages[:-1])]
    assert pages[-1].offset + pages[-1].size_bytes == paged.memory.parameters.size_bytes
    assert paged.memory.parameters.size_bytes % 8 == 0

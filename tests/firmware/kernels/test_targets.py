"""The kernels on emulated Cortex-M cores: the same bits as the host, within the cores' RAM and
the budget of instructions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.mcu_networks.target import (
    Core,
    TargetError,
    build_counter,
    build_image,
    missing_riscv,
    missing_rp2040js,
    missing_tools,
    run_image,
)
from port_planner.base.targets import with_targets
from port_planner.mcu import (
    CompiledModel,
    HostEngine,
    LayerUpdate,
    Loss,
    SparseScheme,
    UpdateOptions,
    UpdateRounding,
    compile_model,
    compile_quantized,
    last_layers,
)
from port_planner.mcu.choose_plan import FitOptions
from port_planner.mcu.compile import recompile
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, OpKind
from port_planner.mcu.page_costs import PageMedium
from port_planner.mcu.schemes.contributions import backward_macs
from port_planner.mcu.zoo import CameraNet, DigitsNet, MobileNetV2
from tests.planner.mcu.networks import Build, every_layer, hidden_linear, joins, padded, recurrent, settled, transposed

pytestmark = pytest.mark.skipif(missing_tools(counting=True) is not None, reason=str(missing_tools(counting=True)))


def sparse(graph: Graph) -> SparseScheme:
    """Biases of the last five layers, the last two pointwise layers and the head."""
    layers = graph.weighted()
    updates = {op.name: LayerUpdate(True) for op in layers[-5:]}
    for op in [*[op for op in layers if op.kind is OpKind.CONV and op.kernel == (1, 1)][-2:], layers[-1]]:
        updates[op.name] = LayerUpdate(True, op.out_shape.channels)
    return SparseScheme(updates)


def digits(simd: bool = True) -> tuple[CompiledModel, np.ndarray, np.ndarray]:
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((100, 1, 8, 8), np.float32)
    module = settled(DigitsNet(), data)
    scheme = sparse(import_module(module, (1, 8, 8)))
    model = compile_model(module, data, name="digits", scheme=scheme, simd=simd)
    return model, model.quantize_input(data), np.arange(100) % 10


@pytest.mark.process
@pytest.mark.sample(4)
@pytest.mark.parametrize("core", [Core.M0, Core.M3, Core.M4F, Core.M7F, Core.M33])
@pytest.mark.parametrize("rule", [UpdateRounding.STOCHASTIC, UpdateRounding.Q88])
def test_every_core_trains_to_the_hosts_bits(core: Core, rule: UpdateRounding, tmp_path: Path) -> None:
    """All layer kinds, all parameters, five samples."""
    module, data = every_layer(5)
    model = compile_model(module, data, q88=True)
    inputs, labels = model.quantize_input(data), np.arange(5) % 7
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.02, rule))
    loss, right = host.train_many(inputs, labels)
    host_generator = host.state.generator
    if core is Core.M0:
        with pytest.raises(TargetError, match="overflowed"):
            build_image(model, core, tmp_path)
        return
    run = run_image(build_image(model, core, tmp_path), inputs, labels, options=UpdateOptions(0.02, rule))
    assert run.parameters == host.parameters
    assert (run.generator, run.steps, run.correct) == (host_generator, 5, round(5 * right))
    assert run.loss_sum == pytest.approx(5 * loss, rel=1e-6)


@pytest.mark.process
@pytest.mark.parametrize("core", [Core.M4F, Core.M0])
@pytest.mark.parametrize("build", [joins, transposed, padded, recurrent])
def test_newer_layers_train_to_the_hosts_bits(build: Build, core: Core, tmp_path: Path) -> None:
    module, data = build(5)
    model = compile_model(module, data[:, :, :8, :6], q88=True)
    inputs, labels = model.quantize_input(data[:, :, :8, :6]), np.arange(5) % 4
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.02))
    host.train_many(inputs, labels)
    run = run_image(build_image(model, core, tmp_path), inputs, labels, options=UpdateOptions(0.02))
    assert run.parameters == host.parameters != HostEngine(model).parameters


@pytest.mark.process
@pytest.mark.parametrize("core", [Core.M4F, Core.M0])
def test_squared_errors_train_to_the_hosts_bits(core: Core, tmp_path: Path) -> None:
    module, data = hidden_linear(5)
    model = compile_model(module, data, loss=Loss.MSE, simd=core is Core.M4F)
    rows = with_targets(model.quantize_input(data), np.random.default_rng(0).normal(size=(5, 4)), 4)
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.02))
    loss, _ = host.train_many(rows, np.zeros(5, np.int64))
    run = run_image(build_image(model, core, tmp_path), rows, np.zeros(5, np.int64), options=UpdateOptions(0.02))
    assert run.parameters == host.parameters != HostEngine(model).parameters
    assert (run.loss_sum, run.correct) == (pytest.approx(5 * loss, rel=1e-6), 0)


@pytest.mark.process
def test_kernels_that_a_model_does_not_have_take_no_flash(tmp_path: Path) -> None:
    plain, joined = digits(simd=False)[0], compile_model(*joins(2), simd=False)
    images = [build_image(model, Core.M4F, tmp_path / model.name) for model in (plain, replace(joined, name="joined"))]
    found = [{name for name in ("port_grouped_forward", "port_table_input_gradient", "port_concat_forward", "port_product_forward",
             "port_upsample_forward") if name in image.elf.read_bytes().decode("latin-1")} for image in images]  # fmt: skip
    assert (len(found[0]), len(found[1])) == (0, 5)


@pytest.mark.process
def test_the_small_core_trains_to_the_hosts_bits_in_16_kib(tmp_path: Path) -> None:
    model, inputs, labels = digits(simd=False)
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.03))
    host.train_many(inputs[:10], labels[:10])
    image = build_image(model, Core.M0, tmp_path)
    run = run_image(image, inputs[:10], labels[:10], options=UpdateOptions(0.03))
    assert run.parameters == host.parameters
    assert image.static_ram_bytes + run.stack_bytes <= 16_384


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("core", "missing"), [(Core.RP2040, missing_rp2040js()), (Core.RV32, missing_riscv())])
def test_other_emulators_and_cores_train_to_the_hosts_bits(core: Core, missing: str | None, tmp_path: Path) -> None:
    if missing is not None:
        pytest.skip(missing)
    model, inputs, labels = digits(simd=False)
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.03))
    host.train_many(inputs[:10], labels[:10])
    run = run_image(build_image(model, core, tmp_path), inputs[:10], labels[:10], options=UpdateOptions(0.03))
    assert run.parameters == host.parameters and run.steps == 10


@pytest.mark.process
@pytest.mark.parametrize("share", [0.98, 0.75])
def test_operators_that_run_again_or_in_bands_give_the_hosts_bits(share: float, tmp_path: Path) -> None:
    """Plans of the net of every layer for less memory, on the core with DSP kernels."""
    module, data = every_layer(3)
    kept = compile_model(module, data)
    model = compile_model(module, data, budget=int(share * kept.ram_bytes))
    assert model.memory.recomputed > 0 or any(row.part for row in model.memory.rows)
    inputs, labels = kept.quantize_input(data), np.arange(3) % 7
    host = HostEngine(kept)
    host.set_options(UpdateOptions(0.02))
    host.train_many(inputs, labels)
    run = run_image(build_image(model, Core.M4F, tmp_path), inputs, labels, options=UpdateOptions(0.02))
    assert run.parameters == host.parameters


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize(("core", "share"), [(Core.M4F, 0.5), (Core.M7F, 0.5), (Core.M3, 0.75)])
def test_pages_give_the_hosts_bits_on_the_cores(core: Core, share: float, tmp_path: Path) -> None:
    """Trained parameters and activations on memory-mapped PSRAM, which the emulated boards have."""
    module, data = every_layer(3)
    kept = compile_model(module, data, simd=core is not Core.M3)
    model, plan = recompile(kept, FitOptions(int(share * kept.ram_bytes), page=PageMedium.PSRAM))
    assert plan.memory.paged and plan.memory.medium is not None
    inputs, labels = kept.quantize_input(data), np.arange(3) % 7
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.02))
    host.train_many(inputs, labels)
    run = run_image(build_image(model, core, tmp_path), inputs, labels, options=UpdateOptions(0.02))
    assert run.parameters == host.parameters
    assert run.page_bytes == (host.pages.read_bytes, host.pages.written_bytes)
    assert run.page_bytes[1] == 3 * plan.memory.medium.written_bytes


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize("core", [Core.M4F, Core.M3, Core.M0])
def test_dynamic_updates_give_the_hosts_bits_and_take_fewer_instructions(core: Core, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((10, 1, 8, 8), np.float32)
    whole = compile_model(settled(DigitsNet(), data), data, name="digits", simd=core is Core.M4F)
    scheme = replace(whole.scheme, chosen=0.25)
    some = compile_quantized(whole.quantized, scheme=scheme, simd=core is Core.M4F)
    inputs, labels, counts = whole.quantize_input(data), np.arange(10), []
    for name, model in (("whole", whole), ("some", some)):
        host = HostEngine(model)
        host.set_options(UpdateOptions(0.03))
        host.train_many(inputs, labels)
        image, counter = build_image(model, core, tmp_path / name), build_counter(tmp_path / name)
        run = run_image(image, inputs, labels, options=UpdateOptions(0.03), counter=counter)
        assert run.parameters == host.parameters
        counts.append(sum(run.instructions))
    assert counts[1] < 0.9 * counts[0]


@pytest.mark.process
@pytest.mark.parametrize("rule", [UpdateRounding.STOCHASTIC, UpdateRounding.Q88])
def test_the_digits_net_trains_all_its_layers_on_the_small_core_in_16_kib(rule: UpdateRounding, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((10, 1, 8, 8), np.float32)
    q88, options = rule is UpdateRounding.Q88, UpdateOptions(0.03, rule)
    model = compile_model(settled(DigitsNet(), data), data, name="digits", simd=False, q88=q88)
    inputs, labels = model.quantize_input(data), np.arange(10)
    host = HostEngine(model)
    host.set_options(options)
    host.train_many(inputs, labels)
    image = build_image(model, Core.M0, tmp_path)
    run = run_image(image, inputs, labels, options=options)
    assert run.parameters == host.parameters
    assert image.static_ram_bytes + run.stack_bytes <= 16_384


@pytest.mark.long
def test_a_mobilenet_trains_all_its_layers_in_256_kib(tmp_path: Path) -> None:
    """Width 0.35, 96 x 96, 16 bits of all weights but one layer's: 1.6 MB where everything is kept.

    The rest of the RAM is for stack, protocol and UART.
    """
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((2, 3, 96, 96), np.float32)
    whole = compile_model(settled(MobileNetV2(), data), data, name="mobilenet", q88=True)
    model, plan = recompile(whole, FitOptions(244_000, page=PageMedium.PSRAM))
    assert plan.memory.parameters.pages and plan.overhead <= 0.5
    widest = max(model.quantized.graph.weighted(), key=lambda op: op.weight_count)
    assert [name for name, update in model.scheme.updates.items() if not update.q88] == [widest.name]
    kept, options = compile_quantized(whole.quantized, scheme=model.scheme), UpdateOptions(0.01, UpdateRounding.Q88)
    inputs, labels = kept.quantize_input(data), np.arange(2)
    host, keeping = HostEngine(model), HostEngine(kept)
    for engine in (host, keeping):
        engine.set_options(options)
        engine.train_many(inputs, labels)
    assert all(host.values(op.name) == keeping.values(op.name) for op in kept.quantized.graph.weighted())
    image = build_image(model, Core.M4F, tmp_path)
    run = run_image(image, inputs, labels, options=options)
    assert run.parameters == host.parameters
    assert image.static_ram_bytes + run.stack_bytes <= 256 * 1024 and image.text_bytes <= 1024 * 1024


@pytest.mark.long
def test_a_thousand_steps_are_bit_identical_everywhere(tmp_path: Path) -> None:
    model, inputs, labels = digits(simd=False)
    repeated, targets = np.tile(inputs, (10, 1)), np.tile(labels, 10)
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.03))
    host.train_many(repeated, targets)
    vector = digits(simd=True)[0]
    missing = {Core.RP2040: missing_rp2040js(), Core.RV32: missing_riscv()}
    for core in (core for core in Core if missing.get(core) is None):
        image = build_image(model if core is Core.M0 else vector, core, tmp_path / core.name)
        run = run_image(image, repeated, targets, options=UpdateOptions(0.03))
        assert run.steps == 1000
        assert run.parameters == host.parameters, core


@pytest.fixture(scope="module")
def camera() -> tuple[CompiledModel, np.ndarray]:
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((4, 3, 80, 80), np.float32)
    module = settled(CameraNet(), data)
    return compile_model(module, data, name="camera", scheme=sparse(import_module(module, (3, 80, 80)))), data


def count(model: CompiledModel, data: np.ndarray, folder: Path, options: UpdateOptions | None) -> tuple[int, int]:
    """Return the instructions of one sample, and the static RAM with the stack."""
    image = build_image(model, Core.M4F, folder)
    run = run_image(
        image, model.quantize_input(data[:1]), np.zeros(1, np.int64), options=options, counter=build_counter(folder)
    )
    return run.instructions[0], image.static_ram_bytes + run.stack_bytes


@pytest.mark.process
def test_instructions_and_ram_of_a_camera_network(camera: tuple[CompiledModel, np.ndarray], tmp_path: Path) -> None:
    model, data = camera
    graph = model.quantized.graph
    forward, _ = count(model, data, tmp_path, None)
    training, ram_bytes = count(model, data, tmp_path, UpdateOptions(0.01))
    assert forward / graph.macs <= 2.9
    assert (training - forward) / backward_macs(graph, model.scheme) <= 5.4
    assert ram_bytes <= 180_000


@pytest.mark.long
@pytest.mark.parametrize(("share", "most"), [(0.75, 0.10), (0.5, 0.20)])
def test_less_memory_costs_few_instructions_and_no_bit(share: float, most: float, tmp_path: Path) -> None:
    """All layers of the camera net, with that share of the arena that keeps everything."""
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((2, 3, 80, 80), np.float32)
    whole = compile_model(settled(CameraNet(), data), data, name="camera")
    allowed = whole.memory.parameters.size_bytes + int(share * whole.memory.arena.peak_bytes)
    less, _ = recompile(whole, FitOptions(allowed))
    runs = []
    for name, model in (("whole", whole), ("less", less)):
        image = build_image(model, Core.M4F, tmp_path / name, ram_bytes=1 << 20)
        counter = build_counter(tmp_path / name)
        sample, label = model.quantize_input(data[:1]), np.zeros(1, np.int64)
        runs.append(run_image(image, sample, label, options=UpdateOptions(0.01), counter=counter))
    assert runs[0].parameters == runs[1].parameters
    assert runs[1].instructions[0] <= (1 + most) * runs[0].instructions[0]


@pytest.mark.process
def test_instructions_of_a_pointwise_layer(tmp_path: Path) -> None:
    """10x10x96 -> 96 behind a minimal input layer, whose own instructions are measured and taken off."""
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((4, 1, 10, 10), np.float32)
    totals = []
    for layers in (1, 2):
        body = [
            torch.nn.Conv2d(1, 96, 1),
            torch.nn.ReLU(),
            *[torch.nn.Conv2d(96, 96, 1), torch.nn.ReLU()] * (layers - 1),
        ]
        module = torch.nn.Sequential(
            *body, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(96, 2)
        ).eval()
        totals.append(
            count(compile_model(module, data, scheme=last_layers_none()), data, tmp_path / str(layers), None)[0]
        )
    assert (totals[1] - totals[0]) / (100 * 96 * 96) <= 1.8


def last_layers_none() -> SparseScheme:
    return SparseScheme({})


@pytest.mark.process
def test_a_network_too_large_for_the_core_does_not_link(
    camera: tuple[CompiledModel, np.ndarray], tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match="overflowed"):
        build_image(camera[0], Core.M0, tmp_path)


@pytest.mark.process
def test_counting_is_exact(tmp_path: Path) -> None:
    """Two runs of the same work count the same instructions."""
    model, inputs, labels = digits()
    image, counter = build_image(model, Core.M4F, tmp_path), build_counter(tmp_path)
    runs = [
        run_image(image, inputs[:2], labels[:2], options=UpdateOptions(0.03), counter=counter).instructions
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 2


@pytest.mark.process
def test_partial_rows_train_in_ram_while_the_rest_stays_in_flash(tmp_path: Path) -> None:
    module, data = every_layer(4)
    graph = import_module(module, data.shape[1:])
    scheme = SparseScheme(
        {
            op.name: LayerUpdate(True, op.out_shape.channels // 2)
            for op in graph.weighted()
            if op.kind is not OpKind.DEPTHWISE
        }
    )
    model = compile_model(module, data, scheme=scheme)
    assert (
        model.memory.parameters.weight_bytes
        < compile_model(module, data, scheme=last_layers(graph, 8)).memory.parameters.weight_bytes
    )
    inputs, labels = model.quantize_input(data), np.arange(4)
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.02))
    host.train_many(inputs, labels)
    run = run_image(build_image(model, Core.M4F, tmp_path), inputs, labels, options=UpdateOptions(0.02))
    assert run.parameters == host.parameters

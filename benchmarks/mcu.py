"""RAM and instructions of compiled models on emulated Cortex-M cores.

    python -m benchmarks.mcu [--json] [--tensors] [--memory [--accuracy SEEDS]] [--networks digits,keywords]

RAM is the linker's data and bss plus the painted stack of a bare bench program (no protocol, no UART buffers);
instructions are counted exactly by a QEMU plugin and do not include cycles, wait states or energy. `--tensors` adds the
memory plan tensor by tensor, `--memory` prints only what training takes from frameworks to bands
(`mcu_networks/memory_table`), which is planned, not run; `--accuracy` adds what each way of it learns on that many
fresh seeds (`mcu_accuracy`; hours for the larger nets). Rows of others are labelled with where their figure comes from.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.mcu_accuracy import EVERYTHING, FRESH_SEED, MIXED, Method, compare_rules
from benchmarks.mcu_networks.memory_table import (
    MemoryRow,
    Network,
    low_bytes_within,
    memory_table,
    network_rows,
    with_accuracy,
)
from benchmarks.mcu_networks.schemes import last_five, late_blocks
from benchmarks.mcu_networks.target import Core, build_counter, build_image, missing_tools, run_image
from benchmarks.mcu_tasks import TASKS
from benchmarks.tables import table_console
from port_planner.mcu import CompiledModel, SparseScheme, UpdateOptions, UpdateRounding, compile_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.schemes.contributions import backward_macs
from port_planner.mcu.zoo import CameraNet, DigitsNet, MobileNetV2, StreamNet


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one core, with the part that is trained and its limits."""

    name: str
    core: Core
    module: nn.Module
    shape: tuple[int, int, int]
    ram_limit_bytes: int
    speed_limits: tuple[float, float] | None = None
    """Instructions per multiply-accumulate, forward and backward; None if nothing is promised."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One buffer of the arena: bytes, offset and the steps it is alive in."""

    name: str
    size_bytes: int
    offset: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measurement of one case: sizes in bytes, speeds in instructions per multiply-accumulate."""

    model: str
    core: str
    trained: str
    arena_bytes: int
    arena_lower_bound_bytes: int
    inference_arena_bytes: int
    parameter_bytes: int
    stack_bytes: int
    ram_bytes: int
    ram_limit_bytes: int
    text_bytes: int
    forward_macs: int
    backward_macs: int
    forward_per_mac: float
    backward_per_mac: float
    speed_limits: tuple[float, float] | None
    tensors: tuple[TensorRow, ...]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A figure of others, and where it was measured or published."""

    what: str
    value: str
    source: str


PUBLISHED = "published, arXiv 2206.15472"

ANCHORS = (
    Anchor("TinyEngine forward, M4F -Ofast", "2.90 instr/MAC", "its generated example measured elsewhere, same way"),
    Anchor("TinyEngine backward, M4F -Ofast", "5.37 instr/MAC", "its generated example measured elsewhere, same way"),
    Anchor("CMSIS-NN pointwise 10x10x96 -> 96, M4", "1.88 instr/MAC", "commit 99f736a measured elsewhere, same way"),
    Anchor("TinyEngine RAM, 49 kB scheme", "231,552 B + 21,848 B of stack", "its generated example measured elsewhere"),
    Anchor("MobileNetV2-w0.35, sparse and reordered", "141 kB of peak SRAM", PUBLISHED),
    Anchor("MobileNetV2-w0.35, full / sparse", "2,939 / 335 kB of peak SRAM", PUBLISHED),
    Anchor("MCUNet family, sparse / sparse and reordered", "7-9x / 20-21x below full update", PUBLISHED),
    Anchor("against frameworks whole", "1000x less memory", PUBLISHED),
    Anchor("against TF-Lite's full update, STM32F746", "23-25x faster", PUBLISHED),
    Anchor("frameworks whole, full update", "652 MB TensorFlow, 303 MB PyTorch", PUBLISHED),
)


SPEED_LIMITS = (2.9, 5.4)
"""For whole networks of millions of multiply-accumulates on M4F, as TinyEngine's figures are: 22.5 M.

The digits net has 41 thousand, one to 256 pixels a layer: what every layer, pixel and updated weight costs
once is most of its count.
"""
POINTWISE_LIMIT = 1.8

CASES = (
    Case("digits 8x8", Core.M0, DigitsNet(), (1, 8, 8), 16_384),
    Case("digits 8x8", Core.M4F, DigitsNet(), (1, 8, 8), 16_384),
    Case("camera 80x80x3", Core.M4F, CameraNet(), (3, 80, 80), 180_000, SPEED_LIMITS),
    Case("MobileNetV2-w0.35 96x96x3", Core.M4F, MobileNetV2(), (3, 96, 96), 256 * 1024, SPEED_LIMITS),
)


NETWORKS = (
    Network("digits 8x8", "digits", DigitsNet(), (1, 8, 8), last_five, "mkr1000"),
    Network("keywords 10x49", "keywords", StreamNet(10, 12), (10, 49), last_five, "nrf52840"),
    Network("camera 80x80x3", "camera", CameraNet(), (3, 80, 80), last_five, "nrf52840"),
    Network(
        "MobileNetV2-w0.35", "mobilenet", MobileNetV2(), (3, 96, 96), late_blocks, "nrf52840", (0.75, 0.5, 0.2), 244_000
    ),
)


def compile_case(case: Case) -> tuple[CompiledModel, np.ndarray]:
    """Return the compiled model and calibration data of a case; weights are random, the same each
    time: they are counted with.
    """
    torch.manual_seed(0)
    for layer in case.module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    data = np.random.default_rng(0).random((8, *case.shape), np.float32)
    with torch.no_grad():
        case.module.train()(torch.from_numpy(data))
    graph = import_module(case.module.eval(), case.shape)
    scheme = late_blocks(graph) if isinstance(case.module, MobileNetV2) else last_five(graph)
    return compile_model(case.module, data, name=case.name, scheme=scheme, simd=case.core is not Core.M0), data


def measure(case: Case, folder: Path) -> MeasuredCosts:
    """Build and run one case; counts are of one sample."""
    model, data = compile_case(case)
    image, counter = build_image(model, case.core, folder), build_counter(folder)
    sample, label = model.quantize_input(data[:1]), np.zeros(1, np.int64)
    forward = run_image(image, sample, label, counter=counter).instructions[0]
    training = run_image(image, sample, label, options=UpdateOptions(0.01), counter=counter)
    graph, arena = model.quantized.graph, model.memory.arena
    backward = backward_macs(graph, model.scheme)
    inference = compile_model(case.module, data, scheme=SparseScheme({}), simd=case.core is not Core.M0)
    return MeasuredCosts(
        case.name, case.core.name, model.scheme.describe(), arena.peak_bytes, arena.lower_bound_bytes,
        inference.memory.arena.peak_bytes, model.memory.parameters.size_bytes, training.stack_bytes,
        image.static_ram_bytes + training.stack_bytes, case.ram_limit_bytes, image.text_bytes, graph.macs, backward,
        forward / graph.macs, (training.instructions[0] - forward) / backward, case.speed_limits,
        tuple(TensorRow(b.name, b.size_bytes, arena.offsets[b.name], b.first, b.last) for b in arena.buffers),
    )  # fmt: skip


def pointwise_per_mac(folder: Path) -> float:
    """Return instructions per MAC of 10x10x96 -> 96 on M4F: a network with the layer minus the same one without it."""
    data = np.random.default_rng(0).random((4, 1, 10, 10), np.float32)
    totals = []
    for layers in (0, 1):
        body = [nn.Conv2d(1, 96, 1), nn.ReLU(), *[nn.Conv2d(96, 96, 1), nn.ReLU()] * layers]
        module = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 2)).eval()
        model = compile_model(module, data, scheme=SparseScheme({}))
        image, counter = build_image(model, Core.M4F, folder / str(layers)), build_counter(folder)
        totals.append(
            run_image(image, model.quantize_input(data[:1]), np.zeros(1, np.int64), counter=counter).instructions[0]
        )
    return (totals[1] - totals[0]) / (100 * 96 * 96)


def print_results(rows: Sequence[MeasuredCosts], pointwise: float, tensors: bool, console: Console) -> None:
    """Print RAM and speed, then the figures of others."""
    console.print(_ram_table(rows))
    console.print(_speed_table(rows, pointwise))
    for anchor in (anchor for anchor in ANCHORS if anchor.source != PUBLISHED):
        console.print(f"  others: {anchor.what}: {anchor.value} ({anchor.source})")
    for row in rows if tensors else ():
        console.print(_tensor_table(row))


def _named_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in ("model", "core", *headings):
        table.add_column(heading, justify="left" if heading in ("model", "core") else "right", no_wrap=True)
    return table


def _ram_table(rows: Sequence[MeasuredCosts]) -> Table:
    table = _named_table(
        "RAM and flash on emulated cores, bytes",
        "arena",
        "bound",
        "inference",
        "trained",
        "stack",
        "all",
        "limit",
        "flash",
    )
    for row in rows:
        sizes = (
            row.arena_bytes,
            row.arena_lower_bound_bytes,
            row.inference_arena_bytes,
            row.parameter_bytes,
            row.stack_bytes,
            row.ram_bytes,
            row.ram_limit_bytes,
            row.text_bytes,
        )
        table.add_row(row.model, row.core, *(f"{size:,}" for size in sizes))
    return table


def _speed_table(rows: Sequence[MeasuredCosts], pointwise: float) -> Table:
    table = _named_table("instructions per multiply-accumulate", "M MAC", "forward", "limit", "backward", "limit")
    for row in rows:
        forward, backward = row.speed_limits or (None, None)
        table.add_row(
            row.model,
            row.core,
            f"{row.forward_macs / 1e6:.2f}",
            f"{row.forward_per_mac:.2f}",
            _limit(forward),
            f"{row.backward_per_mac:.2f}",
            _limit(backward),
        )
    table.add_row("pointwise 10x10x96 -> 96", "M4F", "0.92", f"{pointwise:.2f}", _limit(POINTWISE_LIMIT), "", "")
    return table


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def _exceeds(row: MeasuredCosts) -> bool:
    forward, backward = row.speed_limits or (float("inf"), float("inf"))
    return row.ram_bytes > row.ram_limit_bytes or row.forward_per_mac > forward or row.backward_per_mac > backward


def _tensor_table(row: MeasuredCosts) -> Table:
    table = Table(title=f"{row.model} on {row.core}: every tensor of the arena")
    for heading in ("tensor", "bytes", "offset", "alive in steps"):
        table.add_column(heading, justify="left" if heading == "tensor" else "right")
    for tensor in row.tensors:
        table.add_row(
            tensor.name, f"{tensor.size_bytes:,}", f"{tensor.offset:,}", f"{tensor.first_step} to {tensor.last_step}"
        )
    return table


def _ways(network: Network, seeds: int | None) -> list[MemoryRow]:
    rows = network_rows(network)
    if seeds is None:
        return rows
    torch.set_num_threads(1)
    task = next(task for task in TASKS if task.name == network.task)
    fresh = range(FRESH_SEED, FRESH_SEED + seeds)
    methods: tuple[Method, ...] = EVERYTHING
    if network.wide_bytes is not None:
        narrow, _ = low_bytes_within(network, network.wide_bytes)
        methods += (Method(MIXED, UpdateRounding.Q88, everything=True, narrow=narrow),)
    return with_accuracy(rows, compare_rules(task, fresh, Console(stderr=True), methods, network.sparse))


def _print_memory(rows: Sequence[MemoryRow], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        console = table_console(140)
        console.print(memory_table(rows))
        for anchor in (anchor for anchor in ANCHORS if anchor.source == PUBLISHED):
            console.print(f"  others: {anchor.what}: {anchor.value} ({anchor.source})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case; return 1 if one exceeds a limit of RAM or speed."""
    parser = argparse.ArgumentParser(description="RAM and instructions of compiled models")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tensors", action="store_true", help="print every tensor of every arena")
    parser.add_argument("--memory", action="store_true", help="only the table of ways to train")
    parser.add_argument(
        "--accuracy", type=int, metavar="SEEDS", help="with --memory: what each way learns on so many seeds"
    )
    parser.add_argument(
        "--networks",
        default=",".join(network.task for network in NETWORKS),
        help="of the table of ways; none: only what runs",
    )
    options = parser.parse_args(arguments)
    if unknown := set(filter(None, options.networks.split(","))) - {network.task for network in NETWORKS}:
        parser.error(
            f"--networks: {', '.join(sorted(unknown))}: not among {', '.join(network.task for network in NETWORKS)}"
        )
    chosen = [network for network in NETWORKS if network.task in options.networks.split(",")]
    if options.memory:
        _print_memory([row for network in chosen for row in _ways(network, options.accuracy)], options.json)
        return 0
    if problem := missing_tools(counting=True):
        print(problem, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, Path(folder) / str(index)) for index, case in enumerate(CASES)]
        pointwise = pointwise_per_mac(Path(folder))
    ways = [row for network in chosen for row in network_rows(network)]
    if options.json:
        anchors = [asdict(anchor) for anchor in ANCHORS]
        print(
            json.dumps(
                {
                    "models": [asdict(row) for row in rows],
                    "pointwise_per_mac": pointwise,
                    "others": anchors,
                    "ways": [asdict(way) for way in ways],
                },
                indent=1,
            )
        )
    else:
        # a file or a pipe has no width of its own; the tables want this much
        print_results(rows, pointwise, options.tensors, table_console(130))
        if ways:
            _print_memory(ways, False)
    return int(pointwise > POINTWISE_LIMIT or any(map(_exceeds, rows)))


if __name__ == "__main__":
    raise SystemExit(main())

"""What training one sample takes, from frameworks to bands: the usual table of publications about tiny training.

Every figure is computed or planned here, none is taken from a paper:

- `pytorch`: fp32 parameters, their gradients, and every tensor that autograd saves for backward, as its hooks report
  them in one real step of batch 1. The framework itself (300 MB published) is not in it.
- `tflite`: the same from the shapes of a graph whose batch norms and activations are fused: fp32 outputs of all
  operators, parameters, their gradients, the two largest neighbouring gradients.
- int8: the planned arena and trained parameters; "all gradients first" is the order of a framework, "in place" updates
  a weight as soon as its gradient exists.
- bands: everything trained, at half of the keep-all arena or as near as bands and recomputation come.
- pages: everything trained, at a share of the keep-all RAM or as near as a page medium (a PSRAM by the board's file)
  comes with bands and recomputation; trained parameters count as RAM where the plan keeps them there.

- Q8.8: pages again, with low bytes for the weights of as many layers as the RAM of the row holds.

All int8 rows of one scheme give the same bits, so their accuracy is that of `python -m benchmarks.mcu_accuracy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from rich.table import Table
from torch import nn

from benchmarks.mcu_accuracy import MIXED, STOCHASTIC_ALL, STOCHASTIC_SPARSE, Row
from port_planner.mcu.arena import lower_bound
from port_planner.mcu.autodiff import SampleProgram, SparseScheme, differentiate, full_scheme, prune
from port_planner.mcu.board_problem import board_problem
from port_planner.mcu.choose_plan import FitOptions, FittedMemory, fit_memory
from port_planner.mcu.core_costs import CoreCosts, core_costs
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph
from port_planner.mcu.low_bytes import fit_low_bytes
from port_planner.mcu.memory import ArenaBudgetError, MemoryPlan, buffers_of, parameter_layout, plan_memory
from port_planner.mcu.page_costs import PageMedium
from port_planner.problem.problem import Schedule
from port_planner.problem.replay import replay

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Network:
    """One network of the table, what a sparse update trains of it, and the board that it is for."""

    name: str
    task: str
    """Of `benchmarks.mcu_tasks`: what it learns."""
    module: nn.Module
    shape: tuple[int, ...]
    sparse: Callable[[Graph], SparseScheme]
    board: str
    paged: tuple[float, ...] = (0.75, 0.5)
    """The shares of the keep-all RAM at which the table pages."""
    wide_bytes: int | None = None
    """The RAM for which pages of weights with low bytes are planned, in as many layers as it
    holds; None: no such row.
    """


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One way to train one network. `seconds`, `joules`: of one sample by the board's file, where it runs on one."""

    network: str
    way: str
    ram_bytes: int
    seconds: float | None = None
    joules: float | None = None
    overhead: float | None = None
    """Energy beyond the plan that keeps everything, as a share."""
    accuracy: Row | None = None
    """After adapting, on fresh seeds."""


def pytorch_bytes(module: nn.Module, shape: Sequence[int]) -> int:
    """Return parameters, gradients and what autograd saves in one step of batch 1."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # batch norms take their running figures: one sample has no variance where a map is 1x1
        nn.functional.cross_entropy(module.eval()(torch.zeros(1, *shape)), torch.zeros(1, dtype=torch.long))
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    return 2 * parameters + sum(nbytes for at, nbytes in storages.items() if at not in own)


def tflite_bytes(graph: Graph) -> int:
    """Return what a graph with fused layers takes in fp32: outputs, parameters, gradients, two gradients under way."""
    outputs = [graph.input_shape.elements, *(op.out_shape.elements for op in graph.ops)]
    parameters = sum(op.weight_count + op.rows for op in graph.weighted())
    return FP32_BYTES * (sum(outputs) + 2 * parameters + max(a + b for a, b in pairwise(outputs)))


def network_rows(network: Network) -> list[MemoryRow]:
    """Return every way to train one network."""
    graph = import_module(network.module.eval(), network.shape)
    core, simd = core_costs(network.board), network.board != "mkr1000"
    full, sparse = full_scheme(graph), network.sparse(graph)
    rows = [
        MemoryRow(network.name, "full, fp32, PyTorch (computed)", pytorch_bytes(network.module, network.shape)),
        MemoryRow(network.name, "full, fp32, fused as in TF-Lite (computed)", tflite_bytes(graph)),
        MemoryRow(network.name, "full, int8, all gradients first", _unordered(graph, differentiate(graph), full, simd)),
        _planned(network.name, "full, int8, in place", plan_memory(graph, full, simd=simd), full, core, simd),
        MemoryRow(
            network.name,
            "sparse, int8, all gradients first",
            _unordered(graph, prune(differentiate(graph), sparse), sparse, simd),
        ),
        _planned(network.name, "sparse, int8, in place", plan_memory(graph, sparse, simd=simd), sparse, core, simd),
    ]
    rows += [_fitted(network.name, graph, full, share, core, simd) for share in (0.75, 0.5)]
    rows += [_paged(network.name, graph, full, share, core, simd) for share in network.paged]
    if network.wide_bytes is not None:
        narrow, found = low_bytes_within(network, network.wide_bytes)
        way = f"full, {len(narrow)} of {len(full.updates)} layers int8, the others Q8.8, pages"
        rows.append(MemoryRow(network.name, way, found.memory.ram_bytes, found.seconds, found.joules, found.overhead))
    return rows


def low_bytes_within(network: Network, ram_bytes: int) -> tuple[frozenset[str], FittedMemory]:
    """Return the layers without low bytes if everything is trained within the RAM with pages, and the plan."""
    graph = import_module(network.module.eval(), network.shape)
    options = FitOptions(ram_bytes, core_costs(network.board), page=PageMedium.PSRAM)
    scheme, found = fit_low_bytes(graph, full_scheme(graph).with_low_bytes(), options, simd=network.board != "mkr1000")
    return frozenset(name for name, update in scheme.updates.items() if not update.q88), found


def with_accuracy(rows: Sequence[MemoryRow], measured: Sequence[Row]) -> list[MemoryRow]:
    """Return the rows with the accuracy of each way: all int8 rows of one scheme give the same bits."""
    found = {row.method: row for row in measured}
    names = {"full, fp32": "fp32, all layers", "full, int8": STOCHASTIC_ALL, "sparse, int8": STOCHASTIC_SPARSE}
    names["full, "] = MIXED
    return [
        replace(row, accuracy=next(found[name] for start, name in names.items() if row.way.startswith(start)))
        for row in rows
    ]


def _unordered(graph: Graph, program: SampleProgram, scheme: SparseScheme, simd: bool) -> int:
    return lower_bound(buffers_of(program, scheme, simd)) + parameter_layout(graph, scheme).size_bytes


def _planned(name: str, way: str, plan: MemoryPlan, scheme: SparseScheme, core: CoreCosts, simd: bool) -> MemoryRow:
    stated = board_problem(plan.program, scheme, core, plan.arena.peak_bytes, simd=simd)
    cost = replay(stated.problem, Schedule())
    return MemoryRow(name, way, plan.ram_bytes, cost.seconds, cost.joules, 0.0)


def _fitted(name: str, graph: Graph, scheme: SparseScheme, share: float, core: CoreCosts, simd: bool) -> MemoryRow:
    """Return the plan at a share of the keep-all arena, or at the nearest larger one that has a plan."""
    kept = plan_memory(graph, scheme, simd=simd)
    parameters = kept.parameters.size_bytes
    wanted = parameters + int(share * kept.arena.peak_bytes)
    found = _nearest(graph, scheme, FitOptions(wanted, core), simd)
    reached = (found.memory.arena.peak_bytes) / kept.arena.peak_bytes
    way = f"full, int8, bands and recomputation, {reached:.0%} of the arena"
    return MemoryRow(name, way, found.memory.ram_bytes, found.seconds, found.joules, found.overhead)


def _paged(name: str, graph: Graph, scheme: SparseScheme, share: float, core: CoreCosts, simd: bool) -> MemoryRow:
    """Return the plan at a share of the keep-all RAM, or at the nearest larger one that has a plan."""
    kept = plan_memory(graph, scheme, simd=simd).ram_bytes
    found = _nearest(graph, scheme, FitOptions(int(share * kept), core, page=PageMedium.PSRAM), simd)
    way = f"full, int8, pages, {found.memory.ram_bytes / kept:.0%} of the RAM"
    return MemoryRow(name, way, found.memory.ram_bytes, found.seconds, found.joules, found.overhead)


STEP = 1.03
"""The budget grows by this share until a plan exists."""


def _nearest(graph: Graph, scheme: SparseScheme, options: FitOptions, simd: bool) -> FittedMemory:
    while True:
        try:
            return fit_memory(graph, scheme, options, simd=simd)
        except ArenaBudgetError as error:
            least = max(int(options.ram_bytes * STEP), error.least_bytes or 0)
            options = replace(options, ram_bytes=min(least, error.needed_bytes))


def memory_table(rows: Sequence[MemoryRow]) -> Table:
    """Return the rows as a table, each compared with the whole update of PyTorch."""
    table = Table(title="RAM of one training step of batch 1, bytes; seconds and joules per sample (estimated)")
    learnt = any(row.accuracy for row in rows)
    for heading in (
        "model",
        "update",
        "RAM",
        "below PyTorch",
        "s",
        "mJ",
        "energy",
        *["accuracy, %", "vs fp32"] * learnt,
    ):
        table.add_column(heading, justify="left" if heading in ("model", "update") else "right", no_wrap=True)
    for row in rows:
        first = next(other.ram_bytes for other in rows if other.network == row.network)
        table.add_row(
            row.network,
            row.way,
            f"{row.ram_bytes:,}",
            f"{first / row.ram_bytes:.1f}x",
            "" if row.seconds is None else f"{row.seconds:.3g}",
            "" if row.joules is None else f"{1e3 * row.joules:.3g}",
            "" if row.overhead is None else f"+{row.overhead:.1%}",
            *_accuracy(row.accuracy) * learnt,
        )
    return table


def _accuracy(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    error = "" if row.difference_error is None else f" ± {row.difference_error:.1f}"
    return f"{row.accuracy:.1f}", f"{row.difference:+.1f}{error}"

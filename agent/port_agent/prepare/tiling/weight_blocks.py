"""Read in blocks the weights that take much of the budget."""

from dataclasses import replace

import torch

from port_agent.prepare.measurement.progress import Progress
from port_agent.prepare.tiling import comparing
from port_agent.prepare.tiling.tiled_job import ComparisonLimits, TiledJob
from port_planner import make_bundle
from port_planner.ir.costs import DeviceCosts
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.make_bundle import CapturedJob
from port_planner.tiling.blocks import LargeWeight, blocks_of, large_weights, read_in_blocks
from port_planner.tiling.rewriting import Replacement, compacted

LARGE = 1 / 2
"""Share of the step's own memory above which weights are read in blocks."""

BLOCK = 1 / 8
"""Share of the step's own memory for a block, with the optimizer's state of the same rows."""

COLUMNS_BLOCK = 1 / 4
"""The same share for a block of columns, which is gathered from rows: for each block, all rows are read."""

MAX_BLOCKS = 16
"""Largest number of blocks; with more, transfers would be too small."""


def in_blocks(
    presplit: TiledJob, device: DeviceCosts, ram_bytes: int, allowed: ComparisonLimits, progress: Progress
) -> TiledJob:
    """Return the job with weights that take much of `ram_bytes` in blocks, measured again,
    except those whose bits differ.

    If no weight needs blocks, `captured` stays unchanged, and nothing is measured. Raises DryRunError if a process that
    compares or measures fails.
    """
    captured, own_bytes = presplit.captured, ram_bytes - device.base_bytes
    graphs = captured.graphs
    if own_bytes <= 0 or captured.job.pruning is not None or any(graph.device != CPU for graph in graphs.values()):
        return presplit
    large = [w for w in large_weights(graphs.values(), int(LARGE * own_bytes)) if _can_be_blocks(captured, w)]
    blocks = {w.name: blocks_of(w, *block_counts(w, own_bytes)) for w in large}
    rewritten = {name: read_in_blocks(graph, blocks) for name, graph in graphs.items()}
    left = list(presplit.left_whole)
    for name, found in zip(graphs, comparing.compared(comparing.pairs_of(captured, rewritten), allowed), strict=True):
        left += [f"{d.replacement.what}: {d.where}" for d in found]
        for weight in {weight for d in found for weight in _weights_of(graphs[name], d.replacement)}:
            blocks.pop(weight, None)
    if not blocks:
        return replace(presplit, left_whole=tuple(left)) if large else presplit
    found_graphs = {name: compacted(read_in_blocks(graph, blocks).graph) for name, graph in graphs.items()}
    by_key = {key: blocks[w.name] for w in large if w.name in blocks for key in w.keys}
    made = make_bundle.with_blocks(captured, found_graphs, by_key)
    (measured,) = comparing.with_operator_costs(
        [TiledJob(made, presplit.measured, tuple(left))], allowed, device.compute_watts, progress
    )
    return measured


def block_counts(weight: LargeWeight, own_bytes: int) -> tuple[int, int]:
    """Return the number of blocks of a weight given the step's own bytes, and the number of blocks of columns if it is
    trained.
    """
    block, columns = (max(int(share * own_bytes), 1) for share in (BLOCK, COLUMNS_BLOCK))
    count = -(-weight.nbytes * (1 + len(weight.states)) // block)
    return min(MAX_BLOCKS, count), min(MAX_BLOCKS, -(-weight.nbytes // columns))


def _can_be_blocks(captured: CapturedJob, weight: LargeWeight) -> bool:
    """Return whether weight and state are stored row by row, and the weight has its own contents."""
    layouts = [captured.layouts[key] for key in weight.keys]
    rows = weight.shape, (weight.shape[1], 1), 0
    alike = all((layout.shape, layout.stride, layout.offset) == rows for layout in layouts)
    return alike and isinstance(captured.tensors[weight.keys[0]], torch.Tensor)


def _weights_of(graph: StepGraph, replacement: Replacement) -> set[str]:
    return {graph.storages[s].name for i in replacement.old for s in graph.reads[i]}

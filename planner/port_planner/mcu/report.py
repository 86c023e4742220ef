"""The cost of each layer of a compiled model, and the distance of its int8 results from PyTorch's.

Bytes are those of the tables. Instructions, seconds and joules are estimates of one sample from the counts of
`core_costs`. Errors are measured on the given samples: the firmware's engine on this machine against the float graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from port_planner.mcu.autodiff import PAGE_KINDS, SparseScheme, StepKind
from port_planner.mcu.compile import CompiledModel, compile_quantized
from port_planner.mcu.core_costs import CoreCosts, row_seconds
from port_planner.mcu.host import HostEngine
from port_planner.mcu.ir import OpKind, row_bytes
from port_planner.mcu.quantize import QuantizedOp, run_float

CHANNEL_TABLE_BYTES = 9
"""Bytes of each output channel besides its bias: multiplier, shift and scale."""
GATE_TABLE_BYTES = 8
"""Bytes of each row of a recurrent unit's weights: bias and scale."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one core, estimated for one sample.

    `trained`: forward and backward, as often as the plan runs them.
    """

    instructions: float
    trained_instructions: float
    seconds: float
    trained_seconds: float
    joules: float
    trained_joules: float


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer: sizes in bytes, errors as shares.

    `error`: root mean squared difference from PyTorch, relative to the root mean square of PyTorch's values. `clipped`:
    the share of values outside the int8 range there. `output_bytes` lie in the arena only while they are needed.
    """

    name: str
    kind: str
    shape: str
    macs: int
    output_bytes: int
    parameter_bytes: int
    flash_bytes: int
    error: float
    clipped: float
    costs: Mapping[str, LayerCost]


def layer_figures(
    model: CompiledModel, samples: NDArray[np.float32], cores: Sequence[CoreCosts]
) -> tuple[LayerFigures, ...]:
    """Return the figures of every layer, in execution order; errors are measured on `samples` [N, C, H, W].

    Raises HostBuildError if the engine cannot be built on this machine.
    """
    measured = _errors(model, samples)
    return tuple(
        LayerFigures(
            name=op.op.name,
            kind=op.op.kind.name.lower(),
            shape=str(op.op.out_shape),
            macs=op.op.macs,
            output_bytes=op.op.out_shape.elements * (4 if op.op.kind is OpKind.CLASSIFIER else 1),
            parameter_bytes=_parameter_bytes(model, op),
            flash_bytes=_flash_bytes(op),
            error=measured[op.op.name][0],
            clipped=measured[op.op.name][1],
            costs={core.name: _cost(model, op, core) for core in cores},
        )
        for op in model.quantized.ops
    )


def _parameter_bytes(model: CompiledModel, op: QuantizedOp) -> int:
    update = model.scheme.of(op.op.name)
    weights = update.rows * row_bytes(op.op) * (2 if update.q88 else 1)
    return weights + 4 * op.op.rows * update.bias


def _flash_bytes(op: QuantizedOp) -> int:
    if op.weight is None:
        return sum(array.nbytes for array in (op.table, op.slope) if array is not None)
    return op.weight.size + (GATE_TABLE_BYTES if op.op.kind is OpKind.GRU else 4 + CHANNEL_TABLE_BYTES) * op.op.rows


def _cost(model: CompiledModel, op: QuantizedOp, core: CoreCosts) -> LayerCost:
    graph = model.quantized.graph
    rows = [row for row in model.memory.rows if row.op == op.op.name and row.kind not in PAGE_KINDS]
    forward = sum(
        row_seconds(graph, model.scheme, core, row) for row in rows if row.kind is StepKind.FORWARD and not row.again
    )
    trained = sum(row_seconds(graph, model.scheme, core, row) for row in rows)
    per = core.seconds_per_instruction
    return LayerCost(forward / per, trained / per, forward, trained, forward * core.watts, trained * core.watts)


def _errors(model: CompiledModel, samples: NDArray[np.float32]) -> dict[str, tuple[float, float]]:
    """Return, for each op, its error and the share of its values that are clipped."""
    graph = model.quantized.graph
    with torch.no_grad():
        expected = run_float(graph, torch.from_numpy(np.ascontiguousarray(samples, np.float32)))
    found = _engine_values(model, samples)
    errors = {}
    for op in model.quantized.ops:
        real = expected[op.op.name].permute(0, 2, 3, 1).reshape(len(samples), -1).numpy()
        scale, zero = float(op.output.scale), op.output.zero
        if op.op.kind is OpKind.CLASSIFIER:
            values, clipped = found[op.op.name], 0.0
        else:
            values = scale * (found[op.op.name].astype(np.float32) - zero)
            outside = (real < scale * (-129 - zero)) | (real > scale * (128 - zero))
            clipped = float(outside.mean())
        size = float(np.sqrt(np.mean(real.astype(np.float64) ** 2)))
        difference = float(np.sqrt(np.mean((values.astype(np.float64) - real) ** 2)))
        errors[op.op.name] = (difference / size if size else difference, clipped)
    return errors


def _engine_values(model: CompiledModel, samples: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
    """Return the results of each op in the engine, [N, values]: codes, and logits for the last."""
    plain = compile_quantized(model.quantized, scheme=SparseScheme({}), simd=False)
    ops, engine = plain.quantized.graph.ops, HostEngine(plain)
    seen: dict[str, list[NDArray[np.generic]]] = {op.name: [] for op in ops}

    def record(step: int) -> None:
        op = ops[step]
        if op.kind is not OpKind.CLASSIFIER:
            seen[op.name].append(engine.tensor(op.name, op.out_shape.elements))

    engine.observe(record)
    for row in plain.quantize_input(samples):
        seen[ops[-1].name].append(engine.infer(row)[1])
    return {name: np.stack(values) for name, values in seen.items()}

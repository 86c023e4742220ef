"""Run networks of every kind through the compiler: each must be right, or refused by name. Anything else is a defect.

    python -m benchmarks.mcu_kinds [--only written|random] [--randoms 60] [--json]

Right means, on samples that calibration did not see: the float graph gives what the module gives, the firmware's engine
on this machine what torch gives with every tensor rounded to its int8 format, the kernels for DSP instructions the same
bits as those without, and a step of training moves weights as the module's own gradients say. How far int8 is from the
module is printed too; with random weights it means little. Ends with 1 where a network is neither right nor refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from benchmarks.mcu_networks.kinds import KINDS, NetworkKind, random_kind
from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, UpdateRounding, compile_model
from port_planner.mcu.frontend import SOFTMAX_NOTE
from port_planner.mcu.host import FAST
from port_planner.mcu.ir import KernelCall, McuCompileError, OpKind, row_bytes
from port_planner.mcu.module_trace import softmax_as
from port_planner.mcu.quantize import logits_error, rounded_logits, run_float

SAMPLES, FRESH, TRAINED = 96, 32, 8
FLOAT_ERROR = 1e-3
ENGINE_ERROR = 0.1
"""Root of the mean squared difference of the logits, relative to their spread among samples: rounding goes
the other way now and then.
"""
LEAST_COSINE = 0.75
"""Least cosine between a step's changes and the module's gradients, by layer; int8 activations explain the rest."""
LOST = 0.5
"""With a larger error, the int8 network is not the module's, and neither are its gradients."""
RATES = (0.01, 1.0, 100.0)
"""Weights move in 1/256 and no further than 127: at one of these rates what a layer moves shows its gradient."""


class Verdict(StrEnum):
    """The result for a network."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class KindResult:
    """One network: errors of its logits and the least cosine of its gradients; `note` says why it was refused."""

    name: str
    verdict: Verdict
    float_error: float | None = None
    engine_error: float | None = None
    int8_error: float | None = None
    cosine: float | None = None
    note: str = ""


def judge(kind: NetworkKind) -> KindResult:
    """Compile one network and compare it with its module."""
    module, data = settled_module(kind)
    try:
        model = compile_model(module, data[FRESH:], name=kind.name, q88=True)
    except McuCompileError as error:
        return KindResult(kind.name, Verdict.REFUSED, note=str(error).partition("\n")[0])
    fresh = data[:FRESH]
    with torch.no_grad():
        wanted = module(torch.from_numpy(fresh)).numpy()
        graph = model.quantized.graph
        imported = run_float(graph, torch.from_numpy(fresh))[graph.ops[-1].name].flatten(1).numpy()
        rounded = rounded_logits(model.quantized, fresh)
    engine = HostEngine(model)
    logits = np.stack([engine.infer(row)[1] for row in model.quantize_input(fresh)])
    engine_error = logits_error(logits, rounded)
    if not _is_same_with_dsp(model, engine, fresh):
        return KindResult(kind.name, Verdict.WRONG, note="the DSP kernels give other bits")
    if SOFTMAX_NOTE in graph.notes:
        answer = torch.from_numpy(wanted)
        imported, logits = (softmax_as(answer, torch.from_numpy(values)).numpy() for values in (imported, logits))
    float_error, int8_error = logits_error(imported, wanted), logits_error(logits, wanted)
    cosine = None if int8_error > LOST else _least_cosine(model, engine, module, fresh[:TRAINED])
    right = float_error <= FLOAT_ERROR and engine_error <= ENGINE_ERROR and (cosine is None or cosine >= LEAST_COSINE)
    verdict = Verdict.RIGHT if right else Verdict.WRONG
    return KindResult(kind.name, verdict, float_error, engine_error, int8_error, cosine)


def _is_same_with_dsp(model: CompiledModel, engine: HostEngine, fresh: NDArray[np.float32]) -> bool:
    """Return whether the loops of the kernels for DSP instructions infer and train to the same bits."""
    rows, other, initial = model.quantize_input(fresh), HostEngine(model, FAST), engine.parameters
    same = all((engine.infer(row)[1] == other.infer(row)[1]).all() for row in rows)
    for each in (engine, other):
        each.train_many(rows[:TRAINED], np.arange(TRAINED) % model.quantized.graph.classes)
    same = same and engine.parameters == other.parameters
    engine.parameters = initial
    return same


def settled_module(kind: NetworkKind) -> tuple[nn.Module, NDArray[np.float32]]:
    """Return the module in eval mode, with reproducible weights and batch norms, and samples."""
    torch.manual_seed(0)
    module = kind.make()
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    data = np.random.default_rng(0).normal(size=(SAMPLES, *kind.shape)).astype(np.float32)
    with torch.no_grad():
        for _ in range(20):
            module.train()(torch.from_numpy(data))
    return module.eval(), data


def _least_cosine(
    model: CompiledModel, engine: HostEngine, module: nn.Module, samples: NDArray[np.float32]
) -> float | None:
    """Return the least cosine, over the layers, of the changes by steps from the same weights
    and the module's gradients.
    """
    layers = [op for op in model.quantized.graph.weighted() if op.trains_weight and op.origin and not op.origin.norm]
    rows = model.quantize_input(samples)
    labels = np.arange(len(rows)) % model.quantized.graph.classes
    initial, moved = engine.parameters, {op.name: np.zeros((len(RATES), op.weight_count)) for op in layers}
    for number, rate in enumerate(RATES):
        engine.set_options(UpdateOptions(rate, UpdateRounding.Q88))
        for row, label in zip(rows, labels, strict=True):
            engine.parameters = initial
            engine.train(row, int(label))
            for op in layers:
                moved[op.name][number] += _weights(model, op, initial) - _weights(model, op, engine.parameters)
    answer = module(torch.from_numpy(samples))
    if SOFTMAX_NOTE in model.quantized.graph.notes and float(answer.detach().max()) > 0:
        answer = answer.log()
    F.cross_entropy(answer, torch.from_numpy(labels)).backward()
    return min(
        (cosine for op in layers if (cosine := _cosine(model, op, module, moved[op.name])) is not None), default=None
    )


def _weights(model: CompiledModel, op: KernelCall, image: bytes) -> NDArray[np.float64]:
    slot, count = model.memory.parameters.slots[op.name], op.rows * row_bytes(op)
    high = np.frombuffer(image, np.int8, count, slot.weight_offset or 0).astype(np.float64)
    return np.add(high, (np.frombuffer(image, np.uint8, count, slot.q88_offset or 0).astype(np.float64) - 128) / 256)


def _cosine(model: CompiledModel, op: KernelCall, module: nn.Module, moved: NDArray[np.float64]) -> float | None:
    """Return the cosine of one layer; None if nothing moves, or if the layer is used again."""
    assert op.origin is not None and op.weight is not None
    gradient = module.get_parameter(op.origin.weight).grad
    quantized = next(each for each in model.quantized.ops if each.op is op)
    if gradient is None or quantized.weight_scale is None:
        return None
    wanted = gradient.numpy().reshape(op.origin.extents).transpose(op.origin.order).reshape(op.weight.shape)
    scale = quantized.weight_scale if op.kind is OpKind.DEPTHWISE else quantized.weight_scale.reshape(-1, 1, 1, 1)
    expected = (wanted / scale).reshape(-1)
    sizes = np.linalg.norm(expected) * np.linalg.norm(moved, axis=1)
    found = [float(expected @ each) / size for each, size in zip(moved, sizes, strict=True) if size > 1e-9]
    return max(found, default=None)


def markdown(results: Sequence[KindResult]) -> str:
    """Return the table, and the count of every verdict."""
    counts = ", ".join(f"{sum(found.verdict is verdict for found in results)} {verdict}" for verdict in Verdict)
    lines = [
        f"{len(results)} networks: {counts}.",
        "",
        "| network | | float | engine | int8 | gradients | |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in results:
        figures = " | ".join(
            "" if value is None else f"{value:.2g}"
            for value in (found.float_error, found.engine_error, found.int8_error, found.cosine)
        )
        lines.append(f"| {found.name} | {found.verdict} | {figures} | {found.note.replace('|', '/')} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every kind; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description="networks of every kind: right or refused")
    parser.add_argument("--only", choices=["written", "random"])
    parser.add_argument("--randoms", type=int, default=60, help="how many random networks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kinds = [] if options.only == "random" else list(KINDS)
    kinds += [] if options.only == "written" else [random_kind(seed) for seed in range(options.randoms)]
    results = [judge(kind) for kind in kinds]
    print(json.dumps([asdict(found) for found in results], indent=1) if options.json else markdown(results))
    return int(any(found.verdict is Verdict.WRONG for found in results))


if __name__ == "__main__":
    raise SystemExit(main())

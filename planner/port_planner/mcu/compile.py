"""Compile a PyTorch module and calibration data into C tables with a static memory plan."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from port_planner.mcu.autodiff import SparseScheme, StepKind, full_scheme
from port_planner.mcu.choose_plan import FitOptions, FittedMemory
from port_planner.mcu.emit import GeneratedModel, emit_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Loss, McuCompileError, OpKind
from port_planner.mcu.low_bytes import fit_low_bytes
from port_planner.mcu.memory import MemoryPlan, plan_memory
from port_planner.mcu.quantize import Int8Array, QuantizedGraph, quantize


@dataclass(frozen=True, slots=True, eq=False)
class CompiledModel:
    """A model ready for firmware: quantised graph, training program, memory plan and generated C."""

    name: str
    quantized: QuantizedGraph
    scheme: SparseScheme
    memory: MemoryPlan
    generated: GeneratedModel

    @property
    def ram_bytes(self) -> int:
        return self.memory.ram_bytes

    @property
    def sha256(self) -> bytes:
        return self.generated.sha256

    @property
    def simd(self) -> bool:
        """Whether the arena has the scratch that the DSP kernels need."""
        graph = self.quantized.graph
        forward = (row for row in self.memory.rows if row.kind is StepKind.FORWARD)
        return any(row.scratch and graph.op(row.op).kind is OpKind.CONV for row in forward)

    @property
    def q88(self) -> bool:
        """Whether the weights of at least one layer have low bytes."""
        return self.scheme.q88

    def quantize_input(self, samples: NDArray[np.float32]) -> Int8Array:
        """Return samples [N, C, H, W] or [N, C, W] as the int8 rows the device takes."""
        return self.quantized.quantize_input(samples)

    def write(self, directory: Path | str) -> tuple[Path, Path]:
        """Write model.h and model.c into `directory`, each atomically; return their paths."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        return _replace(folder / "model.h", self.generated.header), _replace(folder / "model.c", self.generated.source)


def _replace(path: Path, text: str) -> Path:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    return path


def compile_model(
    module: nn.Module,
    calibration: NDArray[np.float32],
    *,
    name: str = "model",
    loss: Loss = Loss.CROSS_ENTROPY,
    scheme: SparseScheme | None = None,
    budget: int | None = None,
    q88: bool = False,
    simd: bool = True,
) -> CompiledModel:
    """Return the compiled model of a PyTorch module.

    `calibration` is [N, C, H, W] or [N, C, W]. `loss`: what training lowers. `scheme`: what is trained (None:
    everything; an empty scheme compiles for inference). `budget`: bytes for the arena and the trained parameters;
    tensors that do not fit are recomputed (`recompile` adds a deadline and the board whose costs decide). `q88` gives
    low bytes to all trained weights, or to those that fit the budget. `simd` gives the convolutions scratch for the DSP
    kernels, which a Cortex-M0 does not have. Raises McuCompileError, ArenaBudgetError.
    """
    samples = calibration_samples(calibration)
    graph = import_module(module, calibration.shape[1:], name, samples, loss)
    quantized = quantize(graph, samples.numpy())
    return compile_quantized(quantized, scheme=scheme, budget=budget, q88=q88, simd=simd)


def calibration_samples(calibration: NDArray[np.float32]) -> torch.Tensor:
    """Return calibration data as torch takes it.

    Raises McuCompileError unless they are an array of finite real samples.
    """
    data = np.asarray(calibration)
    if data.ndim not in (2, 3, 4) or not data.size:
        raise McuCompileError(
            "calibration", f"an array of shape {list(data.shape)}", "give samples as [N, C, H, W], [N, C, W] or [N, C]"
        )
    if data.dtype.kind not in "fiub":
        raise McuCompileError("calibration", f"values of type {data.dtype}", "give real numbers")
    wrong = int(data.size - np.isfinite(data).sum())
    if wrong:
        raise McuCompileError("calibration", f"{wrong:,} of {data.size:,} values are NaN or infinite", "leave them out")
    return torch.from_numpy(np.ascontiguousarray(data, np.float32))


def compile_quantized(
    model: QuantizedGraph,
    *,
    scheme: SparseScheme | None = None,
    budget: int | None = None,
    fit: FitOptions | None = None,
    q88: bool = False,
    simd: bool = True,
) -> CompiledModel:
    """Return the compiled model of an already quantised graph, for one scheme of several.

    Raises ArenaBudgetError if the scheme does not fit the budget, BoardDeadlineError if it is not fast enough.
    """
    scheme = full_scheme(model.graph) if scheme is None else scheme
    if q88:
        scheme = scheme.with_low_bytes()
    if fit is None and budget is not None:
        fit = FitOptions(budget)
    if fit is None:
        memory = plan_memory(model.graph, scheme, simd=simd)
    else:
        scheme, fitted = fit_low_bytes(model.graph, scheme, fit, simd=simd)
        memory = fitted.memory
    name = model.graph.name
    return CompiledModel(name, model, scheme, memory, emit_model(model, memory, scheme, name))


def recompile(model: CompiledModel, fit: FitOptions) -> tuple[CompiledModel, FittedMemory]:
    """Return a model that trains the same parameters within other limits, and the cost of its plan.

    Layers whose low bytes do not fit lose them.

    """
    scheme, fitted = fit_low_bytes(model.quantized.graph, model.scheme, fit, simd=model.simd)
    return with_memory(model, scheme, fitted.memory), fitted


def with_memory(model: CompiledModel, scheme: SparseScheme, memory: MemoryPlan) -> CompiledModel:
    """Return the model with another scheme, laid out as in `memory`."""
    generated = emit_model(model.quantized, memory, scheme, model.name)
    return replace(model, scheme=scheme, memory=memory, generated=generated)


def choose_channels(model: CompiledModel, share: float) -> CompiledModel:
    """Return the model with dynamic partial updates: a step trains this share of each layer's channels.

    Raises McuCompileError for a share outside (0, 1].
    """
    scheme = replace(model.scheme, chosen=share)
    return compile_quantized(model.quantized, scheme=scheme, simd=model.simd)


def with_growth(model: CompiledModel, calibration: NDArray[np.float32], growth: float) -> CompiledModel:
    """Return the model with ranges in which weights and activations may become `growth` times as large
    as their largest value now.

    This is for a module that learns from random weights. `calibration` [N, C, H, W] or [N, C, W] gives the ranges of
    all tensors but the input's, which stays. Raises McuCompileError for a `growth` below 1.
    """
    quantized, samples = model.quantized, calibration_samples(calibration).numpy()
    wide = quantize(quantized.graph, samples, growth, growth, quantized.input)
    return compile_quantized(wide, scheme=model.scheme, simd=model.simd)


def with_low_bytes(model: CompiledModel) -> CompiledModel:
    """Return the model with a low byte for every trained weight, which the Q8.8 rule of updates needs."""
    return compile_quantized(model.quantized, scheme=model.scheme, q88=True, simd=model.simd)

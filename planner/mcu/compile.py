"""The compiler's front door.

A PyTorch module and calibration data in, C tables with a static memory plan out.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from planner.mcu.autodiff import SparseScheme, full_scheme
from planner.mcu.emit import GeneratedModel, emit_model
from planner.mcu.fates.choose import FitOptions, FittedMemory, fit_memory
from planner.mcu.frontend import import_module
from planner.mcu.memory import MemoryPlan, plan_memory
from planner.mcu.quantize import HEADROOM, Int8Array, QuantizedGraph, quantize


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
        return any(row.scratch for row in self.memory.rows)

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
    scheme: SparseScheme | None = None,
    budget: int | None = None,
    fit: FitOptions | None = None,
    q88: bool = False,
    simd: bool = True,
    headroom: float = HEADROOM,
) -> CompiledModel:
    """Return the compiled model of a PyTorch module.

    `calibration` is [N, C, H, W] or [N, C, W]. `scheme` says what is trained (None: everything; an empty scheme compiles for
    inference); `budget` in bytes covers the arena and the trained parameters, and what it does not hold is computed again;
    `fit` says more: a deadline, whose costs decide. `simd` gives the convolutions scratch for the DSP kernels, which a
    Cortex-M0 has no use for. Raises McuCompileError, ArenaBudgetError, BoardDeadlineError.
    """
    graph = import_module(module, calibration.shape[1:], name)
    quantized = quantize(graph, calibration, headroom)
    return compile_quantized(quantized, scheme=scheme, budget=budget, fit=fit, q88=q88, simd=simd)


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

    Raises ArenaBudgetError where the scheme does not fit the budget, BoardDeadlineError where it is not fast enough.
    """
    scheme = full_scheme(model.graph) if scheme is None else scheme
    if fit is None and budget is not None:
        fit = FitOptions(budget)
    if fit is None:
        memory = plan_memory(model.graph, scheme, q88=q88, simd=simd)
    else:
        memory = fit_memory(model.graph, scheme, fit, q88=q88, simd=simd).memory
    name = model.graph.name
    return CompiledModel(name, model, scheme, memory, emit_model(model, memory, scheme, name))


def recompile(model: CompiledModel, fit: FitOptions) -> tuple[CompiledModel, FittedMemory]:
    """Return a model that trains the same parameters within other limits, and what its plan takes.

    Raises ArenaBudgetError, BoardDeadlineError.
    """
    graph, name = model.quantized.graph, model.name
    fine = any(slot.q88_offset is not None for slot in model.memory.parameters.slots.values())
    fitted = fit_memory(graph, model.scheme, fit, q88=fine, simd=model.simd)
    generated = emit_model(model.quantized, fitted.memory, model.scheme, name)
    return CompiledModel(name, model.quantized, model.scheme, fitted.memory, generated), fitted

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

from planner.ir.errors import ExitCode, PortError
from planner.mcu.autodiff import SparseScheme, full_scheme
from planner.mcu.emit import GeneratedModel, emit_model
from planner.mcu.frontend import import_module
from planner.mcu.memory import MemoryPlan, plan_memory, scratch_of
from planner.mcu.quantize import HEADROOM, Int8Array, QuantizedGraph, quantize


class ArenaBudgetError(PortError):
    """A model or scheme that needs more RAM than it was given."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, needed_bytes: int, budget_bytes: int, arena_bytes: int, parameter_bytes: int) -> None:
        super().__init__(
            f"needs {needed_bytes} B of RAM (arena {arena_bytes} B + trained parameters {parameter_bytes} B), budget is "
            f"{budget_bytes} B; train fewer layers (search a scheme for this budget) or raise the budget"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


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
        names = {buffer.name for buffer in self.memory.arena.buffers}
        return any(scratch_of(op.name) in names for op in self.quantized.graph.ops)

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
    q88: bool = False,
    simd: bool = True,
    headroom: float = HEADROOM,
) -> CompiledModel:
    """Return the compiled model of a PyTorch module.

    `calibration` is [N, C, H, W] or [N, C, W]. `scheme` says what is trained (None: everything; an empty scheme compiles for
    inference); `budget` in bytes covers the arena and the trained parameters. `simd` gives the convolutions scratch for
    the DSP kernels, which a Cortex-M0 has no use for. Raises McuCompileError, BudgetError.
    """
    graph = import_module(module, calibration.shape[1:], name)
    return compile_quantized(quantize(graph, calibration, headroom), scheme=scheme, budget=budget, q88=q88, simd=simd)


def compile_quantized(
    model: QuantizedGraph,
    *,
    scheme: SparseScheme | None = None,
    budget: int | None = None,
    q88: bool = False,
    simd: bool = True,
) -> CompiledModel:
    """Return the compiled model of an already quantised graph, for one scheme of several.

    Raises ArenaBudgetError where the scheme does not fit the budget.
    """
    scheme = full_scheme(model.graph) if scheme is None else scheme
    memory = plan_memory(model.graph, scheme, q88=q88, simd=simd)
    if budget is not None and memory.ram_bytes > budget:
        raise ArenaBudgetError(memory.ram_bytes, budget, memory.arena.peak_bytes, memory.parameters.size_bytes)
    name = model.graph.name
    return CompiledModel(name, model, scheme, memory, emit_model(model, memory, scheme, name))

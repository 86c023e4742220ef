"""The data type in which a fine-tuning computes over frozen 16-bit weights: as stored, or 32 bits if that is faster on this machine."""

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from port_agent.finetuning.checkpoint import checkpoint_path
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.quantized.widened import SHORT
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import outline
from port_planner.exactness.half_products import in_software, slowdown
from port_planner.ir.device_kinds import CPU

_WORTH = 3.0
"""Ratio by which a product must be slower in 16 bits to switch to 32: the bits differ, so noise must not decide. In software the ratio
is 8 to 21; 1.8 was measured beside other work on a processor that multiplies 16 bits.
"""

_MAX_ROWS, _MIN_SIDE, _MAX_SIDE = 64, 256, 1024
"""Bounds of the measured product, which has the model's own shape within them; a smaller product is mostly call overhead."""


@dataclass(frozen=True, slots=True)
class ComputeChoice:
    """The type to compute in, and why; "" if there was nothing to choose."""

    compute: Compute
    why: str = ""


def choose_compute(options: FinetuneOptions, task: Task, round: str | None = None) -> tuple[FinetuneOptions, str]:
    """Return the options with the type to compute in, and the reason, which is "" if there was nothing to choose.

    The type is the requested one, or else that of the checkpoint, or else the one in which a product of the model's shape was measured
    faster. `round`: name of a federation's round. Raises FinetuneError if the requested type is impossible.
    """
    choice = _choice(options, task, round)
    return replace(options, compute=choice.compute), choice.why


def _choice(options: FinetuneOptions, task: Task, round: str | None) -> ComputeChoice:
    if options.dora and options.base is not None:
        raise FinetuneError(
            f"--dora measures the rows of a weight, which a quantized one (--base {options.base}) does not have; "
            "give one of them"
        )
    if options.device != CPU:
        return ComputeChoice(Compute.STORED)
    fixed = options.base is not None or options.autocast or options.dora
    if options.compute is Compute.FLOAT32 and fixed:
        other = "--autocast" if options.autocast else "--dora" if options.dora else f"--base {options.base}"
        raise FinetuneError(f"{other} already sets the type to compute in, as does --compute float32; give one of them")
    if fixed or options.lora_rank is None or task.kind is TaskKind.CLASSIFICATION:
        return ComputeChoice(Compute.STORED)
    model = outline(Path(options.model), task)
    if model.dtype not in SHORT:
        return ComputeChoice(Compute.STORED)
    name = str(model.dtype).removeprefix("torch.")
    if options.compute is not None:
        return ComputeChoice(options.compute, "as asked for" if options.compute is Compute.FLOAT32 else "")
    kept = _kept(options, round)
    if kept is not None:
        return ComputeChoice(kept, "as in the checkpoint" if kept is Compute.FLOAT32 else "")
    times = slowdown(model.dtype, _shape(model, options.sequence_tokens))
    if times < _WORTH:
        return ComputeChoice(
            Compute.STORED, f"{name} in software is not slower here" if in_software(model.dtype) else ""
        )
    return ComputeChoice(Compute.FLOAT32, f"a product of its layers takes {times:.1f} times as long in {name} here")


def _shape(model: Any, tokens: int) -> tuple[int, int, int]:
    """Return rows, inner size and columns of the largest product of the layers, within bounds."""
    head = model.get_output_embeddings()
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    outputs, inputs = max(shapes, key=lambda shape: shape.numel(), default=(_MAX_SIDE, _MAX_SIDE))
    inner, columns = (min(max(size, _MIN_SIDE), _MAX_SIDE) for size in (inputs, outputs))
    return min(tokens, _MAX_ROWS), inner, columns


def _kept(options: FinetuneOptions, round: str | None) -> Compute | None:
    """Return the type in which the existing checkpoint computes; None if there is none, or if it is unreadable, which is reported later."""
    path = checkpoint_path(options, round)
    try:
        found = torch.load(path, map_location=CPU, weights_only=True, mmap=True)
        return Compute(found.get("compute", Compute.STORED))
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile):
        return None

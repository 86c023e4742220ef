"""Whether the micro-batches of an update run one at a time or layer by layer, and why; decided by sizes alone."""

from dataclasses import dataclass
from typing import Any

from port_agent.finetuning.accumulation.by_layers import why_not_by_layers
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.text.task import Task, TaskKind
from port_planner.base.units import format_bytes

_SPARED_BYTES = 16 << 20
"""Largest number of bytes that an update of adapters may write to wearing flash; beyond it,
layers are recomputed instead.

A card of 32 GB endures about a million such updates.
"""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How micro-batches run, and why."""

    by_layers: bool
    why: str


def accumulation_of(
    model: Any, options: FinetuneOptions, task: Task, weights_bytes: int, free_bytes: int | None, flash_bytes: int = 0
) -> Accumulation:
    """Return how the micro-batches of a model run; both orders give the same bits.

    `model`: a model without adapters. `weights_bytes`: everything that stays from one micro-batch to the next: the
    weights that a step multiplies by, gradients and moments. `free_bytes`: memory for these and all tensors, None
    without a budget. `flash_bytes`: what an update wrote to flash that wears out when batches ran one at a time. If
    more than adapters are trained, the trained weights must be written either way. A single batch may also run layer by
    layer, because then none of a layer's tensors are kept for the backward pass. Raises FinetuneError if layer by layer
    is asked for and impossible.
    """
    writes = options.lora_rank is not None and flash_bytes > _SPARED_BYTES
    if options.accumulate == 1 and options.accumulate_by is None and not writes:
        return Accumulation(
            False,
            "an update has one batch; it runs layer by layer once an update writes more than "
            f"{format_bytes(_SPARED_BYTES)} to flash that wears out",
        )
    why = why_not_by_layers(model) if task.kind is TaskKind.CAUSAL_LM else "the model has an encoder"
    if options.borders or options.learns_pairs:
        why = (
            "its packed texts are masked from each other" if options.borders else "an update compares pairs of answers"
        )
    if why is not None and options.accumulate_by is MicroBatchOrder.LAYERS:
        raise cannot_run_by_layers(why)
    if why is not None:
        return Accumulation(False, why)
    if options.accumulate_by is not None:
        return Accumulation(options.accumulate_by is MicroBatchOrder.LAYERS, "as asked for")
    if writes:
        return Accumulation(
            True,
            f"an update writes {format_bytes(flash_bytes)} to flash, which wears out; layers are computed once more "
            "instead",
        )
    if free_bytes is None:
        return Accumulation(False, "there is no budget")
    if weights_bytes <= free_bytes:
        return Accumulation(
            False,
            f"weights, gradients and moments of {format_bytes(weights_bytes)} fit into the budget and are not read "
            "again",
        )
    return Accumulation(
        True,
        f"weights, gradients and moments of {format_bytes(weights_bytes)} do not fit into "
        f"{format_bytes(max(free_bytes, 0))}: they are read once in each direction and update, not for each batch, "
        "and each layer is computed once more",
    )


def cannot_run_by_layers(why: str) -> FinetuneError:
    """Return the error for a model that cannot run layer by layer although that was requested."""
    return FinetuneError(f"the batches of this model cannot run layer by layer: {why}; leave out --accumulate-by")

"""What a fine-tuning is asked to do."""

import enum
from dataclasses import dataclass

from port_agent.packing.quantized import Quantization
from port_planner.base.errors import ExitCode, PortError


class FinetuneError(PortError):
    """A model directory, data or settings that cannot be trained with."""

    exit_code = ExitCode.IMPOSSIBLE


class MicroBatchOrder(enum.StrEnum):
    """How the batches of an update run: each through the whole model, or all of them together through each layer."""

    BATCHES = "batches"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """The recipe's settings.

    `data`: files and directories. `valid`: those that are held out instead of a share of `data`.
    `base`: the grid that the frozen weights are put on (`port_agent.packing.Quantization`), None to leave them as they are.
    `lora_rank`: of the adapters, None to train all weights. `targets`: ends of the names of the layers that get adapters,
    () for those that peft takes for this kind of model. `sequence_tokens`: the longest sequence. `accumulate`: sequences
    per update. `accumulate_by`: the order in which they run, with the same bits; None for the one that moves less. `autocast`: forward passes
    run in bfloat16 where torch's autocast does so, weights staying as they are. `head_rows`: of the logits at a time, None for all of a batch. `updates`: so many instead of `epochs`. `held_out`: the share of the sequences that is not trained on.
    `date`: what chat templates take for today (YYYY-MM-DD); "": the day on which they are asked.
    `show_data`: how many sequences are made text again, for people.
    """

    model: str
    data: tuple[str, ...]
    out: str
    lora_rank: int | None = 8
    base: Quantization | None = None
    targets: tuple[str, ...] = ()
    sequence_tokens: int = 256
    batch: int = 1
    accumulate: int = 1
    accumulate_by: MicroBatchOrder | None = None
    autocast: bool = False
    head_rows: int | None = None
    epochs: int = 1
    updates: int | None = None
    learning_rate: float = 2e-4
    held_out: float = 0.05
    valid: tuple[str, ...] = ()
    seed: int = 0
    sample: str | None = None
    date: str = ""
    show_data: int = 1
    json: bool = False

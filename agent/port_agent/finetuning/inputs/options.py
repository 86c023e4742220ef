"""What a fine-tuning is asked to do."""

import enum
from dataclasses import dataclass

from port_agent.finetuning.inputs.schedule import RateSchedule
from port_agent.packing.quantized import Quantization
from port_planner.base.errors import ExitCode, PortError


class FinetuneError(PortError):
    """A model directory, data or settings that cannot be trained with."""

    exit_code = ExitCode.IMPOSSIBLE


class MicroBatchOrder(enum.StrEnum):
    """How the batches of an update run: each through the whole model, or all of them together through each layer."""

    BATCHES = "batches"
    LAYERS = "layers"


class Compute(enum.StrEnum):
    """What a step over frozen weights of 16 bits computes in: numbers as they are stored, or 32 bits."""

    STORED = "stored"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """The recipe's settings.

    `data`: files and directories. `valid`: those that are held out instead of a share of `data`.
    `base`: the grid that the frozen weights are put on (`port_agent.packing.Quantization`), None to leave them as they are.
    `lora_rank`: of the adapters, None to train all weights. `targets`: ends of the names of the layers that get adapters,
    () for those that peft takes for this kind of model. `sequence_tokens`: the longest sequence. `accumulate`: sequences
    per update. `compute`: what a step computes in, None for what is faster here. `accumulate_by`: the order in which they run, with the same bits; None for the one that moves less. `autocast`: forward passes
    run in bfloat16 where torch's autocast does so, weights staying as they are. `head_rows`: of the logits at a time, None for all of a batch. `updates`: so many instead of `epochs`. `held_out`: the share of the sequences that is not trained on.
    `begin_from`: the directory of the adapter that is trained further. `alpha`: adapters' products are scaled by it, divided by the rank or
    with `rslora` by its root; None for twice the rank. `dora`: each adapted row of a weight has a trained magnitude. `dropout`: the share of an adapter's inputs that is left out at random. `warm_up`: the share of the
    updates until `learning_rate` is reached.
    `evaluate_every`: updates between two looks at what is held out, of which the best weights are the result; None: before and after all alone.
    `patience`: so many looks without a better one end the training.
    `dpo`: the beta by which pairs of answers are learned, the preferred and the rejected one; None for answers alone.
    `borders`: texts that are packed into one sequence do not see each other.
    `events`: the directory of TensorBoard's files that losses are added to, None for none.
    `date`: what chat templates take for today (YYYY-MM-DD); "": the day on which they are asked.
    `float32_result`: whether a model that is trained whole is written in 32 bits, not as its files were.
    `overwrite`: whether what is at `out` is replaced. `show_data`: how many sequences are made text again, for people.
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
    compute: Compute | None = None
    head_rows: int | None = None
    epochs: int = 1
    updates: int | None = None
    learning_rate: float = 2e-4
    held_out: float = 0.05
    valid: tuple[str, ...] = ()
    begin_from: str | None = None
    alpha: float | None = None
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    weight_decay: float = 0.0
    warm_up: float = 0.03
    schedule: RateSchedule = RateSchedule.LINEAR
    evaluate_every: int | None = None
    patience: int | None = None
    events: str | None = None
    borders: bool = False
    dpo: float | None = None
    seed: int = 0
    sample: str | None = None
    date: str = ""
    show_data: int = 1
    overwrite: bool = False
    float32_result: bool = False
    json: bool = False

    @property
    def sequences_at_once(self) -> int:
        """How many sequences a batch has in memory: of a pair of answers both."""
        return self.batch if self.dpo is None else 2 * self.batch

"""The options of a fine-tuning."""

import enum
from dataclasses import dataclass

from port_agent.finetuning.inputs.schedule import RateSchedule
from port_agent.packing.quantized import Quantization
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.device_kinds import CPU


class FinetuneError(PortError):
    """A model directory, data or settings that cannot be used for training."""

    exit_code = ExitCode.IMPOSSIBLE


class MicroBatchOrder(enum.StrEnum):
    """How the batches of an update run: each through the whole model, or all of them together through each layer."""

    BATCHES = "batches"
    LAYERS = "layers"


class Compute(enum.StrEnum):
    """The type in which a step over frozen 16-bit weights computes: as they are stored, or 32 bits."""

    STORED = "stored"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """The settings of a fine-tuning.

    `data`: files and directories. `valid`: files held out instead of a share of `data`. `base`: the quantization of the frozen weights
    (`port_agent.packing.Quantization`), None to leave them as they are. `lora_rank`: rank of the adapters, None to train all weights.
    `targets`: ends of the names of the layers that get adapters, () for peft's choice for this kind of model. `sequence_tokens`: length of
    the longest sequence. `answer_tokens`: the same for an answer with the text before it, if that is more. `accumulate`: batches per
    update. `compute`: the type that a step computes in, None for the faster one here. `accumulate_by`: the order in which batches run, with
    the same bits; None for the one that moves less. `autocast`: forward passes run under torch's bfloat16 autocast, and weights stay as
    they are. `head_rows`: of the logits at a time, None for all of a batch. `updates`: number of updates, instead of `epochs`. `held_out`:
    the share of the sequences that is not trained on.

    `begin_from`: the directory of the adapter that is trained further. `alpha`: the adapters' products are scaled by
    it, divided by the rank or with `rslora` by its square root; None for twice the rank. `dora`: each adapted row of a
    weight has a trained magnitude. `dropout`: the share of an adapter's inputs that is set to zero at random.
    `warm_up`: the share of the updates in which the rate rises to `learning_rate`.

    `evaluate_every`: updates between two evaluations of held-out data, of which the best weights are the result; None:
    only before and after. `patience`: evaluations without improvement that end the training. `dpo` and
    `orpo`: the beta of learning from pairs of a preferred and a rejected answer by that loss; both None for answers
    alone. `proximal_mu`: FedProx; the adapters are held near those that training or a round of a federation begins with
    (`port_planner.proximal`). `borders`: texts packed into one
    sequence are masked from each other. `events`: the directory of TensorBoard files that losses are added to, None for
    none. `date`: today's date for chat templates (YYYY-MM-DD); "": the day on which they are asked. `float32_result`:
    whether a fully trained model is written in 32 bits, not in its files' type. `overwrite`: whether the contents of
    `out` are replaced. `show_data`: number of sequences that are decoded to text for people. `device`: the kind of device that
    computes.
    """

    model: str
    data: tuple[str, ...]
    out: str
    lora_rank: int | None = 8
    base: Quantization | None = None
    targets: tuple[str, ...] = ()
    sequence_tokens: int = 256
    answer_tokens: int = 0
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
    orpo: float | None = None
    proximal_mu: float | None = None
    seed: int = 0
    sample: str | None = None
    date: str = ""
    show_data: int = 1
    overwrite: bool = False
    float32_result: bool = False
    json: bool = False
    device: str = CPU

    @property
    def sequences_at_once(self) -> int:
        """Number of sequences of a batch in memory; both answers of a pair count."""
        return 2 * self.batch if self.learns_pairs else self.batch

    @property
    def learns_pairs(self) -> bool:
        """Whether a record is a pair of answers."""
        return self.dpo is not None or self.orpo is not None

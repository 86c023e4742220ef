"""The README.md of a fine-tuning's result: its base model, amount of data and settings. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.text.task import Task, TaskKind

MODEL_CARD = "README.md"
"""Name of the file in the result's directory, where the Hugging Face hub looks for it."""

CLIP_NORM = 1.0
"""Norm to which the gradient of an update is clipped, over everything trained."""


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """Where a result came from: sequences for `train` and `held_out`, `updates` made, and mean held-out losses, None
    without held-out data.
    """

    train: int
    held_out: int
    updates: int
    loss_before: float | None
    loss_after: float | None


def model_card(options: FinetuneOptions, task: Task, layers: Iterable[str], trained: TrainedOn) -> str:
    """Return the card; `layers`: ends of the names of the layers with adapters."""
    adapters = options.lora_rank is not None
    what = "A LoRA adapter" if adapters else "A model, all of whose weights were trained"
    header = (
        "---",
        f"base_model: {options.model}",
        f"library_name: {'peft' if adapters else 'transformers'}",
        *(("tags:", "- lora") if adapters else ()),
        "---",
    )
    rows = (f"| {name} | {value} |" for name, value in _rows(options, task, layers, trained))
    title = f"# {Path(options.out).name}"
    summary = f"{what} for `{Path(options.model).name}`, made by `port-agent finetune`."
    return "\n".join((*header, "", title, "", summary, "", "| | |", "|---|---|", *rows, ""))


def _learns(options: FinetuneOptions, task: Task) -> str:
    if options.dpo is not None:
        return (
            f"the preferred of two answers, by DPO with beta {options.dpo:g} relative to the model without the adapter"
        )
    if options.orpo is not None:
        return f"the preferred of two answers with its prompt, and its odds over the other, by ORPO with beta {options.orpo:g}"
    return task.kind.value


def _rows(options: FinetuneOptions, task: Task, layers: Iterable[str], trained: TrainedOn) -> Iterable[tuple[str, str]]:
    yield "learns", _learns(options, task)
    files = ", ".join(Path(path).name for path in options.data)
    yield (
        "data",
        f"{files}: {trained.train:,} sequences, of at most {max(options.sequence_tokens, options.answer_tokens)} tokens",
    )
    if task.kind is TaskKind.CAUSAL_LM:
        borders = "and masked from each other" if options.borders else "without borders"
        yield (
            "texts",
            f"packed one after another to full sequences, {borders}; prompts, answers and conversations stand alone",
        )
    if options.lora_rank is not None:
        yield "adapters", _adapters(options, options.lora_rank, layers)
        grid = "as they are stored" if options.base is None else f"quantized to {options.base.value}"
        yield "frozen weights", grid
    yield (
        "optimizer",
        f"AdamW (betas 0.9 and 0.999, epsilon 1e-8), weight decay {options.weight_decay:g}; gradients clipped to a "
        f"norm of {CLIP_NORM:g}",
    )
    yield (
        "rate",
        f"{options.learning_rate:g} after {options.warm_up:.0%} of the updates, {options.schedule.value} afterwards",
    )
    each = "pairs" if options.learns_pairs else "learned tokens"
    yield (
        "updates",
        f"{trained.updates:,} of {options.accumulate} x {options.batch} sequences; the loss is the mean over an "
        f"update's {each}",
    )
    yield "seed", str(options.seed)
    if options.date:
        yield "date in chat templates", options.date
    if trained.loss_before is not None and trained.loss_after is not None:
        losses = f"{trained.loss_before:.4f} before, {trained.loss_after:.4f} after"
        yield "held-out loss", f"{losses}, of {trained.held_out:,} sequences"


def _adapters(options: FinetuneOptions, rank: int, layers: Iterable[str]) -> str:
    alpha = 2 * rank if options.alpha is None else options.alpha
    root = "the root of the rank" if options.rslora else "the rank"
    kind = "DoRA, " if options.dora else ""
    return (
        f"{kind}rank {rank} on {', '.join(layers)}; scaled by alpha {alpha:g} over {root}; dropout {options.dropout:g}"
    )

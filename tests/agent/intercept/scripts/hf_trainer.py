"""transformers' Trainer with evaluation, clipping, accumulation and checkpoints, then resumed; argument: its folder."""

import sys
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Sentences(torch.utils.data.Dataset):
    """Sentences of varying length and their class."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(16, 65, (count,), generator=generator).tolist()
        self.rows = [torch.randint(5, 2000, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index].sum() % 3}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def trainer(folder: Path, steps: int) -> Trainer:
    """Return a trainer whose model is made anew from the same seed."""
    set_seed(0)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=3,
    )
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=steps, eval_strategy="steps",
        eval_steps=2, save_steps=2, logging_steps=1, max_grad_norm=0.5, warmup_steps=1, learning_rate=1e-3, report_to=[],
        use_cpu=True, seed=3, disable_tqdm=True, load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    return Trainer(
        BertForSequenceClassification(config),
        arguments,
        data_collator=collate,
        train_dataset=Sentences(96, 1),
        eval_dataset=Sentences(20, 2),
        compute_metrics=lambda seen: {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())},
    )


def main(folder: Path) -> None:
    """Train four steps, resume from the checkpoint for two more, and save."""
    torch.set_num_threads(1)
    trainer(folder, 4).train()
    resumed = trainer(folder, 6)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(str(folder / "final"))
    timed = ("runtime", "per_second")
    for entry in resumed.state.log_history:
        print({k: v for k, v in entry.items() if not any(word in k for word in timed)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Ordinary scripts that train, save a checkpoint, and continue from one: `python -m benchmarks.resume_loop WAY FOLDER`.

WAY is a plain loop with `torch.save` and `torch.load`, transformers' `Trainer`, or lightning's. Without a
checkpoint in FOLDER it starts from the beginning; with one it continues from it, for as many steps again, and saves
once more. Nothing in it knows of a budget. It prints one JSON line: CPU and wall seconds of the process since its
imports, its peak resident memory.
"""

import json
import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS = 2
"""Steps of each process."""
BATCH = 2
LAYERS = 6
SMALL = "small"
"""A third argument: the same with a few hundred KiB, for tests."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, each from its own seed."""

    def __init__(self, config: GPT2Config) -> None:
        self._vocabulary, self._length = int(config.vocab_size), min(int(config.n_positions), 128)

    def __len__(self) -> int:
        return 4 * STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, self._vocabulary, (self._length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def model_of(*, small: bool) -> GPT2LMHeadModel:
    """Return a GPT-2 of 6 layers (`small`: 2 narrow ones) with random weights that are always the same."""
    set_seed(0)
    if small:
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000, n_positions=64))
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS))


def plain_loop(folder: Path, *, small: bool) -> None:
    """Train in a loop; save model and optimizer with `torch.save`."""
    path, model = folder / "checkpoint.pt", model_of(small=small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begin = 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
        torch.set_rng_state(saved["random"])
        del saved
    loader = DataLoader(Tokens(model.config), BATCH)
    for step, batch in enumerate(loader):
        if begin <= step < begin + STEPS:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"step": begin + STEPS, "random": torch.get_rng_state()}, path)


def trainer(folder: Path, *, small: bool) -> None:
    """Train with transformers."""
    model = model_of(small=small)
    done = len(list(folder.glob("checkpoint-*")))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=(done + 1) * STEPS,
        save_steps=STEPS,
        learning_rate=1e-4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        lr_scheduler_type="constant",
    )
    Trainer(model, arguments, train_dataset=Tokens(model.config)).train(resume_from_checkpoint=done > 0)


def lightning_trainer(folder: Path, *, small: bool) -> None:
    """Train with lightning."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(small=small)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    last = folder / "last.ckpt"
    steps = STEPS * (2 if last.exists() else 1)
    module = Language()
    keep = ModelCheckpoint(folder, every_n_train_steps=STEPS, save_last=True, save_top_k=0)
    lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(
        module,
        DataLoader(Tokens(module.model.config), BATCH),
        ckpt_path=last if last.exists() else None,
        weights_only=False,
    )


WAYS: dict[str, Callable[..., None]] = {
    "torch.save": plain_loop,
    "transformers": trainer,
    "lightning": lightning_trainer,
}


def main() -> None:
    """Train; see the module's docstring."""
    way, folder, *size = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, began = time.process_time(), time.perf_counter()
    WAYS[way](Path(folder), small=size == [SMALL])
    taken = {"cpu_s": time.process_time() - begin, "wall_s": time.perf_counter() - began}
    print(json.dumps({**taken, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()

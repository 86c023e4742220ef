"""The jobs that `benchmarks.plan_time` plans."""

import torch

from benchmarks.lora_loop import TOKENS, with_adapters
from benchmarks.models import CASES, make_optimizer, workload
from port_planner.job import TrainingJob

_BATCHES = 6


def model_job(model: str) -> TrainingJob:
    """Return a benchmark model's training with the optimizer and batch size of the targets."""
    optimizer, batch_size = CASES[model]
    work = workload(model, batch_size=batch_size)
    data = [torch.cat(columns) for columns in zip(*(work.batch(i) for i in range(_BATCHES)), strict=True)]
    return TrainingJob(
        work.model, work.loss_fn, make_optimizer(optimizer, work.model.parameters()), data, batch_size, name=model
    )


def lora_job(folder: str, length: int = TOKENS) -> TrainingJob:
    """Return the training of adapters on the frozen language model in `folder`, a sequence
    of `length` tokens a batch.
    """
    model, optimizer = with_adapters(folder)

    def loss_fn(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    tokens = torch.randint(0, model.config.vocab_size, (_BATCHES, length))
    return TrainingJob(model, loss_fn, optimizer, [tokens], 1, name="lora")

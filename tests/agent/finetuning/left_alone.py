"""A fine-tuning left alone: the recipe in this process, without budget, worker and pause, which all
others are compared with.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.training import Update, finetune

WEIGHTS = "adapter_model.safetensors"


def trained_alone(options: FinetuneOptions) -> list[str]:
    """Train with one thread, and return the lines that the command says with --json; what it
    leaves is in `options.out`.
    """
    updates: list[Update] = []
    with _one_thread():
        outcome = finetune(options, updates.append, lambda text: None)
    told = [*({"event": "update", **asdict(update)} for update in updates), {"event": "finished", **asdict(outcome)}]
    return [json.dumps(event) for event in told]


def adapter_left_alone(options: FinetuneOptions) -> bytes:
    """Train with one thread, and return the adapter's file."""
    trained_alone(options)
    return (Path(options.out) / WEIGHTS).read_bytes()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

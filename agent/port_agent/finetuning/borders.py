"""Borders between texts in one sequence. Whether a model keeps them is tested by its output for a text
that follows another one.

Positions that restart show transformers where a text begins, and it masks the tokens before. Not every model supports
this: one that carries a state from token to token (Mamba), or takes no positions, reads across the border.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.tensor_bytes import same_bits

BORDER_TOKENS = 32
"""Number of tokens of the tested text, and of the one before it."""


def check_borders(model: Any, text: Sequence[int]) -> None:
    """Raise FinetuneError if a model, without adapters, gives a text a different result when
    another text precedes it.
    """
    if not _keeps_borders(model, torch.tensor(text)[None]):
        raise FinetuneError(
            f"this {model.config.model_type} carries state across the border of two texts in one sequence; leave out "
            "--borders, or give each text as a record with prompt and completion, which stands alone"
        )


def _keeps_borders(model: Any, behind: torch.Tensor) -> bool:
    """Return whether a model's output for a text, [1, length], has the same bits after two different texts."""
    layers = model.base_model
    if "position_ids" not in inspect.signature(layers.forward).parameters:
        return False
    before = (behind, (behind + 1) % model.get_input_embeddings().weight.shape[0])
    length = behind.shape[1]
    places = torch.arange(length).repeat(2)[None]
    training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        sequences = (torch.cat((text, behind), 1) for text in before)
        one, other = (
            layers(input_ids=tokens, position_ids=places, use_cache=False)[0][:, length:] for tokens in sequences
        )
    model.train(training)
    return same_bits(one, other)

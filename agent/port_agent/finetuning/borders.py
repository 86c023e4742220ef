"""Borders between texts of one sequence: whether a model keeps them, seen by what it makes of a text behind another.

Places that begin anew tell transformers where a text begins, and it lets none see what is before. Not every kind of model does: one that
carries a state from token to token (Mamba), or takes no places, goes on across the border.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.tensor_bytes import same_bits

BORDER_TOKENS = 32
"""Of a text that is seen behind another of as many tokens."""


def check_borders(model: Any, text: Sequence[int]) -> None:
    """Raise FinetuneError where a model, without adapters, makes something else of a text where another one stands before it."""
    if not _keeps_borders(model, torch.tensor(text)[None]):
        raise FinetuneError(
            f"this {model.config.model_type} carries what it read across the border of two texts in one sequence; leave --borders away, or give "
            "each text as a record with prompt and completion, which stands alone"
        )


def _keeps_borders(model: Any, behind: torch.Tensor) -> bool:
    """Return whether what a model makes of a text, [1, length], is the same to the bit behind two others."""
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

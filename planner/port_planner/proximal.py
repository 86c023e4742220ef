"""The proximal term of FedProx (Li et al. 2020, arXiv 1812.06127): a loss that holds weights
near their starting values.

mu / 2 times the squared distance between the trained weights and their starting values is added to the loss. Those
values are kept in buffers of the model, which no file of its weights holds; a run, or a round of a federation, that
starts from given weights begins there, too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from port_planner.ir.graph import Role, storage_key

_START = "proximal_start_"


def keep_start(model: torch.nn.Module) -> None:
    """Keep the current values of the trained weights as their starting values, in place of earlier ones."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            model.register_buffer(f"{_START}{number}", parameter.detach().clone(), persistent=False)


def kept_starts(model: torch.nn.Module) -> Mapping[str, str]:
    """Return the names of the trained weights, by the key of the storage that holds their starting values."""
    return {
        storage_key(Role.BUFFER, f"{_START}{number}"): name
        for number, (name, parameter) in enumerate(model.named_parameters())
        if parameter.requires_grad
    }


def with_proximal_term(loss_fn: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Return a loss function with `weight` / 2 times the squared distance of the model's weights
    from their starting values.
    """

    def with_term(model: torch.nn.Module, *batch: Any) -> Any:
        result = loss_fn(model, *batch)
        loss, *others = result if isinstance(result, tuple) else (result,)
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                away = parameter - model.get_buffer(f"{_START}{number}")
                loss = loss + weight / 2 * away.square().sum()
        return (loss, *others) if isinstance(result, tuple) else loss

    return with_term

"""transformers and peft, imported as over a torch that was built without `torch.distributed`.

One process trains, so what shards tensors among several (150 modules, 13 MiB) is left away. Whatever else of the recipe
needs them takes them from here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from port_agent.finetuning.inputs.options import FinetuneError


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Have `torch.distributed` not be there: transformers asks once, and remembers."""
    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = available


try:
    with _without_distributed():
        import peft
        import transformers
        from accelerate import init_empty_weights  # type: ignore[import-untyped]  # peft brings it
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
        from transformers.pytorch_utils import Conv1D
except ImportError as error:
    raise FinetuneError(
        f"fine-tuning language models needs transformers and peft ({error.name} is missing): pip install 'port-agent[llm]'"
    ) from error


def plain_model(model: Any) -> Any:
    """Return the model of transformers under its adapters, if it has any."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


__all__ = [
    "BaseModelOutputWithPastAndCrossAttentions",
    "Conv1D",
    "init_empty_weights",
    "peft",
    "plain_model",
    "transformers",
]

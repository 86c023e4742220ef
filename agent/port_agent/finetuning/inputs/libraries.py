"""Import transformers and peft as if torch were built without `torch.distributed`.

Only one process trains, so the code that shards tensors among several (150 modules, 13 MiB) is not loaded. All other
modules import these libraries from here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from port_agent.finetuning.inputs.options import FinetuneError


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Hide `torch.distributed`: transformers checks for it once, and remembers the result."""
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
        f"fine-tuning language models needs transformers and peft ({error.name} is missing): pip install "
        "'port-agent[llm]'"
    ) from error


def plain_model(model: Any) -> Any:
    """Return the transformers model under its adapters, if it has any."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


__all__ = [
    "BaseModelOutputWithPastAndCrossAttentions",
    "Conv1D",
    "init_empty_weights",
    "peft",
    "plain_model",
    "transformers",
]

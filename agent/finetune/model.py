"""The model of a directory, with what of it is trained."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from agent.finetune.grid_file import put_on_grid
from agent.finetune.model_files import tensor_entries, weight_files
from agent.finetune.options import FinetuneError, FinetuneOptions

try:
    import peft
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.pytorch_utils import Conv1D
except ImportError as error:
    raise FinetuneError(
        f"fine-tuning language models needs transformers and peft ({error.name} is missing): pip install 'port-agent[llm]'"
    ) from error


FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""By the names of safetensors."""

_transformers_says: Any = transformers.utils.logging
_transformers_says.disable_progress_bar()
_transformers_says.set_verbosity_error()
warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft")


def load_tokenizer(folder: Path) -> Any:
    """Return the directory's tokenizer. Raises FinetuneError where its files are damaged."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FinetuneError(f"the tokenizer of {folder} cannot be read ({error}); download it again") from error


def load_model(options: FinetuneOptions, note: Callable[[str], None]) -> Any:
    """Return the model in training mode: frozen under adapters of 32 bits, or all of it in 32 bits.

    Weights stay in their files where nothing is trained of them. `note` is told what becomes of a base on a grid. Raises FinetuneError for a kind of model that is no
    causal language model, and for layers that it does not have.
    """
    folder = Path(options.model)
    _config(folder)
    torch.manual_seed(options.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype="auto" if options.lora_rank else torch.float32
    )
    if options.lora_rank is None:
        return model.train()
    if options.base is not None:
        put_on_grid(model, folder, options.base, note)
    return with_adapters(model, options)


def with_adapters(model: Any, options: FinetuneOptions) -> Any:
    """Return a model with its adapters of 32 bits, all else frozen, in training mode. Raises FinetuneError for layers that it has not."""
    rank = options.lora_rank or 0
    adapters = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=_targets(model, options.targets), task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapters).train()


def outline(folder: Path) -> Any:
    """Return a directory's model without its weights, on the meta device: layers, shapes, and the data types they are loaded as.

    Raises FinetuneError for a kind of model that is no causal language model, and where no file has floats.
    """
    config, causal = _config(folder), cast(Any, transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        return causal.from_config(config, dtype=config.dtype or _stored_dtype(folder))


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the data type of a directory's first floats, which counts where its configuration names none."""
    for path in weight_files(folder):
        for entry in tensor_entries(path)[1].values():
            if entry.dtype in FLOATS:
                return FLOATS[entry.dtype]
    raise FinetuneError(f"{folder} has no weights of {', '.join(FLOATS)}; it cannot be trained")


def is_transposed(layer: nn.Module) -> bool:
    """Tell whether a layer keeps its weight as [in, out], as GPT-2's do."""
    return isinstance(layer, Conv1D)


def _config(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise FinetuneError(
            f"{folder} is a {config.model_type}, which transformers knows no causal language model of; run your own script "
            "with `port-agent exec`"
        )
    return config


def _targets(model: Any, asked: tuple[str, ...]) -> list[str] | str:
    """Return which layers get adapters: those asked for, else those of attention in this kind of model."""
    kinds = (nn.Linear, Conv1D)
    here = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})
    unknown = [name for name in asked if name not in here]
    if unknown:
        raise FinetuneError(f"the model has no layer {', '.join(unknown)}; it has {', '.join(here)}")
    usual = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
    return list(asked) or (list(usual) if usual else "all-linear")

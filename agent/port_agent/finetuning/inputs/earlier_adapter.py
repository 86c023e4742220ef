"""The adapter of an earlier fine-tuning, which another fine-tuning of the same weights continues. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of a directory's adapters.

    These are the rank, the factor alpha, whether it is divided by the square root of the rank, the layers, and whether
    there are magnitudes (DoRA).
    """

    rank: int
    alpha: float | None
    rslora: bool
    targets: tuple[str, ...]
    dora: bool = False


class _Config(msgspec.Struct):
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None
    use_rslora: bool = False
    use_dora: bool = False
    peft_type: str = "LORA"


def adapter_settings(folder: Path) -> AdapterSettings:
    """Return the settings of a directory's adapters.

    Raises FinetuneError for adapters that cannot be trained further here.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = msgspec.convert(json.loads(path.read_bytes()), _Config)
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give the directory of an adapter") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} does not describe an adapter ({error}); it is damaged") from error
    if config.peft_type != "LORA" or not isinstance(config.target_modules, list):
        raise FinetuneError(
            f"{path} describes adapters that finetune does not train; it trains LoRA with a list of layers; start a "
            "new one"
        )
    targets = tuple(sorted(config.target_modules))
    return AdapterSettings(config.r, config.lora_alpha, config.use_rslora, targets, config.use_dora)

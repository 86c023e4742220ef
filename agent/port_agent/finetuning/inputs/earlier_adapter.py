"""An adapter of an earlier fine-tuning, from which another goes on over the same weights. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What the adapters of a directory are: their rank, the factor alpha, whether it is divided by the rank's root, of which layers, and
    whether they have magnitudes.
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
    """Return what the adapters of a directory are. Raises FinetuneError for what no fine-tuning here goes on from."""
    path = folder / ADAPTER_CONFIG
    try:
        config = msgspec.convert(json.loads(path.read_bytes()), _Config)
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give the directory of an adapter") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} does not say what adapter it is of ({error}); it is damaged") from error
    if config.peft_type != "LORA" or not isinstance(config.target_modules, list):
        raise FinetuneError(
            f"{path} is of adapters that finetune does not train: LoRA with a list of layers is; train anew"
        )
    targets = tuple(sorted(config.target_modules))
    return AdapterSettings(config.r, config.lora_alpha, config.use_rslora, targets, config.use_dora)

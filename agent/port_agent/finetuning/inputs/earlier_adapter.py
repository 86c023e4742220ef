"""The adapter of an earlier fine-tuning, which another fine-tuning of the same weights continues. Torch-free."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KNOWN_SETTINGS = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "r", "revision",
        "target_modules", "task_type", "use_dora", "use_rslora",
    )
)  # fmt: skip
"""Settings of an adapter that its matrices alone express, or that are taken into account."""
_WANTED_SETTINGS: Mapping[str, Collection[object]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # the others, such as PiSSA, change the model's weights
}
"""Accepted values of some settings; all others named in neither set must be off, as in adapters of `finetune`."""

_WHOLE_LAYERS = "modules_to_save"
"""Setting that names whole layers in an adapter's file, which are compared with those of the
model when they are read.
"""


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
        stored = json.loads(path.read_bytes())
        config = msgspec.convert(stored, _Config)
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give the directory of an adapter") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} does not describe an adapter ({error}); it is damaged") from error
    others = {name: value for name, value in odd_settings(stored).items() if name != _WHOLE_LAYERS}
    if config.peft_type != "LORA" or not isinstance(config.target_modules, list):
        raise FinetuneError(
            f"{path} describes adapters that finetune does not train; it trains LoRA with a list of layers; start a "
            "new one"
        )
    if others:
        name, value = next(iter(others.items()))
        raise FinetuneError(
            f"{path} asks for {name} = {shown(str(value))}, which adapters of `finetune` do not have; use it with peft"
        )
    targets = tuple(sorted(config.target_modules))
    return AdapterSettings(config.r, config.lora_alpha, config.use_rslora, targets, config.use_dora)


def odd_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter that change its result in a way that is not computed here, by name."""
    return {name: value for name, value in stored.items() if _is_odd(name, value)}


def _is_odd(name: str, value: object) -> bool:
    wanted = _WANTED_SETTINGS.get(name)
    return value not in wanted if wanted is not None else bool(value) and name not in _KNOWN_SETTINGS

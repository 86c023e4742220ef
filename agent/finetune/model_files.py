"""Whether a directory holds a model that can be trained, by its files alone, without torch."""

import json
import struct
from pathlib import Path
from typing import Any

from agent.finetune.options import FinetuneError
from planner.ir.bundle.safetensors_io import read_header
from planner.ir.units import shown

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_LOCAL_CODE = "auto_map"
"""Key of a config whose model is made by Python code in the directory."""


def check_model_files(folder: Path) -> None:
    """Raise FinetuneError with the remedy where a model directory lacks a file or has one cut short."""
    config = _config(folder)
    if _LOCAL_CODE in config:
        raise FinetuneError(
            f"{folder / CONFIG} asks for code of the model's own ({_LOCAL_CODE}), which is not run; take a model that "
            "transformers knows, or run your own script with `port-agent exec`"
        )
    for path in _weight_files(folder):
        _check_weights(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise FinetuneError(f"{folder} has no tokenizer (tokenizer.json); copy the one that came with the model there")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise FinetuneError(
            f"{path}: {error.strerror}; give a model directory as `hf download NAME --local-dir DIR` leaves it"
        ) from error
    except ValueError as error:
        raise FinetuneError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise FinetuneError(f"{path} names no model_type; it is not a model of transformers")
    return config


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            others = [*folder.glob("*.bin"), *folder.glob("*.gguf")]
            has = f"; {others[0].name} is of another kind: save the model with safetensors" if others else ""
            raise FinetuneError(f"{folder} has no weights in safetensors files{has}")
        return found
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FinetuneError(f"{index} does not say which file has which weight; download it again") from error
    missing = [name for name in names if not (folder / str(name)).is_file()]
    if missing:
        raise FinetuneError(f"{folder} lacks {len(missing)} of {len(names)} weight files, {shown(missing[0])} first")
    return [folder / name for name in names]


def _check_weights(path: Path) -> None:
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            header = read_header(stream, size)
        entries = json.loads(header[struct.calcsize("<Q") :])
        end = max((e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise FinetuneError(f"{path} is no safetensors file or is damaged; download it again") from error
    if len(header) + end != size:
        raise FinetuneError(
            f"{path} has {size:,} bytes, its header promises {len(header) + end:,}: the download was cut short; repeat it"
        )

"""Whether a directory holds a model that can be trained, by its files alone, without torch."""

import hashlib
import json
import struct
from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown
from port_planner.ir.bundle.safetensors_io import TensorEntry, read_entries, read_header

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)

FLOAT_NAMES = ("BF16", "F16", "F32", "F64")
"""As safetensors calls what a model can be trained over."""

_SAMPLE_BYTES = 4096
"""Of each tensor's middle: other weights differ there, and a file of 2 GB is told in 2 MB."""


class _Config(msgspec.Struct):
    model_type: str
    auto_map: object = msgspec.UNSET
    """There where the directory has Python code that makes the model."""
    quantization_config: object = None
    """There where the weights are codes of a quantisation."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """The file of each weight."""


def check_not_there(out: Path) -> None:
    """Raise FinetuneError where a directory that is to be written is there already."""
    if out.exists():
        raise FinetuneError(f"{out} is there already; give a directory that is not, or remove it")


def check_model_files(folder: Path) -> None:
    """Raise FinetuneError with the remedy where a model directory lacks a file or has one cut short."""
    if _config(folder).quantization_config is not None:
        raise FinetuneError(
            f"{folder / CONFIG} says that its weights are quantised (quantization_config); take the model that they were made of, in "
            "floats: --base nf4 or int8 puts that on a grid"
        )
    for path in weight_files(folder):
        _check_weights(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise FinetuneError(f"{folder} has no tokenizer (tokenizer.json); copy the one that came with the model there")


def has_own_code(folder: Path) -> bool:
    """Return whether a directory has code that makes its model, which is never run. Raises FinetuneError."""
    return _config(folder).auto_map is not msgspec.UNSET


def check_stored_as(folder: Path, dtype: str) -> None:
    """Raise FinetuneError by name where a matrix of a model's weights is of another data type, as safetensors calls it."""
    for path in weight_files(folder):
        for name, entry in tensor_entries(path)[1].items():
            if len(entry.shape) > 1 and entry.dtype != dtype:
                raise FinetuneError(
                    f"--base {dtype.lower()} is for weights that are stored so, and {name} in {path} is {entry.dtype}; leave --base away to "
                    "train over them as they are"
                )


def _config(folder: Path) -> _Config:
    path = folder / CONFIG
    try:
        return msgspec.convert(json.loads(path.read_bytes()), _Config)  # json: some hold Infinity
    except OSError as error:
        raise FinetuneError(
            f"{path}: {error.strerror}; give a model directory as `hf download NAME --local-dir DIR` leaves it"
        ) from error
    except msgspec.ValidationError as error:
        raise FinetuneError(f"{path} names no model_type; it is not a model of transformers") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} is not valid JSON ({error}); download it again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model directory, as transformers chooses them: one file before an index.

    Raises FinetuneError where one is missing.
    """
    if (folder / WEIGHTS).is_file():  # other files beside it are no part of what transformers loads
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        others = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")))
        has = f"; {others[0].name} is none of these: save the model with transformers" if others else ""
        raise FinetuneError(f"{folder} has no {WEIGHTS} and no {INDEX}{has}")
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FinetuneError(f"{index} does not say which file has which weight; download it again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FinetuneError(f"{folder} lacks {len(missing)} of {len(names)} weight files, {shown(missing[0])} first")
    return [folder / name for name in names]


def fingerprints(folder: Path) -> dict[str, str]:
    """Return by file name which weights a model directory has: a SHA-256 of size, header and a part of each tensor.

    Raises FinetuneError and OSError.
    """
    return {path.name: _fingerprint(path) for path in weight_files(folder)}


def _fingerprint(path: Path) -> str:
    header, entries = tensor_entries(path)
    seen = hashlib.sha256(header)
    with path.open("rb") as stream:
        seen.update(str(path.stat().st_size).encode())
        for begin, end in sorted(entry.data_offsets for entry in entries.values()):
            stream.seek(len(header) + begin + max(0, (end - begin - _SAMPLE_BYTES) // 2))
            seen.update(stream.read(min(_SAMPLE_BYTES, end - begin)))
    return seen.hexdigest()


def tensor_entries(path: Path) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header of a safetensors file, and what it says of each tensor. Raises FinetuneError, OSError."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            header = read_header(stream, size)
        return header, read_entries(header)
    except (ValueError, RecursionError, struct.error) as error:
        raise FinetuneError(f"{path} is not a valid safetensors file or is damaged; download it again") from error


def _check_weights(path: Path) -> None:
    size = path.stat().st_size
    header, entries = tensor_entries(path)
    odd = next((name for name, e in entries.items() if name.endswith("weight") and e.dtype not in FLOAT_NAMES), None)
    if odd is not None:
        raise FinetuneError(
            f"{path} holds {odd} as {entries[odd].dtype}, and training takes weights of {', '.join(FLOAT_NAMES)}; take the model in one of these"
        )
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if len(header) + end != size:
        raise FinetuneError(
            f"{path} has {size:,} bytes, its header promises {len(header) + end:,}: the download was cut short; repeat it"
        )

"""Whether a directory contains a model that can be trained, judged by its files alone, without torch."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import msgspec

from port_agent.finetuning.inputs.earlier_adapter import ADAPTER_CONFIG
from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import format_bytes, shown
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
"""Data types in which a model can be trained, by safetensors' names."""

_COPIED_SUFFIXES = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".md", ""))
"""Suffixes of a model's files that are copied: configuration, tokenizer and licence, but neither code nor
weights in other formats.
"""

_SAMPLE_BYTES = 4096
"""Bytes read from each tensor's middle, where different weights differ; 2 MB identify a file of 2 GB."""


class _Config(msgspec.Struct):
    model_type: str
    auto_map: object = msgspec.UNSET
    """Present if the directory has Python code that creates the model."""
    quantization_config: object = None
    """Present if the weights are codes of a quantization."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """The file of each weight."""


def check_not_there(out: Path) -> None:
    """Raise FinetuneError if an output directory already exists."""
    if out.exists():
        raise FinetuneError(f"{out} exists already; give a new directory, or remove it")


def check_free_space(out: Path, nbytes: int, what: str, other: str = "--out") -> None:
    """Raise FinetuneError unless the folder of `out` has that many bytes free.

    `what`: the phrase that names their use, with its verb. `other`: the options that can be changed instead.
    """
    folder = out.absolute().parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise FinetuneError(
            f"{what} {format_bytes(nbytes)}, and {folder} has {format_bytes(free)} free; free some space, or give "
            f"another {other}"
        )


def check_model_files(folder: Path) -> None:
    """Raise FinetuneError with the remedy if a model directory lacks a file or has a truncated one."""
    if _config(folder).quantization_config is not None:
        raise FinetuneError(
            f"{folder / CONFIG} says that its weights are quantized (quantization_config); decode them first: "
            f"port-agent decode {folder} --out DIR"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise FinetuneError(
            f"{folder} also has an adapter ({ADAPTER_CONFIG}), which transformers would add to the model; move the "
            "adapter's files to a directory of their own; to train it further: --from"
        )
    for path in weight_files(folder):
        _check_weights(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise FinetuneError(f"{folder} has no tokenizer (tokenizer.json); copy there the one that came with the model")


def goes_along(path: Path) -> bool:
    """Return whether a file of a model's directory also belongs to a model that is made from it."""
    of_others = path.name.startswith(".") or path.name.endswith(".bin.index.json")
    return path.is_file() and path.suffix in _COPIED_SUFFIXES and not of_others


def has_own_code(folder: Path) -> bool:
    """Return whether a directory has its own model code, which is never run. Raises FinetuneError."""
    return _config(folder).auto_map is not msgspec.UNSET


def check_stored_as(folder: Path, dtype: str) -> None:
    """Raise FinetuneError, naming the weight, if a matrix is stored in a data type other than `dtype` (safetensors'
    name).
    """
    for path in weight_files(folder):
        for name, entry in tensor_entries(path)[1].items():
            if len(entry.shape) > 1 and entry.dtype != dtype:
                raise FinetuneError(
                    f"--base {dtype.lower()} is for weights stored in that type, and {name} in {path} is "
                    f"{entry.dtype}; leave out --base to train with the weights as they are"
                )


def _config(folder: Path) -> _Config:
    path = folder / CONFIG
    try:
        return msgspec.convert(json.loads(path.read_bytes()), _Config)  # json accepts Infinity, which some files hold
    except NotADirectoryError as error:
        raise FinetuneError(
            f"{folder} is a file, not a model directory; decode a GGUF file first: port-agent decode {folder} --out DIR"
        ) from error
    except OSError as error:
        raise FinetuneError(
            f"{path}: {error.strerror}; give a model directory as written by `hf download NAME --local-dir DIR`"
        ) from error
    except msgspec.ValidationError as error:
        raise FinetuneError(f"{path} names no model_type; it is not a transformers model") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} is not valid JSON ({error}); download it again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model directory, as transformers chooses them: a single file before an index.

    Raises FinetuneError if one is missing.
    """
    if (folder / WEIGHTS).is_file():  # transformers does not load other files next to it
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        others = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")))
        is_gguf = bool(others) and others[0].suffix == ".gguf"
        remedy = "decode it first: port-agent decode FILE --out DIR" if is_gguf else "save the model with transformers"
        has = f"; {others[0].name} is not one of these; {remedy}" if others else ""
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
    """Return fingerprints of a model directory's weights by file name: a SHA-256 of size, header and a part of each
    tensor.

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
    """Return the header of a safetensors file, and its tensor entries. Raises FinetuneError, OSError."""
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
            f"{path} holds {odd} as {entries[odd].dtype}, and training needs weights of {', '.join(FLOAT_NAMES)}; "
            "use the model in one of these"
        )
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if len(header) + end != size:
        raise FinetuneError(
            f"{path} has {size:,} bytes, but its header promises {len(header) + end:,}: the download was cut short; "
            "repeat it"
        )

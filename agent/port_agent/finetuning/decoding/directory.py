"""Write a quantized model of another program as a directory with floating-point weights, which
everything else here reads.

Weights are decoded to their exact values some rows at a time.
"""

import enum
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from port_agent.finetuning.decoding.codes import coded_weights
from port_agent.finetuning.decoding.weight import DecodedWeight
from port_agent.finetuning.inputs.libraries import transformers
from port_agent.finetuning.inputs.model_files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_free_space,
    check_not_there,
    goes_along,
    tensor_entries,
    weight_files,
)
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.system.atomic_file import atomic_directory
from port_planner.ir.bundle import safetensors_io
from port_planner.ir.bundle.safetensors_io import Chunks

_GPTQ_SETTINGS = "quantize_config.json"
"""File with the quantization of an AutoGPTQ model whose configuration does not contain it."""
_FLOATS = ("BF16", "F16", "F32")
_TRANSPOSED_KINDS = ("gpt2", "openai-gpt")
"""Kinds whose floats are stored as [inputs, outputs] but whose codes are [outputs, inputs]."""


class DecodedType(enum.StrEnum):
    """The type of the weights that are written: 32 bits hold every decoded value, and 16 bits round it."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """The type in torch."""
        return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self.value]


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """What was written.

    `weights`, `decoded`: all weights, and those that were stored in codes. `rounded`: numbers that `type` does not hold
    exactly.
    """

    out: str
    type: DecodedType
    weights: int
    decoded: int
    rounded: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """Weights by name, and a function that writes all other files of the directory for weights of a given type."""

    weights: Mapping[str, DecodedWeight]
    write_rest: Callable[[Path, torch.dtype], None]


def decode_model(
    model: Path, out: Path, kind: DecodedType, tokenizer: Path | None, progress: Callable[[float], None]
) -> DecodeOutcome:
    """Write the model of a GGUF file, or of a directory with quantized weights, to the directory `out`, completely or
    not at all.

    `tokenizer`: a directory with the tokenizer to use instead of a GGUF file's. `progress` receives the share that is
    written. Raises FinetuneError for weights that cannot be decoded exactly, and OSError.
    """
    check_not_there(out)
    with ExitStack() as files:
        source = _gguf_source(model, tokenizer) if model.is_file() else _folder_source(model, files)
        count = sum(weight.items for weight in source.weights.values())
        check_free_space(out, count * kind.dtype.itemsize, "the decoded weights take", "--out or --type")
        with atomic_directory(out) as building:
            source.write_rest(building, kind.dtype)
            writer = _Writer(kind.dtype, count, progress)
            with (building / WEIGHTS).open("wb") as made:
                for chunk in safetensors_io.encode(writer.chunks(source.weights), {"format": "pt"}):
                    made.write(chunk)
    decoded = sum(weight.is_coded for weight in source.weights.values())
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    return DecodeOutcome(str(out), kind, len(source.weights), decoded, writer.rounded, nbytes)


class _Writer:
    """Converts weights to one type, one part at a time, and counts the rounded numbers."""

    def __init__(self, dtype: torch.dtype, items: int, progress: Callable[[float], None]) -> None:
        self.rounded = 0
        self._dtype, self._items, self._done, self._progress = dtype, items, 0, progress

    def chunks(self, weights: Mapping[str, DecodedWeight]) -> dict[str, Chunks]:
        """Return the chunks from which the weights' file is written."""
        name = str(self._dtype).removeprefix("torch.")
        return {
            key: Chunks(name, weight.shape, functools.partial(self._chunks, key, weight))
            for key, weight in weights.items()
        }

    def _chunks(self, name: str, weight: DecodedWeight) -> Iterator[memoryview]:
        for given in weight.parts():
            made = given.to(self._dtype)
            if not made.isfinite().all():
                raise FinetuneError(
                    f"{name} has {given.abs().max().item():g}, which {made.dtype} cannot hold; the file is damaged, or "
                    "give --type f32"
                )
            self.rounded += int((made.float() != given).sum())
            yield made.contiguous().view(-1).view(torch.uint8).numpy().data
            self._done += given.numel()
            self._progress(self._done / self._items)


def _gguf_source(path: Path, tokenizer: Path | None) -> _Source:
    from port_agent.finetuning.decoding.gguf_model import read_gguf  # needs a package that a directory does not

    found = read_gguf(path, tokenizer)

    def write_rest(folder: Path, dtype: torch.dtype) -> None:
        found.config.dtype = dtype
        found.config.save_pretrained(folder)
        ends = found.ends if len(found.ends) != 1 else found.ends[0]
        marks = {"bos_token_id": found.config.bos_token_id, "pad_token_id": found.config.pad_token_id}
        generation: Any = transformers.GenerationConfig
        generation(eos_token_id=ends or None, **marks).save_pretrained(folder)
        found.tokenizer.save_pretrained(folder)

    return _Source(found.weights, write_rest)


def _folder_source(folder: Path, files: ExitStack) -> _Source:
    """Return the contents of a directory's files.

    Raises FinetuneError for one without codes, or with unknown tensors.
    """
    config = _json(folder / CONFIG)
    own = folder / _GPTQ_SETTINGS
    quantization = config.pop("quantization_config", None) or (_json(own) if own.is_file() else None)
    if not isinstance(quantization, dict):
        raise FinetuneError(f"{folder} has no quantization_config: its weights are floats, which need no decoding")
    if config.get("model_type") in _TRANSPOSED_KINDS:
        raise FinetuneError(
            f"{folder} is a {config['model_type']}, whose codes are in another order than its floats, which decode "
            "does not change; use the original model"
        )
    paths = weight_files(folder)
    opened = {path: files.enter_context(safe_open(path, "pt")) for path in paths}
    entries = {name: (path, entry) for path in paths for name, entry in tensor_entries(path)[1].items()}
    tensors = {name: functools.partial(opened[path].get_tensor, name) for name, (path, _) in entries.items()}
    weights, used = coded_weights(quantization, tensors)
    for name, (path, entry) in entries.items():
        if name in used:
            continue
        if entry.dtype not in _FLOATS:
            raise FinetuneError(
                f"{path} holds {name} as {entry.dtype}, which is not part of a weight that decode reads; use the "
                "original model"
            )
        weights[name] = DecodedWeight(entry.shape, functools.partial(_float_rows, tensors[name]), is_coded=False)

    def write_rest(building: Path, dtype: torch.dtype) -> None:
        for path in sorted(folder.iterdir()):
            if goes_along(path) and path.name not in (CONFIG, INDEX, _GPTQ_SETTINGS):
                shutil.copyfile(path, building / path.name)
        config.pop("torch_dtype", None)
        made = {**config, "dtype": str(dtype).removeprefix("torch.")}
        (building / CONFIG).write_text(json.dumps(made, indent=2), encoding="utf-8")

    return _Source(weights, write_rest)


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.convert(
            json.loads(path.read_bytes()), dict[str, Any]
        )  # json accepts Infinity, which some files hold
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give a model directory or a GGUF file") from error
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{path} is not valid JSON ({error}); download it again") from error


def _float_rows(tensor: Callable[[], torch.Tensor], start: int, stop: int) -> torch.Tensor:
    whole = tensor()
    return (whole[start:stop] if whole.ndim else whole).float()

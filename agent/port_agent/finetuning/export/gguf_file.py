"""Write a model directory as one GGUF file, which llama.cpp and programs based on it read.

A weight is converted some rows at a time, and written before the next is read.
"""

import enum
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from port_agent.finetuning.export.shape import GgufShape, shape_of
from port_agent.finetuning.export.vocabulary import GgufVocabulary, vocabulary_of
from port_agent.finetuning.inputs.model_files import (
    check_free_space,
    check_model_files,
    check_not_there,
    tensor_entries,
    weight_files,
)
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.merge import merge_adapter
from port_agent.finetuning.text.tokenizing import load_tokenizer
from port_agent.system.atomic_file import sync_directory
from port_planner.ir.bundle.safetensors_io import TensorEntry

try:
    import gguf
except ImportError as error:
    raise FinetuneError(
        f"exporting to GGUF needs the package gguf ({error.name} is missing): pip install 'port-agent[gguf]'"
    ) from error

_CHUNK_ITEMS = 1 << 22
"""Items of a weight that are converted at a time: 16 MiB in 32 bits."""

_Q8_BLOCK = 32
"""Items that share a scale; a weight whose rows are not a multiple of this is written as F16, as llama.cpp does."""


class GgufType(enum.StrEnum):
    """The type of the matrices in a file; vectors always have 32 bits."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


_TYPES = {
    GgufType.F32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    GgufType.F16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    GgufType.BF16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    GgufType.Q8_0: (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_DTYPES = {GgufType.F32: torch.float32, GgufType.F16: torch.float16, GgufType.BF16: torch.bfloat16}
_AS_STORED = {"BF16": GgufType.BF16, "F16": GgufType.F16}


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """The file, the type of its matrices, and its numbers of weights and bytes."""

    out: str
    type: GgufType
    weights: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight's name in the model, in GGUF, its entry in a safetensors file, and its type in GGUF."""

    name: str
    there: str
    entry: TensorEntry
    type: GgufType

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of its bytes in GGUF."""
        block, size = gguf.GGML_QUANT_SIZES[_TYPES[self.type][0]]
        return (*self.entry.shape[:-1], self.entry.shape[-1] // block * size)


def export_gguf(
    folder: Path,
    out: Path,
    kind: GgufType | None,
    adapter: Path | None,
    progress: Callable[[float], None],
    note: Callable[[str], None],
) -> ExportOutcome:
    """Write the model of a directory, with an adapter merged into it if given, to the GGUF file `out`, completely or
    not at all.

    `kind`: the type of matrices; None for that of the model's files. `progress` receives the share that is written,
    `note` receives remarks for people. Raises FinetuneError for parts that have no place in GGUF, and OSError.
    """
    check_not_there(out)
    check_model_files(folder)
    shape_of(folder)  # refused before an adapter is merged, which takes minutes
    with _beside(out) as building:
        if adapter is not None:
            merge_adapter(adapter, building / "merged", folder, lambda share: None, note)
            folder = building / "merged"
        shape = shape_of(folder)
        vocabulary = vocabulary_of(load_tokenizer(folder), shape.config.vocab_size)
        if vocabulary.normalized:
            note("the tokenizer composes characters (NFC) first, and llama.cpp does not: give it composed text")
        stored = {path: tensor_entries(path)[1] for path in weight_files(folder)}
        shape.check_names({name for entries in stored.values() for name in entries})
        weights = _weights(shape, {name: e for entries in stored.values() for name, e in entries.items()}, kind)
        kind = weights[0].type if kind is None else kind
        nbytes = sum(np.prod(one.byte_shape, dtype=int) for one in weights)
        check_free_space(out, int(nbytes), "the file takes")
        made = building / "model.gguf"
        with ExitStack() as files:
            opened = {path: files.enter_context(safe_open(path, "pt")) for path in stored}
            places = {name: opened[path] for path, entries in stored.items() for name in entries}
            _write(made, _writer(shape, vocabulary, kind, out.stem), shape, weights, places, progress)
        sync_directory(made)
        made.replace(out)
    sync_directory(out.absolute().parent)
    return ExportOutcome(str(out), kind, len(weights), out.stat().st_size)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to a file that is being made; the directory is removed with its contents."""
    building = out.absolute().with_name(f".{out.name}.new")
    shutil.rmtree(building, ignore_errors=True)  # left by an interruption
    building.mkdir()
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _weights(shape: GgufShape, stored: dict[str, TensorEntry], kind: GgufType | None) -> list[_Weight]:
    return [_Weight(name, there, stored[name], _type_of(stored[name], kind)) for name, there in shape.names().items()]


def _type_of(entry: TensorEntry, kind: GgufType | None) -> GgufType:
    if len(entry.shape) < 2:
        return GgufType.F32
    if kind is GgufType.Q8_0 and entry.shape[-1] % _Q8_BLOCK:
        return GgufType.F16
    return kind or _AS_STORED.get(entry.dtype, GgufType.F32)


def _writer(shape: GgufShape, vocabulary: GgufVocabulary, kind: GgufType, name: str) -> Any:
    """Return a writer that has everything but the weights."""
    writer = gguf.GGUFWriter(None, shape.kind)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in shape.settings():
        add[type(value)](f"{shape.kind}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splitting)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(list(map(int, vocabulary.kinds)))
    writer.add_token_merges(vocabulary.merges)
    for mark, number in vocabulary.marks.items():
        writer.add_uint32(f"tokenizer.ggml.{mark}_token_id", number)
    writer.add_add_bos_token(vocabulary.begins)
    writer.add_add_eos_token(vocabulary.ends)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
    return writer


def _write(
    made: Path,
    writer: Any,
    shape: GgufShape,
    weights: list[_Weight],
    places: dict[str, Any],
    progress: Callable[[float], None],
) -> None:
    factors = shape.rope_factors()
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, np.dtype(np.float32), factors.nbytes)
    for weight in weights:
        size = int(np.prod(weight.byte_shape))
        writer.add_tensor_info(weight.there, weight.byte_shape, np.dtype(np.uint8), size, _TYPES[weight.type][0])
    try:
        writer.write_header_to_file(made)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        done, items = 0, sum(int(np.prod(one.entry.shape)) for one in weights)
        for weight in weights:
            rows = shape.rows(weight.name)
            writer.write_tensor_data(_converted(weight, places[weight.name].get_tensor(weight.name), rows))
            done += int(np.prod(weight.entry.shape))
            progress(done / items)
    finally:
        writer.close()


def _converted(weight: _Weight, tensor: torch.Tensor, rows: torch.Tensor | None) -> np.ndarray[Any, Any]:
    """Return a weight's bytes in GGUF, its rows in the order `rows`. Raises FinetuneError for numbers that its type
    cannot hold.
    """
    made = np.empty(weight.byte_shape, np.uint8)
    step = max(1, _CHUNK_ITEMS // tensor.shape[-1]) if tensor.ndim > 1 else len(tensor)
    for start in range(0, len(tensor), step):
        stop = min(start + step, len(tensor))
        given = tensor[start:stop] if rows is None else tensor[rows[start:stop]]
        if weight.type is GgufType.Q8_0:
            part = gguf.quants.quantize(given.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        else:
            changed = given.to(_DTYPES[weight.type])
            if not changed.isfinite().all() and given.isfinite().all():
                raise FinetuneError(
                    f"{weight.name} has {given.abs().max().item():g}, more than {weight.type} can hold; give --type "
                    "bf16"
                )
            part = changed.contiguous().view(torch.uint8).numpy()
        made[start * (made.shape[0] // len(tensor)) : stop * (made.shape[0] // len(tensor))] = part
    return made

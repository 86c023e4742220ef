"""Merge an adapter into the weights that it was trained on: a model directory like the base's, written as a stream.

Everything but layers with an adapter is copied unchanged. A layer's weight has the bits of peft's `merge_and_unload` in
the same data type. The product of its two adapter matrices is computed whole, scaled, and added some rows at a time.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.inputs.earlier_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, odd_settings
from port_agent.finetuning.inputs.model_files import (
    INDEX,
    WEIGHTS,
    check_free_space,
    check_model_files,
    check_not_there,
    goes_along,
    tensor_entries,
    weight_files,
)
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.quantized.file import ENCODED_ITEMS, quantized_layers
from port_agent.finetuning.quantized.linear import encode_weight
from port_agent.finetuning.text.task import task_of
from port_agent.finetuning.trained_model import FLOATS, is_transposed, outline
from port_agent.packing.quantized import Quantization
from port_agent.system.atomic_file import atomic_directory
from port_planner.base.units import shown
from port_planner.ir.bundle.safetensors_io import TensorEntry

_BEFORE_NAME = "base_model.model."
_A, _B, _MAGNITUDES = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MergeOutcome:
    """What was written. `merged`: layers that had adapters; `grid`: the quantization of the other weights."""

    out: str
    base: str
    merged: int
    grid: Quantization | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter's file, its layers, the factor of its products, whether it has magnitudes,
    and the base that it names.
    """

    weights: Path
    modules: frozenset[str]
    scaling: float
    dora: bool
    base: str


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one stored weight.

    `module`: the layer whose adapter is added, or None; `grid`: the quantization applied first.
    """

    module: str | None
    transposed: bool
    grid: Quantization | None


def merge_adapter(
    folder: Path, out: Path, base: Path | None, progress: Callable[[float], None], note: Callable[[str], None]
) -> MergeOutcome:
    """Write the base model with an adapter merged into it to `out`, completely or not at all.

    `base`: its directory, if that has moved. `progress` receives the share that is written, `note` receives remarks for
    people. Raises FinetuneError for an adapter that cannot be merged to the same bits, and OSError.
    """
    check_not_there(out)
    record = BaseRecord.read(folder)
    adapter = _read_adapter(folder, base_known=record is not None)
    model = base or Path(record.model if record is not None else adapter.base)
    if not model.is_dir():
        raise FinetuneError(f"the base {model} does not exist; give its directory: --model DIR")
    check_model_files(model)
    if record is None:
        note(f"{folder} does not record which weights it was trained on; those of {model} are assumed")
    else:
        record.check(model)
    grid = None if record is None else record.grid
    stored = {path: tensor_entries(path) for path in weight_files(model)}
    changes = _changes(model, adapter, grid, {n: e for _, entries in stored.values() for n, e in entries.items()})
    if grid is not None:
        note(
            f"the adapter was trained on {grid.value}-quantized weights: {len(changes)} layers are written as "
            f"quantized and decoded, in the data type of {model.name}"
        )
    small = [path for path in sorted(model.iterdir()) if goes_along(path)]
    if (model / WEIGHTS).is_file():  # an index next to it describes other files, which are not copied
        small = [path for path in small if path.name != INDEX]
    nbytes = sum(path.stat().st_size for path in (*stored, *small))
    check_free_space(out, nbytes, "the merged model takes")
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done / nbytes)

    with atomic_directory(out) as building, safe_open(adapter.weights, "pt") as matrices:
        for path in small:
            shutil.copyfile(path, building / path.name)
            on_bytes(path.stat().st_size)
        for path, (header, entries) in stored.items():
            mine = {n: (entries[n], c) for n, c in changes.items() if n in entries}
            with path.open("rb") as given, (building / path.name).open("wb") as made:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(made.fileno(), 0, path.stat().st_size)
                _write(given, made, len(header), mine, _Deltas(matrices, adapter.scaling, dora=adapter.dora), on_bytes)
    return MergeOutcome(str(out), str(model), len(adapter.modules), grid, nbytes)


# -- what is merged


def _read_adapter(folder: Path, *, base_known: bool) -> _Adapter:
    path, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    try:
        settings = json.loads(path.read_bytes())
        odd = odd_settings(settings)
        scaling = settings["lora_alpha"] / (math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"])
        base, dora = str(settings["base_model_name_or_path"]), bool(settings.get("use_dora"))
    except FileNotFoundError as error:
        raise FinetuneError(
            f"{folder} is not an adapter: it has no {ADAPTER_CONFIG}; the result of `finetune --full` is already a "
            "model"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise FinetuneError(f"{path} does not describe an adapter ({error}); it is damaged") from error
    if odd:
        name, value = next(iter(odd.items()))
        raise FinetuneError(
            f"{path} asks for {name} = {shown(str(value))}, which adapters of `finetune` do not have; merge it with "
            "peft"
        )
    try:
        with safe_open(weights, "pt") as stored:
            names = set(stored.keys())
    except (SafetensorError, OSError) as error:
        raise FinetuneError(f"{weights} is missing or damaged ({error})") from error
    modules = frozenset(n.removeprefix(_BEFORE_NAME).removesuffix(_A) for n in names if n.endswith(_A))
    parts = (_A, _B, _MAGNITUDES) if dora else (_A, _B)
    unpaired = names ^ {f"{_BEFORE_NAME}{module}{part}" for module in modules for part in parts}
    if base_known:  # peft stores a head's frozen weight, too
        unpaired -= {f"{_BEFORE_NAME}{module}.base_layer.weight" for module in modules}
    if unpaired or not modules:
        what = f"has {shown(min(unpaired))}, which" if unpaired else "has nothing that"
        raise FinetuneError(f"{weights} {what} does not belong to an adapter's two matrices; merge it with peft")
    return _Adapter(weights, modules, scaling, dora, base)


def _changes(
    folder: Path, adapter: _Adapter, grid: Quantization | None, stored: Mapping[str, TensorEntry]
) -> dict[str, _Change]:
    """Return the changes of stored weights by name; unchanged weights have no entry. Raises FinetuneError."""
    model = outline(folder, task_of(folder))
    is_quantized = set() if grid is None else set(quantized_layers(model, grid))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    changes = {}
    for module in sorted({*adapter.modules, *is_quantized}):
        layer = _layer(model, module, folder)
        if layer is head and head.weight is embeddings.weight:
            raise FinetuneError(
                f"the adapter trains {module}, whose weight {folder} shares with the embeddings; merged, they would "
                "change with it"
            )
        name = next((n for n in _stored_names(module, model.base_model_prefix) if n in stored), None)
        if name is None or stored[name].shape != tuple(layer.weight.shape) or stored[name].dtype not in FLOATS:
            found = "is not" if name is None else f"is {stored[name].dtype} {list(stored[name].shape)}"
            raise FinetuneError(
                f"the weight of {module} {found} among the files of {folder}, as a layer of "
                f"{list(layer.weight.shape)} floats; merge the adapter with peft"
            )
        if module in is_quantized and layer.weight.dtype is not FLOATS[stored[name].dtype]:
            raise FinetuneError(
                f"{name} is stored as {stored[name].dtype} and was quantized to {grid} as {layer.weight.dtype}; save "
                "the model in one data type and train that"
            )
        mine = module if module in adapter.modules else None
        changes[name] = _Change(mine, is_transposed(layer), grid if module in is_quantized else None)
    return changes


def _layer(model: Any, module: str, folder: Path) -> Any:
    try:
        layer = model.get_submodule(module)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear) and not (layer is not None and is_transposed(layer)):
        raise FinetuneError(
            f"the adapter trains {module}, which is not a linear layer of {folder}; give its own base: --model DIR"
        )
    return layer


def _stored_names(module: str, prefix: str) -> tuple[str, str]:
    """Return the possible names of a layer's weight: some directories hold a model without its head, under shorter
    names.
    """
    return f"{module}.weight", f"{module}.weight".removeprefix(f"{prefix}.")


# -- the stream


class _Deltas:
    """The changes that adapters make to their layers' weights."""

    def __init__(self, matrices: Any, scaling: float, *, dora: bool) -> None:
        self._matrices, self._scaling, self._dora = matrices, scaling, dora

    def of(self, change: _Change) -> "_Delta | None":
        """Return the change of a weight."""
        if change.module is None:
            return None
        name = f"{_BEFORE_NAME}{change.module}"
        first, second = (self._matrices.get_tensor(f"{name}{part}").float() for part in (_A, _B))
        product: torch.Tensor = (second @ first).mul_(self._scaling)
        magnitudes = self._matrices.get_tensor(f"{name}{_MAGNITUDES}") if self._dora else None
        return _Delta(product.T if change.transposed else product, magnitudes, change.transposed)


@dataclass(frozen=True, slots=True)
class _Delta:
    """The sum added to a weight, in 32 bits and in its layout, and the resulting
    `magnitudes` of its outputs, or None.
    """

    added: torch.Tensor
    magnitudes: torch.Tensor | None
    transposed: bool

    @property
    def needs_whole(self) -> bool:
        """Whether an output's weights lie in all rows, so that its magnitude needs the whole weight."""
        return self.magnitudes is not None and self.transposed

    def apply(self, weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return some rows of a weight with their change, in its data type."""
        added = self.added[start:stop]
        if self.magnitudes is None:
            return weight.add_(added)
        changed, along = weight + added, 0 if self.transposed else 1
        outputs = changed.T if self.transposed else changed
        norms = torch.linalg.norm(outputs, dim=1).to(changed.dtype)
        magnitudes = self.magnitudes if self.transposed else self.magnitudes[start:stop]
        scaled: torch.Tensor = (magnitudes / norms).unsqueeze(along) * changed
        return scaled.to(weight.dtype)


def _write(
    given: BinaryIO,
    made: BinaryIO,
    begin: int,
    changes: Mapping[str, tuple[TensorEntry, _Change]],
    deltas: _Deltas,
    on_bytes: Callable[[int], None],
) -> None:
    """Write a safetensors file again with some of its weights changed; `begin`: offset of its tensors."""
    for entry, change in sorted(changes.values(), key=lambda found: found[0].data_offsets):
        _copy(given, made, begin + entry.data_offsets[0] - given.tell(), on_bytes)
        delta, (rows, columns) = deltas.of(change), entry.shape
        step = rows if delta is not None and delta.needs_whole else max(1, ENCODED_ITEMS // columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = bytearray((stop - start) * columns * FLOATS[entry.dtype].itemsize)
            _read_into(given, block)
            weight = torch.frombuffer(block, dtype=FLOATS[entry.dtype]).view(-1, columns)
            if change.grid is not None:
                codes, scales = encode_weight(change.grid, weight)
                weight = torch.ops.port_agent.dequantize(codes, scales, change.grid.value, weight.dtype)
            if delta is not None:
                weight = delta.apply(weight, start, stop)
            made.write(weight.view(torch.uint8).numpy().data)
            on_bytes(len(block))
        del delta
    _copy(given, made, os.fstat(given.fileno()).st_size - given.tell(), on_bytes)


def _copy(given: BinaryIO, made: BinaryIO, count: int, on_bytes: Callable[[int], None]) -> None:
    while count:
        block = bytearray(min(count, _COPY_BYTES))
        _read_into(given, block)
        made.write(block)
        count -= len(block)
        on_bytes(len(block))


def _read_into(given: BinaryIO, block: bytearray) -> None:
    if given.readinto(block) != len(block):  # type: ignore[attr-defined]  # a buffered reader's
        raise FinetuneError(
            f"{given.name} became shorter while it was read; repeat the command once nothing writes to it"
        )

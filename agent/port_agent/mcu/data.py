"""Samples and labels of a job, from a file or from an inbox directory of them.

It does not import torch.

A file is .npz (never pickled) or .safetensors with one array of samples and one of labels, under the usual names.
Samples named `codes` are int8 in the device's form, and the file's `scale` and `zero` define the value of a code. Files
of a directory are taken in the order of their names, so that a resumed job sees the same data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.protocol.board_model import InputFormat, ModelDirectory
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum
from port_agent.system.directory_handle import read_sample_file
from port_agent.worker.shard import Shard
from port_planner.base.targets import with_targets

SAMPLE_NAMES = ("x", "samples", "data", "inputs", "x_train", "features")
LABEL_NAMES = ("y", "labels", "targets", "y_train")
SUFFIXES = (".npz", ".safetensors")
SHARD_NAME = "shard.txt"
CODES = "codes"
SCALE = "scale"
ZERO = "zero"


@dataclass(frozen=True, slots=True, eq=False)
class BoardSamples:
    """Quantised samples [N, sample_bytes] and their labels [N]; with targets, all labels are 0."""

    rows: NDArray[np.int8]
    labels: NDArray[np.int64]
    clipped: int = 0
    """Number of values in the files, over all samples, outside the range for which the model was calibrated."""
    targets: int = 0
    """Targets at the end of each row."""
    reach: float = math.inf
    """The largest absolute value of a file in real units; infinite for codes."""

    def __len__(self) -> int:
        return len(self.labels)

    def row(self, index: int) -> bytes:
        """Return the bytes of one sample."""
        return bytes(self.rows[index].tobytes())

    def part(self, indices: NDArray[np.int64]) -> "BoardSamples":
        """Return the samples at `indices`."""
        return replace(self, rows=self.rows[indices], labels=self.labels[indices])


def data_files(path: Path) -> tuple[Path, ...]:
    """Return the data files at `path` (a file or a directory), sorted by name.

    Raises BoardJobError if there are none.
    """
    if path.is_file():
        return (path,)
    found = tuple(sorted(file for file in path.glob("*") if file.suffix in SUFFIXES and not file.name.startswith(".")))
    if not found:
        raise BoardJobError(f"no data in {path}; put .npz or .safetensors files with arrays x and y there")
    return found


def load_samples(path: Path, model: ModelDirectory) -> BoardSamples:
    """Return all samples at `path`, quantised for `model`.

    Raises BoardJobError, with the file, for what the model cannot learn from.
    """
    parts = [_load_file(file, model) for file in data_files(path)]
    if model.input is not None:
        model.input.refuse_faint(max(part.reach for part in parts), str(path))
    return BoardSamples(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.labels for part in parts]),
        sum(part.clipped for part in parts),
        model.target_count,
    )


def split_held_out(samples: BoardSamples, every: int) -> tuple[BoardSamples, BoardSamples]:
    """Return the training samples and the held-out ones.

    Every `every`-th sample is held out, none if `every` is 0. Raises BoardJobError if that takes all samples of a
    class, which happens if classes alternate.
    """
    indices = np.arange(len(samples))
    held = indices % every == every - 1 if every else np.zeros(len(samples), bool)
    training, held_out = samples.part(indices[~held]), samples.part(indices[held])
    lost = np.setdiff1d(held_out.labels, training.labels)
    if len(lost):
        raise BoardJobError(
            f"every sample number {every} is held out for the evaluation, which is all of class "
            f"{', '.join(map(str, lost[:8]))}; shuffle the samples, or give those to evaluate on with --test"
        )
    return training, held_out


def take_shard(samples: BoardSamples, shard: Shard) -> BoardSamples:
    """Return one board's part of the samples, with its share of each class.

    Raises BoardJobError if there are fewer samples than boards.
    """
    if len(samples) < shard.count:
        raise BoardJobError(
            f"there are only {len(samples)} samples to train on for {shard.count} boards; add samples, or name fewer "
            "boards"
        )
    by_class = np.argsort(samples.labels, kind="stable")
    return samples.part(np.sort(by_class[shard.number - 1 :: shard.count]))


def keep_shard(folder: Path, shard: Shard, part: BoardSamples) -> None:
    """Record a board's part in `folder`; a resumed job must find the same.

    Raises BoardJobError if it is a different part or its samples have changed, because some samples would then be
    trained twice and others never.
    """
    path = folder / SHARD_NAME
    now = f"{shard} of the samples, {len(part)} in total, checksum {bytes_checksum(part.rows.tobytes() + part.labels.tobytes())}"
    if path.is_file() and (before := path.read_text().strip()) != now:
        raise BoardJobError(
            f"this board began with part {before}; now it is part {now}. Restore the data, or start all boards "
            "again, each in a new state directory"
        )
    write_atomically(path, f"{now}\n".encode())


def load_rows(path: Path, model: ModelDirectory) -> tuple[NDArray[np.int8], int]:
    """Return all samples at `path` without their labels, quantised for `model`, and how many values were clipped.

    Raises BoardJobError for files that cannot be read or do not fit, or that have no samples.
    """
    parts = [_rows(_arrays(file), file, model) for file in data_files(path)]
    if not sum(len(rows) for rows, _ in parts):
        raise BoardJobError(f"{path} has no samples; give at least one")
    return np.concatenate([rows for rows, _ in parts]), sum(clipped for _, clipped in parts)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        arrays: dict[str, NDArray[Any]]
        with read_sample_file(path) as stream:
            if path.suffix == ".safetensors":
                arrays = load(stream.read())
            else:
                archive = np.load(stream, allow_pickle=False)
                if isinstance(archive, np.ndarray):
                    raise ValueError("it is one array without a name")
                arrays = {name: archive[name] for name in archive.files}
    except KeyError as error:
        raise BoardJobError(f"cannot read {path}: it has an array of type {error}; write it in float32") from error
    except (OSError, ValueError, EOFError, BadZipFile, SafetensorError) as error:
        raise BoardJobError(f"cannot read {path}: {error}; write it again with numpy.savez") from error
    return arrays


def _load_file(path: Path, model: ModelDirectory) -> BoardSamples:
    arrays = _arrays(path)
    rows, answers = _choose(arrays, (CODES, *SAMPLE_NAMES), path), _choose(arrays, LABEL_NAMES, path)
    if model.target_count:
        quantized, clipped = _rows(arrays, path, model)
        return BoardSamples(
            with_targets(quantized, answers, model.target_count),
            np.zeros(len(quantized), np.int64),
            clipped,
            model.target_count,
            _reach(arrays, quantized, model),
        )
    labels = class_numbers(answers, str(path))
    if not rows.ndim or len(rows) != len(labels) or not len(labels):
        count = len(rows) if rows.ndim else "no array of"
        raise BoardJobError(f"{path} has {count} samples and {len(labels)} labels; write as many of each")
    if labels.min() < 0 or labels.max() >= model.class_count:
        raise BoardJobError(
            f"{path} has labels {labels.min()}..{labels.max()}, but {model.name} has classes "
            f"0..{model.class_count - 1}; check that data and model belong together"
        )
    quantized, clipped = _rows(arrays, path, model)
    return BoardSamples(quantized, labels, clipped, reach=_reach(arrays, quantized, model))


def _rows(arrays: Mapping[str, NDArray[Any]], path: Path, model: ModelDirectory) -> tuple[NDArray[np.int8], int]:
    """Return quantised samples, and the number of clipped values."""
    if CODES in arrays:
        _refuse_other_scale(arrays, path, model)
        return model.codes(arrays[CODES]), 0
    rows = _choose(arrays, SAMPLE_NAMES, path)
    clipped = model.count_clipped(rows)
    if model.input is not None:
        model.input.refuse_clipped(clipped, rows.size, str(path))
    return model.quantize(rows), clipped


def _reach(arrays: Mapping[str, NDArray[Any]], rows: NDArray[np.int8], model: ModelDirectory) -> float:
    return math.inf if CODES in arrays or model.input is None else reach(rows, model.input)


def reach(rows: NDArray[np.int8], form: InputFormat) -> float:
    """Return the largest absolute value of rows [N, bytes] in real units."""
    steps = np.abs(rows.astype(np.int16) - form.zero).max(initial=0)
    return float(steps) * form.scale


def _refuse_other_scale(arrays: Mapping[str, NDArray[Any]], path: Path, model: ModelDirectory) -> None:
    """Raise BoardJobError for codes from another calibration, which mean other values in this model."""
    if SCALE not in arrays or ZERO not in arrays or model.input is None:
        return
    given = np.float32(arrays[SCALE]), int(arrays[ZERO])
    wanted = np.float32(model.input.scale), model.input.zero
    if given != wanted:
        raise BoardJobError(
            f"{path} has codes of scale {given[0]:.6g} and zero {given[1]}, but {model.name} has {wanted[0]:.6g} and "
            f"{wanted[1]}; give the data that were compiled with this model, or real values"
        )


def class_numbers(labels: NDArray[Any], place: str) -> NDArray[np.int64]:
    """Return labels [N] or [N, 1] as class numbers.

    Raises BoardJobError for other labels: fractions, targets of several values, or non-numbers.
    """
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or flat.dtype.kind not in "fiub":
        raise BoardJobError(
            f"{place} has labels of shape {list(labels.shape)} and type {labels.dtype}; this model learns classes: "
            "give one class number per sample, or compile it with loss=Loss.MSE to learn numbers"
        )
    whole = flat.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(whole) | (whole != np.floor(whole)))
    if len(wrong):
        raise BoardJobError(f"{place} has the label {flat[wrong[0]]} at sample {wrong[0]}; give class numbers from 0")
    return flat.astype(np.int64)


def _choose(arrays: Mapping[str, NDArray[Any]], names: tuple[str, ...], path: Path) -> NDArray[Any]:
    for name in names:
        if name in arrays:
            return arrays[name]
    raise BoardJobError(f"{path} has arrays {', '.join(arrays) or 'none'}, but none of {', '.join(names)}; rename one")

"""A compiled model as the agent sees it: a directory with model.c, model.h and model.json.

model.json says what the C tables do not: the shape and scale of the input, and the names of the classes. A directory
without it takes int8 samples only.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from port_agent.mcu.board.errors import BoardJobError
from port_agent.system.atomic_file import write_atomically

MANIFEST_VERSION = 1
MANIFEST = "model.json"


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Shape [channels, height, width] of a float sample, and its quantisation: real = scale * (q - zero)."""

    channels: int
    height: int
    width: int
    scale: float
    zero: int


class _Version(msgspec.Struct):
    v: int | None = None


class _Manifest(_Version):
    input: InputFormat | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One compiled model. Sizes in bytes."""

    path: Path
    name: str
    sha256: bytes
    arena_bytes: int
    parameter_bytes: int
    input_bytes: int
    class_count: int
    input: InputFormat | None
    classes: tuple[str, ...]

    def quantize(self, samples: NDArray[Any]) -> NDArray[np.int8]:
        """Return samples as int8 rows [N, input_bytes], in the order the device takes.

        int8 samples are rows already; floats are [N, channels, height, width] or [N, channels, width] in real
        units. Raises BoardJobError for samples of another size.
        """
        if samples.dtype == np.int8:
            rows = samples.reshape(len(samples), -1)
        else:
            rows = self._quantize_reals(samples.astype(np.float32))
        if rows.shape[1] != self.input_bytes:
            raise BoardJobError(
                f"samples of {rows.shape[1]} values for a model with {self.input_bytes} inputs; "
                f"{self.name} takes {self.describe_input()}"
            )
        return np.ascontiguousarray(rows)

    def describe_input(self) -> str:
        """Return the input as a person would say it."""
        if self.input is None:
            return f"int8 rows of {self.input_bytes}"
        return f"int8 rows of {self.input_bytes}, or floats [N, {self.input.channels}, {self.input.height}, {self.input.width}]"

    def _quantize_reals(self, samples: NDArray[np.float32]) -> NDArray[np.int8]:
        form = self.input
        if form is None:
            raise BoardJobError(
                f"{self.path} has no {MANIFEST}, so float samples have no scale; compile the model again"
            )
        if samples[0].size != form.channels * form.height * form.width:
            raise BoardJobError(f"float samples of {samples[0].size} values; {self.name} takes {self.describe_input()}")
        pixels = samples.reshape(len(samples), form.channels, form.height, form.width).transpose(0, 2, 3, 1)
        # the rule of port_planner.mcu.quantize: half up, in float32
        quantized = np.floor(pixels / np.float32(form.scale) + np.float32(0.5)) + form.zero
        rows: NDArray[np.int8] = np.clip(quantized, -128, 127).astype(np.int8).reshape(len(samples), -1)
        return rows


def read_model(path: Path) -> ModelDirectory:
    """Return the model in directory `path`; raise BoardJobError with what is missing."""
    header, source = path / "model.h", path / "model.c"
    if not header.is_file() or not source.is_file():
        raise BoardJobError(f"{path} holds no compiled model (model.c, model.h); make one with: port-agent mcu compile")
    numbers = dict(re.findall(r"^#define\s+PORT_MODEL_(\w+)\s+(\S+)", header.read_text(), re.MULTILINE))
    digest = re.search(r"\.hash\s*=\s*\{([^}]*)\}", source.read_text())
    manifest = _read_manifest(path / MANIFEST)
    try:
        return ModelDirectory(
            path=path,
            name=numbers["NAME"].strip('"'),
            sha256=bytes(int(value, 0) for value in digest[1].replace("u", "").split(",") if value.strip())
            if digest
            else b"",
            arena_bytes=_number(numbers["ARENA_BYTES"]),
            parameter_bytes=_number(numbers["PARAMETER_BYTES"]),
            input_bytes=_number(numbers["INPUT_BYTES"]),
            class_count=_number(numbers["CLASS_COUNT"]),
            input=manifest.input,
            classes=manifest.classes,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise BoardJobError(f"{path} is not a compiled model of this version ({error!r}); compile it again") from error


def write_manifest(path: Path, form: InputFormat, classes: tuple[str, ...]) -> None:
    """Write model.json beside the tables of a model."""
    content = {"v": MANIFEST_VERSION, "input": asdict(form), "classes": list(classes)}
    write_atomically(path / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")


def _number(text: str) -> int:
    return int(text.rstrip("uU"), 0)


def _read_manifest(path: Path) -> _Manifest:
    if not path.is_file():
        return _Manifest()
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Version).v
        if version == MANIFEST_VERSION:
            return msgspec.json.decode(content, type=_Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BoardJobError(f"{path} cannot be read ({error}); compile the model again") from error
    raise BoardJobError(f"{path} has version {version}, expected {MANIFEST_VERSION}; compile the model again")

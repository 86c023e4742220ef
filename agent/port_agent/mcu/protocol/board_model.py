"""A compiled model as the agent sees it: a directory with model.c, model.h and model.json.

model.json adds what the C tables lack: the shape and scale of the input, and the names of the classes. A directory
without it accepts only int8 samples.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.system.atomic_file import write_atomically

MANIFEST_VERSION = 1
MANIFEST = "model.json"
MIN_CODES = 8
"""The least codes from zero that data reach; with fewer, they have other units than the model."""
MAX_CLIPPED_SHARE = 0.5
"""Largest share of values outside the calibrated range; a larger share means that the data have
other units than the model.
"""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Shape [channels, height, width] of a float sample, and its quantisation: real = scale * (q - zero)."""

    channels: int
    height: int
    width: int
    scale: float
    zero: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that a sample may have: whole, and without the axes that a stream, features
        or a single channel lack.
        """
        whole = (self.channels, self.height, self.width)
        stream = ((self.channels, self.width),) if self.height == 1 else ()
        features = ((self.channels,),) if self.height == self.width == 1 else ()
        single = ((self.height, self.width),) if self.channels == 1 < self.height else ()
        return whole, *stream, *features, *single

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest real value that is not clipped."""
        return self.scale * (-128 - self.zero), self.scale * (127 - self.zero)

    def clipped(self, reals: NDArray[Any]) -> int:
        """Return how many real values lie outside the limits by more than rounding."""
        low, high = self.limits
        return int(((reals < low - self.scale) | (reals > high + self.scale)).sum())

    def refuse_clipped(self, clipped: int, size: int, place: str) -> None:
        """Raise BoardJobError if more than half of `size` values are clipped, which means that they have
        other units than the model.
        """
        if clipped > MAX_CLIPPED_SHARE * size:
            low, high = self.limits
            raise BoardJobError(
                f"{place}: {clipped / size:.0%} of the values lie outside {low:.3g} to {high:.3g}, the range that the "
                "model was calibrated for, and would be clipped; scale the data like the calibration data"
            )

    def faint(self, largest: float) -> str | None:
        """Return what is wrong with data whose largest value is below MIN_CODES steps: int8
        hardly tells samples apart.
        """
        if largest >= MIN_CODES * self.scale:
            return None
        low, high = self.limits
        return (
            f"all values are between {-largest:.3g} and {largest:.3g}, but the model was calibrated for {low:.3g} to "
            f"{high:.3g}, which leaves them {int(largest / self.scale)} steps of int8; scale the data like the "
            "calibration data"
        )

    def refuse_faint(self, largest: float, place: str) -> None:
        """Raise BoardJobError if int8 hardly tells samples apart whose largest value is this."""
        if note := self.faint(largest):
            raise BoardJobError(f"{place}: {note}")


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
    """The number of outputs."""
    target_count: int
    """Number of targets of each sample, in fp32 after the input; 0: a sample has a label."""
    input: InputFormat | None
    classes: tuple[str, ...]

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample to learn from."""
        return self.input_bytes + 4 * self.target_count

    def quantize(self, samples: NDArray[Any]) -> NDArray[np.int8]:
        """Return samples as int8 rows [N, input_bytes], in the device's order.

        Samples are real values [N, channels, height, width], or without the axes after the channels if these are 1.
        Raises BoardJobError for samples of another shape, for int8, and for values that are not finite real numbers.
        """
        form, reals = self._real_samples(samples)
        # the rule of port_planner.mcu.quantize: half up, in float32
        quantized = np.floor(reals.transpose(0, 2, 3, 1) / np.float32(form.scale) + np.float32(0.5)) + form.zero
        rows: NDArray[np.int8] = np.clip(quantized, -128, 127).astype(np.int8).reshape(len(samples), self.input_bytes)
        return rows

    def count_clipped(self, samples: NDArray[Any]) -> int:
        """Return how many values lie outside the calibrated range by more than rounding.

        Raises BoardJobError as `quantize` does.
        """
        form, reals = self._real_samples(samples)
        return form.clipped(reals)

    def codes(self, samples: NDArray[Any]) -> NDArray[np.int8]:
        """Return codes unchanged: int8 rows [N, input_bytes] in the device's order.

        Raises BoardJobError for another type or shape.
        """
        if samples.dtype != np.int8 or samples.shape[1:] != (self.input_bytes,):
            raise BoardJobError(
                f"codes of shape {list(samples.shape[1:])} and type {samples.dtype}; {self.name} takes "
                f"int8 rows [N, {self.input_bytes}]"
            )
        return np.ascontiguousarray(samples)

    def describe_input(self) -> str:
        """Return a description of the input for people."""
        rows = f"int8 rows [N, {self.input_bytes}] named codes"
        return rows if self.input is None else f"real values {['N', *self.input.shapes[0]]}, or {rows}".replace("'", "")

    def _real_samples(self, samples: NDArray[Any]) -> tuple[InputFormat, NDArray[np.float32]]:
        """Return the input's format, and samples as float32 [N, channels, height, width]."""
        form = self.input
        if form is None:
            raise BoardJobError(f"{self.path} has no {MANIFEST}, so real values have no scale; compile the model again")
        if samples.dtype == np.int8:
            raise BoardJobError(
                "samples of type int8 may be real values or codes as the device takes them; give real values in "
                "another type, and codes under the name codes (compile again what an older mcu compile wrote): "
                f"{self.name} takes {self.describe_input()}"
            )
        if samples.dtype.kind not in "fiub":
            raise BoardJobError(f"samples of type {samples.dtype}; {self.name} takes {self.describe_input()}")
        if samples.shape[1:] not in form.shapes:
            raise BoardJobError(
                f"samples of shape {list(samples.shape[1:])}, axis by axis; {self.name} takes {self.describe_input()}"
            )
        with np.errstate(over="ignore"):
            reals = samples.astype(np.float32).reshape(len(samples), *form.shapes[0])
        wrong = int(reals.size - np.isfinite(reals).sum())
        if wrong:
            raise BoardJobError(
                f"{wrong:,} of {reals.size:,} values are NaN or infinite in float32; leave those samples out"
            )
        return form, reals


def read_model(path: Path) -> ModelDirectory:
    """Return the model in directory `path`; raise BoardJobError, naming the missing file."""
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
            target_count=_number(numbers.get("TARGET_COUNT", "0")),
            input=manifest.input,
            classes=manifest.classes,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise BoardJobError(f"{path} is not a compiled model of this version ({error!r}); compile it again") from error


def write_manifest(path: Path, form: InputFormat, classes: tuple[str, ...]) -> None:
    """Write model.json next to the tables of a model."""
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

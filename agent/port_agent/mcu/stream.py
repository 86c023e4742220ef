"""Turns a connected stream of samples into files in an inbox.

A job then trains on them round by round. Values are stored as real numbers, so that a model compiled with other ranges
can read the same samples.

The stream is JSON lines, {"x": numbers in the shape of a sample, "y": class, or the targets}, from standard input, a
FIFO, a serial port or tcp:HOST:PORT: what a sensor program can print. Numbers without their shape could be in any order
of axes, so they are bad lines if a sample has several axes. Written to disk first, a sample survives power cuts and
unplugs of the board that learns it.
"""

import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from port_agent.mcu.board.board_errors import BoardJobError, DisconnectedError
from port_agent.mcu.protocol.board_model import ModelDirectory
from port_agent.system.atomic_file import write_atomically
from port_planner.base.targets import TargetError, with_targets

Answer = int | list[float]
"""A class, or targets."""
Sample = tuple[NDArray[np.float32], Answer]
LINE_MAX = 1 << 20
"""Largest size in bytes of one sample as text; 128x128x3 numbers take about 250 KB."""
TCP = "tcp:"


class _Line(msgspec.Struct):
    x: list[float | list[float | list[float]]]
    y: float | list[float]


@dataclass(slots=True)
class RecordingTotals:
    """The totals of a recording."""

    samples: int = 0
    files: int = 0
    bad_lines: int = 0
    problem: str = ""
    """The reason why the newest bad line is one."""


def open_stream(source: str) -> BinaryIO:
    """Open the stream that `source` names: "-", "tcp:HOST:PORT" or a path.

    Raises DisconnectedError if it cannot be opened.
    """
    try:
        if source == "-":
            return sys.stdin.buffer
        if source.startswith(TCP):
            host, _, port = source.removeprefix(TCP).rpartition(":")
            connection = socket.create_connection((host, int(port)))
            with closing(connection):  # the file keeps the connection open
                return connection.makefile("rb")
        return open(source, "rb")
    except (OSError, ValueError) as error:
        raise DisconnectedError(source, str(error)) from error


def record(
    stream: Iterable[bytes],
    inbox: Path,
    model: ModelDirectory,
    per_file: int,
    report: Callable[[RecordingTotals], None],
    clock: Callable[[], float] = time.time,
) -> RecordingTotals:
    """Write every `per_file` samples of `stream` as one file into `inbox` until the stream ends.

    Bad lines are counted, and the first is reported at once.
    """
    inbox.mkdir(parents=True, exist_ok=True)
    seen = RecordingTotals()
    pending: list[Sample] = []
    for line in stream:
        try:
            sample = read_line(line, model)
        except BoardJobError as error:
            seen.bad_lines, seen.problem = seen.bad_lines + 1, str(error)
            if seen.bad_lines == 1:
                report(seen)
            continue
        pending.append(sample)
        seen.samples += 1
        if len(pending) >= per_file:
            _write(inbox, pending, seen, clock)
            report(seen)
    if pending:
        _write(inbox, pending, seen, clock)
        report(seen)
    return seen


def read_line(line: bytes, model: ModelDirectory) -> Sample:
    """Return one sample in real values and its label or targets.

    Raises BoardJobError for a line that does not fit this model.
    """
    if len(line) > LINE_MAX:
        raise BoardJobError(f"a line of {len(line):,} bytes; give one sample in each, of at most {LINE_MAX:,} bytes")
    try:
        sample = msgspec.json.decode(line, type=_Line)
        values = np.asarray(sample.x, np.float32)
        model.quantize(values[None])
        whole = values if model.input is None else values.reshape(model.input.shapes[0])
        return whole, _answer(sample.y, model)
    except (ValueError, RecursionError, TargetError) as error:
        raise BoardJobError(f"{error}; print one sample in each line, such as {_example(model)}") from error


def _example(model: ModelDirectory) -> str:
    axes = 1 if model.input is None else len(model.input.shapes[-1])
    numbers = "[" * axes + "1.5, ...]" + ", ...]" * (axes - 1)
    return f'{{"x": {numbers}, "y": 0}}'


def _answer(given: float | list[float], model: ModelDirectory) -> Answer:
    """Return a class of the model, or as many targets as it has outputs.

    Raises TargetError for targets that are not finite, or of another number, and ValueError for anything but a class.
    """
    if model.target_count:
        targets = given if isinstance(given, list) else [given]
        with_targets(np.zeros((1, 0), np.int8), np.asarray([targets]), model.target_count)
        return targets
    if isinstance(given, list) or not float(given).is_integer() or not 0 <= given < model.class_count:
        raise ValueError(f"y is {given}, but the classes are 0 to {model.class_count - 1}")
    return int(given)


def _write(inbox: Path, pending: list[Sample], seen: RecordingTotals, clock: Callable[[], float]) -> None:
    content = io.BytesIO()
    np.savez(content, x=np.stack([values for values, _ in pending]), y=np.array([answer for _, answer in pending]))
    # names sort in the order of arrival, and two recorders do not collide
    name = f"{int(clock() * 1000):015d}-{os.getpid()}-{seen.files:06d}.npz"
    write_atomically(inbox / name, content.getvalue())
    pending.clear()
    seen.files += 1

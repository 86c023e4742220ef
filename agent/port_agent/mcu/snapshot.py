"""Snapshots of a job on the host, from which it resumes bit for bit after a reset of the device
or the death of the worker.

Enough to go on bit-exact after any reset of the device or death of the worker.

File: magic, u32 length of the JSON head, head, parameter bytes, SHA-256 of all before it. Written atomically.
Next to it is a place mark without parameters, cheap enough to write whenever the worker leaves: if the device has
not been reset since, its own RAM is the newer snapshot.
"""

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from port_agent.mcu.board.board_errors import BoardJobError, SnapshotError
from port_agent.mcu.protocol.effects import TrainingOptions, TrainingState
from port_agent.system.atomic_file import write_atomically
from port_planner.ir.bundle.safetensors_io import Chunks, encode

MAGIC = b"PORTMCU1"
SNAPSHOT_NAME = "snapshot.portmcu"
BEST_NAME = "best.portmcu"
MARK_NAME = "place.json"
ROUND_NAME = "round"
COURSE_NAME = "course.txt"
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """Where a job is: samples trained in this epoch, and the running sums of the epoch."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    """Number of samples trained in total."""
    loss_sum: float = 0.0
    correct: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a restarted device needs to continue."""

    model_sha256: bytes
    position: TrainingPosition
    options: TrainingOptions
    state: TrainingState
    parameters: bytes
    accuracy: float | None = None
    """Accuracy of the best snapshot on the held-out samples."""
    held_out: str | None = None
    """Checksum of the held-out samples; accuracies on other samples are not comparable."""


@dataclass(frozen=True, slots=True)
class PlaceMark:
    """A position, and the boot of the device whose RAM has this position."""

    nonce: int
    position: TrainingPosition
    state: TrainingState
    parameters_crc: int


class _Head(msgspec.Struct, frozen=True):
    """The head of the file, in Python's own JSON because a sum of losses may be infinite."""

    model: str
    position: TrainingPosition
    options: TrainingOptions
    state: TrainingState
    accuracy: float | None = None
    held_out: str | None = None


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """Write `snapshot` and return its size in bytes."""
    head = _Head(
        snapshot.model_sha256.hex(),
        snapshot.position,
        snapshot.options,
        snapshot.state,
        snapshot.accuracy,
        snapshot.held_out,
    )
    text = json.dumps(msgspec.to_builtins(head)).encode()
    content = MAGIC + struct.pack("<I", len(text)) + text + snapshot.parameters
    content += hashlib.sha256(content).digest()
    write_atomically(path, content)
    return len(content)


def read_snapshot(path: Path) -> Snapshot | None:
    """Return the snapshot at `path`; None if there is none.

    Raises SnapshotError if it is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        raise SnapshotError(f"{path} ({len(content)} bytes) is damaged; delete it to start the job again")
    (length,) = struct.unpack_from("<I", body, len(MAGIC))
    start = len(MAGIC) + 4
    try:
        head = msgspec.convert(json.loads(body[start : start + length]), _Head)
        model = bytes.fromhex(head.model)
    except ValueError as error:  # msgspec's too
        raise SnapshotError(f"{path} has another version ({error!r}); delete it to start the job again") from error
    parameters = body[start + length :]
    return Snapshot(model, head.position, head.options, head.state, parameters, head.accuracy, head.held_out)


def export_parameters(snapshot: Snapshot) -> bytes:
    """Return a safetensors file with the parameter bytes as one tensor.

    What they belong to is its metadata.

    The same parameters give the same bytes: results can be compared by their checksum.
    """
    about = {
        "format": "port-mcu",
        "model_sha256": snapshot.model_sha256.hex(),
        "steps": str(snapshot.state.steps),
        "generator": str(snapshot.state.generator),
    }
    data = snapshot.parameters
    return b"".join(encode({"parameters": Chunks("uint8", (len(data),), lambda: [data])}, metadata=about))


def begin_round(folder: Path, number: int) -> None:
    """Start round `number` of a job that waits for data: the weights continue, the position restarts.

    Repeating the same number, as a resumed worker does, changes nothing.
    """
    path = folder / ROUND_NAME
    if path.is_file() and path.read_text().strip() == str(number):
        return
    keep_weights_only(folder)
    write_atomically(path, f"{number}\n".encode())


def keep_weights_only(folder: Path) -> None:
    """Use the weights of the newest snapshot as the start of another training, with other samples, seed or rate."""
    snapshot = read_snapshot(folder / SNAPSHOT_NAME)
    (folder / MARK_NAME).unlink(missing_ok=True)
    if snapshot is not None:
        write_snapshot(folder / SNAPSHOT_NAME, replace(snapshot, position=TrainingPosition()))
    for name in (COURSE_NAME, BEST_NAME):
        (folder / name).unlink(missing_ok=True)


def keep_course(folder: Path, course: str) -> None:
    """Record in `folder` what its position counts: samples in the order of a seed, each trained at a given rate.

    Raises BoardJobError if an existing position counts something else, because it would then be meaningless.
    """
    path = folder / COURSE_NAME
    began = any((folder / name).is_file() for name in (SNAPSHOT_NAME, MARK_NAME))
    if began and path.is_file() and (before := path.read_text().strip()) != course:
        raise BoardJobError(
            f"{folder} has a training of {before}; now it is {course}. Restore these, give another --state-dir to "
            "start with the weights of the model, or give --keep-weights to continue from the learnt weights"
        )
    write_atomically(path, f"{course}\n".encode())


def write_mark(path: Path, mark: PlaceMark) -> None:
    """Write the place mark."""
    write_atomically(path, json.dumps(msgspec.to_builtins(mark)).encode())


def read_mark(path: Path) -> PlaceMark | None:
    """Return the place mark; None if there is no usable one, in which case the snapshot is used instead."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), PlaceMark)
    except (FileNotFoundError, ValueError, RecursionError):
        return None

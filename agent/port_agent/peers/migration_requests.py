"""Requests of a job's owner, and the answers of the device that trains it: MessagePack, everything with a cap.

A job is identified by its token, 128 random bits that its owner draws for each migration. `Offer` asks whether the
device would take it, `Bring` announces its files, `Part` sends them, and `Begin` hands it over. `Look` asks for its
state, `Stop` ends its training, `Fetch` reads its files, and `Close` makes the device forget it. Repeating any of them
has no effect.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.peers.decoding import PeerCodec, Reason, Sha256, Token
from port_agent.peers.transfer import CHUNK_BYTES, IncomingFile
from port_planner.base.errors import PortError

MAX_FILES = 2000
"""A list of this many files fits into one question."""
_MAX_FILE_BYTES = 1 << 40
_PATH_LIMIT = 255
_MAX_COUNT = 1 << 53
_MAX_PACE = 1e6

_SIZE = Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE_BYTES)]
_COUNT = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_PACE = Annotated[float, msgspec.Meta(gt=0.0, le=_MAX_PACE)]
_PATH = Annotated[str, msgspec.Meta(max_length=_PATH_LIMIT, pattern=r"^([^/\x00.][^/\x00]*)(/[^/\x00.][^/\x00]*)*\Z")]
"""Path below the job's directory; no part begins with a dot, so none leads out of it."""


class MigrationMessageError(PortError):
    """Bytes that are not a request or answer about a migrating job."""


class MigratedFile(msgspec.Struct, frozen=True):
    """A file of a job."""

    path: _PATH
    nbytes: _SIZE
    sha256: Sha256

    def into(self, path: Path) -> IncomingFile:
        """Return it as a file that arrives at `path`."""
        return IncomingFile(path, self.nbytes, self.sha256)


_FILES = Annotated[tuple[MigratedFile, ...], msgspec.Meta(max_length=MAX_FILES)]


class MigratedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner asked for, and the job's progress."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    epochs: _COUNT | None = None
    steps: _COUNT | None = None
    checkpoint_every: _COUNT | None = None
    deadline_at: Annotated[float, msgspec.Meta(ge=0.0, le=4102444800.0)] | None = None
    step: _COUNT = 0
    total_steps: _COUNT | None = None


class MigrationRequest(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True):
    """Something about a job."""

    token: Token


class Offer(MigrationRequest, tag="offer", frozen=True, kw_only=True):
    """Whether the device would take a job now. The answer promises nothing."""

    nbytes: _SIZE
    """Bytes of all files."""
    least_bytes: _SIZE
    """Memory without which it cannot run."""
    device_kind: Annotated[str, msgspec.Meta(max_length=20)]
    machine: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The kind of machine on which it began; empty for one that has not."""


class Bring(MigrationRequest, tag="bring", frozen=True, kw_only=True):
    """Announces the job; its files follow."""

    job: MigratedJob
    files: _FILES


class Part(MigrationRequest, tag="part", frozen=True, kw_only=True):
    """The bytes of the `file`-th file from `offset` on."""

    file: Annotated[int, msgspec.Meta(ge=0, lt=MAX_FILES)]
    offset: _SIZE
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHUNK_BYTES)]


class Begin(MigrationRequest, tag="begin", frozen=True, kw_only=True):
    """From here on the device has the job."""


class Look(MigrationRequest, tag="look", frozen=True, kw_only=True):
    """How the job fares."""


class Stop(MigrationRequest, tag="stop", frozen=True, kw_only=True):
    """Stop training it; its files will be fetched."""


class Fetch(MigrationRequest, tag="fetch", frozen=True, kw_only=True):
    """The bytes of a file from `offset` on."""

    path: _PATH
    offset: _SIZE


class Close(MigrationRequest, tag="close", frozen=True, kw_only=True):
    """The owner has what it needs; forget the job."""


Request = Offer | Bring | Part | Begin | Look | Stop | Fetch | Close


class MigrationState(StrEnum):
    """The state of a job on a device."""

    WELCOME = "welcome"
    """The device would take the job now."""
    REFUSED = "refused"
    """The device does not take the job, for the given reason."""
    RECEIVING = "receiving"
    """The device has all files before number `file`, and `offset` bytes of that one; a number past the last: all files."""
    WORKING = "working"
    """The job is in line there."""
    STOPPING = "stopping"
    """The job's worker is leaving."""
    STOPPED = "stopped"
    """The job will not train there any more; `files` are its checkpoint."""
    FAILED = "failed"
    """The job failed there; `files` are its checkpoint."""
    DONE = "done"
    """The job is trained; `files` is its result."""
    PART = "part"
    """`data` is the requested part."""
    CLOSED = "closed"
    """Nothing of it is left."""
    UNKNOWN = "unknown"
    """There is no such job."""


class MigrationAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to each of these requests."""

    state: MigrationState
    reason: Reason = ""
    pace: _PACE = 1.0
    """Factor by which steps take longer there than planned here, if measured."""
    joules_pace: _PACE = 1.0
    file: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILES)] = 0
    offset: _SIZE = 0
    trains: bool = False
    step: _COUNT = 0
    total_steps: _COUNT | None = None
    loss: float | None = None
    trained_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    machine: Annotated[str, msgspec.Meta(max_length=64)] = ""
    files: _FILES = ()
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)] = b""


MOVE_REQUESTS: "PeerCodec[Request]" = PeerCodec(Request, MigrationMessageError, "not a request about a job")
MOVE_ANSWERS: "PeerCodec[MigrationAnswer]" = PeerCodec(
    MigrationAnswer, MigrationMessageError, "not an answer about a job"
)

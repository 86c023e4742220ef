"""Requests of a job's owner, and the answers of the device that trains the job, as MessagePack
with limits on everything.

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
"""Largest number of files; a list of so many fits into one question."""
_MAX_FILE_BYTES = 1 << 40
_PATH_LIMIT = 255
_MAX_COUNT = 1 << 53
_MAX_PACE = 1e6

_SIZE = Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE_BYTES)]
_COUNT = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_PACE = Annotated[float, msgspec.Meta(gt=0.0, le=_MAX_PACE)]
_PATH = Annotated[str, msgspec.Meta(max_length=_PATH_LIMIT, pattern=r"^([^/\x00.][^/\x00]*)(/[^/\x00.][^/\x00]*)*\Z")]
"""Pattern of a path below the job's directory. No part begins with a dot, so none leads out of it."""


class MigrationMessageError(PortError):
    """Bytes that are not a request or an answer about a migrating job."""


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
    """The owner's request, and the job's progress."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    epochs: _COUNT | None = None
    steps: _COUNT | None = None
    checkpoint_every: _COUNT | None = None
    deadline_at: Annotated[float, msgspec.Meta(ge=0.0, le=4102444800.0)] | None = None
    step: _COUNT = 0
    total_steps: _COUNT | None = None


class MigrationRequest(msgspec.Struct, tag_field="kind", frozen=True, kw_only=True):
    """A request about a job."""

    token: Token


class Offer(MigrationRequest, tag="offer", frozen=True, kw_only=True):
    """Asks whether the device would accept a job now. The answer promises nothing."""

    nbytes: _SIZE
    """Bytes of all files."""
    least_bytes: _SIZE
    """Least memory in bytes with which it can run."""
    device_kind: Annotated[str, msgspec.Meta(max_length=20)]
    machine: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The kind of machine on which the job began; empty if it has not begun."""


class Bring(MigrationRequest, tag="bring", frozen=True, kw_only=True):
    """Announces the job; its files follow."""

    job: MigratedJob
    files: _FILES


class Part(MigrationRequest, tag="part", frozen=True, kw_only=True):
    """A part of file number `file`, which begins at `offset`."""

    file: Annotated[int, msgspec.Meta(ge=0, lt=MAX_FILES)]
    offset: _SIZE
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=CHUNK_BYTES)]


class Begin(MigrationRequest, tag="begin", frozen=True, kw_only=True):
    """Hands the job over: from now on, the device has it."""


class Look(MigrationRequest, tag="look", frozen=True, kw_only=True):
    """Asks for the job's state."""


class Stop(MigrationRequest, tag="stop", frozen=True, kw_only=True):
    """Stops its training; its files will be fetched."""


class Fetch(MigrationRequest, tag="fetch", frozen=True, kw_only=True):
    """Asks for a part of a file, which begins at `offset`."""

    path: _PATH
    offset: _SIZE


class Close(MigrationRequest, tag="close", frozen=True, kw_only=True):
    """Makes the device delete the job, because the owner has what it needs."""


Request = Offer | Bring | Part | Begin | Look | Stop | Fetch | Close


class MigrationState(StrEnum):
    """The state of a job on a device."""

    WELCOME = "welcome"
    """The device would accept the job now."""
    REFUSED = "refused"
    """The device does not accept the job, for the given reason."""
    RECEIVING = "receiving"
    """The device has all files before number `file`, and `offset` bytes of that one.

    A number beyond the last means that it has all files.
    """
    WORKING = "working"
    """The job is in the queue there."""
    STOPPING = "stopping"
    """The job's worker is leaving."""
    STOPPED = "stopped"
    """The job will no longer train there; `files` are its checkpoint."""
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
    """The answer to any of these requests."""

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


MIGRATION_REQUESTS: "PeerCodec[Request]" = PeerCodec(Request, MigrationMessageError, "not a request about a job")
MIGRATION_ANSWERS: "PeerCodec[MigrationAnswer]" = PeerCodec(
    MigrationAnswer, MigrationMessageError, "not an answer about a job"
)

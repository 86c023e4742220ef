"""Requests of clients, checked at the boundary: a JSON object becomes a typed request or is rejected."""

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from port_agent.control.http import HttpError
from port_agent.federate.orders import FederationSettings
from port_agent.jobs.job import JobKind, JobRequestError, JobSpec
from port_agent.system.clock import LONGEST_PAUSE_S
from port_agent.system.mounts import file_system, in_ram
from port_agent.worker.shard import Shard
from port_planner.base.units import shown

_CODE_LIMIT, _HOST_LIMIT = 40, 255
"""Longest texts in characters: a pairing code with any grouping, and a host name (RFC 1035)."""
_LONGEST_CODE_S = 3600.0
"""Longest life of a pairing code in seconds; a code is for immediate use."""
_REASON_LIMIT = 200
_LONGEST_SOLVING_S = 3600.0
"""Longest time to solve in seconds, as in `port_agent.peers.connection.messages`."""
_SETTINGS = JobSpec.__dataclass_fields__.keys() - {"owner", "guest"}
"""Settings of a job that a client may give; the agent itself knows the owner."""
_ENVELOPE = {"upload", "v"}
_WITH_VALUE = ("--board", "--port", "--serial", "--shard")
_BOARD_ARGUMENTS = (*_WITH_VALUE, "--simulate")

T = TypeVar("T")


class JobChange(msgspec.Struct, frozen=True):
    """Changes to a job; omitted settings stay as they are."""

    priority: int | None = None
    deadline_at: float | msgspec.UnsetType | None = msgspec.UNSET
    """Unix time; None removes the deadline."""

    def apply(self, spec: JobSpec) -> JobSpec:
        """Return `spec` after the change."""
        if self.priority is not None:
            spec = replace(spec, priority=self.priority)
        return spec if self.deadline_at is msgspec.UNSET else replace(spec, deadline_at=self.deadline_at)

    @property
    def moves_deadline(self) -> bool:
        """Whether the deadline changes."""
        return self.deadline_at is not msgspec.UNSET

    def __str__(self) -> str:
        parts = [] if self.priority is None else [f"priority is now {self.priority}"]
        return ", ".join([*parts, f"deadline_at is now {self.deadline_at}"] if self.moves_deadline else parts)


class PauseRequest(msgspec.Struct, frozen=True):
    """How long to pause everything; None: until it is resumed."""

    for_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PAUSE_S)] | None = None


class RunNowRequest(msgspec.Struct, frozen=True):
    """How long a job is to run now, in seconds; None: until it ends."""

    for_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_PAUSE_S)] | None = None


class PairingRequest(msgspec.Struct, frozen=True):
    """Show a pairing code for a time, or enter one.

    `host` and `port` are those of the device that shows it, if known.
    """

    code: Annotated[str, msgspec.Meta(max_length=_CODE_LIMIT)] | None = None
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)] | None = None
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)] | None = None
    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_CODE_S)] | None = None


class UnpairingRequest(msgspec.Struct, frozen=True):
    """The device that must no longer be trusted."""

    device: Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)]


class WrongAnswer(msgspec.Struct, frozen=True):
    """A paired device that gave a wrong answer, and what was wrong with it."""

    device: Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)]
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=_REASON_LIMIT)]


class FederationStart(msgspec.Struct, frozen=True):
    """The job of a federation to lead, and its settings."""

    job: Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)]
    settings: FederationSettings


def solving_seconds(text: str) -> float:
    """Return the CPU time for another device's solver; raises `HttpError`."""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", text) or float(text) > _LONGEST_SOLVING_S:
        raise HttpError(
            400, f"seconds={shown(text)} is not a valid time for solving; give a number up to {_LONGEST_SOLVING_S:.0f}"
        )
    return float(text)


def job_spec(fields: Mapping[str, object], bundle: str | None) -> JobSpec:
    """Return the job that a request describes; `bundle` is its uploaded bundle. Raises `JobRequestError`."""
    unknown = set(fields) - _SETTINGS - _ENVELOPE
    if unknown:
        raise JobRequestError(f"unknown settings of a job: {', '.join(sorted(unknown))}")
    given = {name: value for name, value in fields.items() if name in _SETTINGS and value is not None}
    _check_kind(given.get("kind", JobKind.TRAIN.value))
    try:
        spec = msgspec.convert({**given, "bundle": bundle or given.get("bundle")}, JobSpec)
    except msgspec.ValidationError as error:
        raise JobRequestError(f"the job cannot be read: {error}") from error
    if spec.kind is JobKind.FINETUNE and bundle is None:
        raise JobRequestError("a fine-tuning's bundle is uploaded; submit it with `port-agent finetune --submit`")
    if (
        bundle is None
        and spec.bundle is not None
        and not (Path(spec.bundle).is_absolute() and Path(spec.bundle).exists())
    ):
        raise JobRequestError(f"the agent cannot read the bundle {spec.bundle!r}; let the client upload it")
    if spec.data is not None and not (Path(spec.data).is_absolute() and Path(spec.data).is_dir()):
        raise JobRequestError(
            f"the agent cannot see the directory {spec.data}; submit with --inbox and `port-agent job feed` the files"
        )
    if not re.fullmatch("([0-9a-f]{32})?", spec.submission):
        raise JobRequestError(f"submission is {shown(spec.submission)}; give 32 hexadecimal digits that are used once")
    if spec.name.isdigit():
        raise JobRequestError(
            f"the name {spec.name} is a number, which every command would take for a job's number; give another --name"
        )
    _check_page_dirs(spec)
    _check_arguments(spec)
    return spec


class RecallRequest(msgspec.Struct, frozen=True):
    """Take a job back; `force`: without waiting for the other device."""

    force: bool = False


def decode_control_request(fields: Mapping[str, object], kind: type[T]) -> T:
    """Return the request of this kind that a JSON object describes; raises `HttpError`."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"the request cannot be read: {error}") from error


def _check_kind(kind: object) -> None:
    if kind not in (JobKind.TRAIN.value, JobKind.MCU.value, JobKind.FINETUNE.value):
        raise JobRequestError(f"there is no job kind {kind!r}; use train, mcu or finetune")


def _check_page_dirs(spec: JobSpec) -> None:
    """Raise JobRequestError unless pages can be written to the page directories."""
    if spec.page_dirs and spec.kind is not JobKind.TRAIN:
        raise JobRequestError(f"page_dirs are {list(spec.page_dirs)}; only a job of kind train uses pages")
    for name in spec.page_dirs:
        folder = Path(name)
        if not (folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK)):
            raise JobRequestError(
                f"the agent cannot write to the page directory {name}; create it for the agent's user (the shipped "
                "service also needs a ReadWritePaths= line, `systemctl edit port-agent`)"
            )
        if in_ram(folder):
            raise JobRequestError(
                f"the page directory {name} is itself in RAM ({file_system(folder)}); name one on a disk"
            )


def _check_arguments(spec: JobSpec) -> None:
    """Raise JobRequestError unless the options for the worker only choose a board, and do nothing
    else such as writing files.
    """
    words = iter(spec.arguments)
    for word in words:
        if word not in _BOARD_ARGUMENTS or (word in _WITH_VALUE and next(words, "-").startswith("-")):
            raise JobRequestError(
                f"arguments are {list(spec.arguments)}; a job accepts only {', '.join(_BOARD_ARGUMENTS)}"
            )
    for name, value in itertools.pairwise(spec.arguments):
        if name == "--shard":
            try:
                Shard.parse(value)
            except ValueError as error:
                raise JobRequestError(str(error)) from error
    if spec.arguments and spec.kind is not JobKind.MCU:
        raise JobRequestError(f"arguments are {list(spec.arguments)}; only a job of kind mcu accepts arguments")

"""What clients ask for, checked at the boundary: a JSON object becomes a typed request or is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.control.http import HttpError
from agent.jobs.model import JobKind, JobRequestError, JobSpec

_LONGEST_PAUSE_S = 366 * 86400
_SPEC_TYPES: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "data": (str,),
    "epochs": (int,),
    "steps": (int,),
    "checkpoint_every": (int,),
    "priority": (int,),
    "deadline_at": (int, float),
    "waits_for_data": (bool,),
}
_OTHER_FIELDS = {"kind", "upload", "bundle", "arguments", "v"}


@dataclass(frozen=True, slots=True)
class JobChange:
    """What is to change of a job; None leaves it as it is."""

    priority: int | None = None
    deadline_at: float | None = None
    """Unix time."""
    drop_deadline: bool = False

    def apply(self, spec: JobSpec) -> JobSpec:
        """Return `spec` after the change."""
        if self.priority is not None:
            spec = replace(spec, priority=self.priority)
        if self.moves_deadline:
            spec = replace(spec, deadline_at=self.deadline_at)
        return spec

    @property
    def moves_deadline(self) -> bool:
        """Whether the deadline changes."""
        return self.drop_deadline or self.deadline_at is not None

    def __str__(self) -> str:
        parts = [] if self.priority is None else [f"priority is now {self.priority}"]
        return ", ".join([*parts, f"deadline_at is now {self.deadline_at}"] if self.moves_deadline else parts)


def job_spec(fields: Mapping[str, object], bundle: str | None) -> JobSpec:
    """Return the job that a request describes; `bundle` is its uploaded bundle. Raises `JobRequestError`."""
    unknown = set(fields) - _SPEC_TYPES.keys() - _OTHER_FIELDS
    if unknown:
        raise JobRequestError(f"unknown settings of a job: {', '.join(sorted(unknown))}")
    known: dict[str, Any] = {name: fields[name] for name in _SPEC_TYPES if fields.get(name) is not None}
    for name, value in known.items():
        types = _SPEC_TYPES[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise JobRequestError(f"{name} is {value!r}; expected {types[0].__name__}")
    bundle = bundle or _own_bundle(fields.get("bundle"))
    data = known.get("data")
    if data is not None and not Path(data).is_dir():
        raise JobRequestError(
            f"the agent cannot see the directory {data}; submit with --inbox and `port-agent feed` the files"
        )
    if "name" not in known:
        raise JobRequestError("a job needs a name")
    return JobSpec(bundle=bundle, kind=_kind(fields), arguments=_arguments(fields), **known)


def job_change(fields: Mapping[str, object]) -> JobChange:
    """Return the change that a request asks for; raises `HttpError`."""
    priority, deadline = fields.get("priority"), fields.get("deadline_at")
    if priority is not None and not (isinstance(priority, int) and -100 <= priority <= 100):
        raise HttpError(400, f"priority {priority!r} is no number between -100 and 100")
    if deadline is not None and not isinstance(deadline, int | float):
        raise HttpError(400, f"deadline_at {deadline!r} is no Unix time")
    return JobChange(priority, deadline, drop_deadline="deadline_at" in fields and deadline is None)


def pause_span_s(fields: Mapping[str, object]) -> float | None:
    """Return for how many seconds to pause everything, None for good; raises `HttpError`."""
    for_s = fields.get("for_s")
    if for_s is None:
        return None
    if not isinstance(for_s, int | float) or not 0 < for_s < _LONGEST_PAUSE_S:
        raise HttpError(400, f"for_s {for_s!r} is no number of seconds below a year")
    return float(for_s)


def _own_bundle(path: object) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str) or not Path(path).exists():
        raise JobRequestError(f"the agent cannot read the bundle {path!r}; let the client upload it")
    return path


def _kind(fields: Mapping[str, object]) -> JobKind:
    try:
        return JobKind(fields.get("kind", "train"))
    except ValueError as error:
        raise JobRequestError(f"there is no job kind {fields.get('kind')!r}; use train or mcu") from error


def _arguments(fields: Mapping[str, object]) -> tuple[str, ...]:
    words = fields.get("arguments") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise JobRequestError(f"arguments are {words!r}; expected a list of words")
    return tuple(words)

"""What was decided when, and why: a line for each change, in a separate file that is kept small and for a month."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from port_agent.policy.decide import PolicyDecision
from port_agent.system.atomic_file import write_atomically

FILE_NAME = "timeline.jsonl"
KEPT_S = 31 * 86400.0
MAX_BYTES = 256 << 10
"""Largest size in bytes: some thousand changes, of which the newest are kept."""
_MAX_TEXT = 200
TRAINING, FREE, STARTED, STOPPED = "training", "free to train, no job", "the agent started", "the agent stopped"
ASLEEP = "the machine slept"


class TimelineEntry(msgspec.Struct, frozen=True, array_like=True):
    """A state that began at `at` (Unix time); `codes` are those of the decision."""

    at: float
    text: str
    codes: tuple[str, ...] = ()


class Timeline:
    """The changes, which are on disk after the next `flush`."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        self._last: tuple[str, tuple[str, ...]] | None = None
        self._pending: list[TimelineEntry] = []

    def take(self, wall_s: float, decision: PolicyDecision, *, busy: bool) -> None:
        """Record a decision; only a new state or a new set of conditions makes an entry."""
        if decision.state.trains:
            text, codes = (TRAINING if busy else FREE), decision.codes
        else:
            text, codes = "; ".join(decision.reasons), decision.codes
        kind = TRAINING if busy and decision.state.trains else "", codes
        if kind != self._last:
            self.note(wall_s, text, codes)
            self._last = kind

    def note(self, wall_s: float, text: str, codes: tuple[str, ...] = ()) -> None:
        """Add an entry; after it, the next decision is recorded even if it is the same as before."""
        self._last = None
        self._pending.append(TimelineEntry(round(wall_s, 1), text[:_MAX_TEXT], codes))

    @property
    def pending(self) -> bool:
        """Whether something is not on disk yet."""
        return bool(self._pending)

    def flush(self, wall_s: float) -> None:
        """Write pending entries, and drop those older than a month or beyond the size limit.

        Raises OSError, and they stay pending.
        """
        pending = list(self._pending)
        if pending:
            with self._path.open("ab") as file:  # a newline first: it ends what a power cut tore
                file.write(b"".join(b"\n" + msgspec.json.encode(entry) for entry in pending))
            del self._pending[: len(pending)]
        if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
            self._shorten(wall_s)

    def since(self, wall_s: float) -> list[TimelineEntry]:
        """Return the entries since a moment (Unix time), preceded by the one in force then; raises OSError."""
        entries = [*self._stored(), *self._pending]
        first = max((number for number, entry in enumerate(entries) if entry.at <= wall_s), default=0)
        return entries[first:]

    def _shorten(self, wall_s: float) -> None:
        kept, left = [], MAX_BYTES // 2
        for entry in reversed(list(self._stored())):
            line = msgspec.json.encode(entry) + b"\n"
            left -= len(line)
            if left < 0 or entry.at < wall_s - KEPT_S:
                break
            kept.append(line)
        write_atomically(self._path, b"".join(reversed(kept)))

    def _stored(self) -> Iterator[TimelineEntry]:
        """Yield the entries of the file; a line that a power cut truncated is left out."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in content.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=TimelineEntry)

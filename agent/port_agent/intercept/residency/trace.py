"""What the program did before: traces of its segments, and when each storage is needed next.

A segment ends where a `backward()` or an optimizer's step ends. Traces are matched by prefix: several are kept
(lengths, branches, accumulation phases, evaluation), and one that was seen before is recognised at its first operators.
A trace is only advice; if the program does something else it is dropped and nothing is lost.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from port_agent.intercept.residency.storages import NEVER, Storage

TRACES_KEPT = 32
"""Different segments remembered; the least recently seen is forgotten."""

LONGEST_SEGMENT = 100_000
"""Operators after which a segment is cut, so that a loop that never calls backward() does not grow without limit."""

OPERATORS_KEPT = 150_000
"""Operators of all remembered segments together, of 600 bytes each; the last segment stays whatever its length."""

CHAIN = 4
"""Segments that are searched ahead for the next use of a storage that outlives its segment."""

AHEAD = 48
"""Operators ahead for which pages are prefetched."""

Birth = tuple[int, int, int]
"""Segment, position and output that made a storage."""

Key = int | tuple[int, int, int]
"""A storage from before: its number, or how many segments ago and at which position it was made."""


@dataclass(slots=True)
class Entry:
    """One operator: its fingerprint, the bytes of its results and workspace, and its operands as indices into the
    locals.
    """

    fingerprint: int
    made_bytes: int
    workspace_bytes: int
    operands: tuple[int, ...]
    next_uses: tuple[int, ...] = ()
    """Position of the next use of each operand in this segment; NEVER if there is none."""
    reserve_bytes: int = 0
    """The largest result and workspace of this and the next `AHEAD` operators."""

    leaving: set[int] | None = None
    """Operands that had to be written and evicted before their next use the last time: they are written at once."""

    @property
    def need_bytes(self) -> int:
        """The operator's result and workspace in bytes."""
        return self.made_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Use:
    """One operand of one operator of a trace."""

    entry: Entry
    operand: int

    def left(self) -> None:
        """Record that the operand had to be written and evicted before it was needed again."""
        if self.entry.leaving is None:
            self.entry.leaving = set()
        self.entry.leaving.add(self.operand)

    def stayed(self) -> None:
        """Record that the operand was still resident when it was needed again."""
        if self.entry.leaving is not None:
            self.entry.leaving.discard(self.operand)


NOTHING: dict[int, bool] = {}
"""Empty eviction set."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A plan's decisions for one segment. Everything that it does not name stays."""

    leaving: dict[int, dict[int, bool]] = field(default_factory=dict)
    """Position -> operands evicted after it, and whether they are recomputed instead of paged."""
    remade: set[int] = field(default_factory=set)
    """Positions whose result will be recomputed."""


@dataclass(slots=True, eq=False)
class Trace:
    """A recorded segment. Locals are its storages in the order of their first use."""

    entries: list[Entry] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    """Rolling hash of the fingerprints up to each position."""
    entering: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    """Locals that come from before the segment, by their keys."""
    first_use: dict[Key, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    """Locals that the program freed in the segment: before which operator, the last time."""
    ends_before: dict[Key, int] = field(default_factory=dict)
    """The same for storages from before that the segment does not use."""
    successor: "Trace | None" = None
    plan: SegmentPlan | None = None

    def __len__(self) -> int:
        return len(self.entries)


def keys_of(storage: Storage, segment: int) -> tuple[Key, ...]:
    """Return the keys by which a trace of `segment` may know a storage from before."""
    if storage.birth is None or segment - storage.birth[0] > CHAIN:
        return (storage.number,)
    born, position, output = storage.birth
    return (storage.number, (segment - born, position, output))


class Recorder:
    """Records one segment."""

    def __init__(self, segment: int) -> None:
        self.trace = Trace()
        self.segment = segment
        self.numbers: list[int] = []
        """The storages of the locals in this run, by number."""
        self._locals: dict[int, int] = {}
        self._prefix = 0

    def add(
        self,
        fingerprint: int,
        inputs: Sequence[Storage],
        made: Sequence[Storage],
        workspace_bytes: int,
    ) -> None:
        """Record one operator that ran."""
        trace, position = self.trace, len(self.trace.entries)
        operands = [self._local(s, position) for s in inputs]
        for s in made:
            operands.append(self._new(s))
        made_bytes = sum(s.nbytes for s in made if s.resident)
        trace.entries.append(Entry(fingerprint, made_bytes, workspace_bytes, tuple(operands)))
        self._prefix = hash((self._prefix, fingerprint))
        trace.prefixes.append(self._prefix)

    def ended(self, storage: Storage) -> None:
        """Record that the program freed a storage before the next operator."""
        trace, position = self.trace, len(self.trace.entries)
        local = self._locals.get(storage.number)
        if local is not None:
            trace.ends[local] = position
            return
        for key in keys_of(storage, self.segment):
            trace.ends_before[key] = position

    def _local(self, storage: Storage, position: int) -> int:
        index = self._locals.get(storage.number)
        if index is None:
            index = self._new(storage)
            keys = keys_of(storage, self.segment)
            self.trace.entering[index] = keys
            for key in keys:
                self.trace.first_use.setdefault(key, position)
        return index

    def _new(self, storage: Storage) -> int:
        index = self._locals[storage.number] = len(self.numbers)
        self.numbers.append(storage.number)
        return index

    def finish(self) -> Trace:
        """Return the trace, next uses filled in."""
        later: dict[int, int] = {}
        for position in range(len(self.trace.entries) - 1, -1, -1):
            entry = self.trace.entries[position]
            entry.next_uses = tuple(later.get(local, NEVER) for local in entry.operands)
            for local in entry.operands:
                later[local] = position
        self._foresee_free()
        return self.trace

    def _foresee_free(self) -> None:
        """Fill in the memory that the operators ahead need, by a sliding maximum from the end."""
        entries = self.trace.entries
        largest: deque[int] = deque()
        for position in range(len(entries) - 1, -1, -1):
            need = entries[position].need_bytes
            while largest and need >= entries[largest[-1]].need_bytes:
                largest.pop()
            largest.append(position)
            if largest[0] >= position + AHEAD:
                largest.popleft()
            entries[position].reserve_bytes = entries[largest[0]].need_bytes


class TraceBook:
    """The kept traces, and the one that the program follows now."""

    def __init__(self) -> None:
        self.segment = 0
        self.position = 0
        self.start_clock = 0
        self.matched: Trace | None = None
        self.deviations = 0
        self.segments_matched = 0
        self.resting = False
        """Nothing is recorded or predicted: the program does something that no earlier segment predicts."""
        self._recorder = Recorder(0)
        self._traces: OrderedDict[int, Trace] = OrderedDict()
        self._previous: Trace | None = None
        self._born: dict[Birth, int] = {}

    # -- while operators run

    def expect(self, fingerprint: int) -> Entry | None:
        """Return the trace's entry for the operator that runs now; None if it has none or a different one."""
        trace, position = self.matched, self.position
        if self.resting:
            return None
        if trace is None:
            if position > 0:
                return None
            trace = self.matched = self._known(0, hash((0, fingerprint)))
            return None if trace is None else trace.entries[0]
        if position < len(trace.entries) and trace.entries[position].fingerprint == fingerprint:
            return trace.entries[position]
        self._deviate(fingerprint)
        if self.matched is None:
            return None
        return self.matched.entries[position]

    def _deviate(self, fingerprint: int) -> None:
        prefixes = self._recorder.trace.prefixes
        self.matched = self._known(self.position, hash((prefixes[-1] if prefixes else 0, fingerprint)))
        self.deviations += self.matched is None

    def _known(self, position: int, prefix: int) -> Trace | None:
        """Return the most recent trace that equals this one up to `position`."""
        return next(
            (t for t in reversed(self._traces.values()) if len(t) > position and t.prefixes[position] == prefix), None
        )

    def ran(
        self,
        fingerprint: int,
        inputs: Sequence[Storage],
        made: Sequence[Storage],
        workspace_bytes: int,
    ) -> None:
        """Record an operator that ran."""
        if self.resting:
            return
        self._recorder.add(fingerprint, inputs, made, workspace_bytes)
        for storage in made:
            if storage.birth is not None:
                self._born[storage.birth] = storage.number
        self.position += 1

    def ended(self, storage: Storage) -> None:
        """Record that the program freed a storage."""
        if not self.resting:
            self._recorder.ended(storage)
        if storage.birth is not None:
            self._born.pop(storage.birth, None)

    @property
    def plan(self) -> SegmentPlan | None:
        """The plan of the matched trace, None if there is none."""
        return None if self.matched is None else self.matched.plan

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The remembered segments."""
        return tuple(self._traces.values())

    @property
    def ended_last(self) -> Trace | None:
        """The trace of the segment that ended last."""
        return self._previous

    def entry_run(self) -> Entry:
        """Return the entry of the operator that ran last: of the matched trace, otherwise of the one being recorded."""
        trace = self._recorder.trace if self.matched is None else self.matched
        return trace.entries[self.position - 1]

    def number_of(self, local: int) -> int | None:
        """Return this run's storage number for a local of the matched trace, or None if it is not yet known."""
        if local < len(self._recorder.numbers):
            return self._recorder.numbers[local]
        if self.matched is None:
            return None
        for key in self.matched.entering.get(local, ()):
            if isinstance(key, tuple):
                found = self._born.get((self.segment - key[0], key[1], key[2]))
                if found is not None:
                    return found
            else:
                return key
        return None

    def next_clock(self, storage: Storage, position: int) -> int | None:
        """Return the clock of the next use after `position` in the segment; None if the trace does not know it.

        `position` is a value of `Entry.next_uses`.
        """
        if position != NEVER:
            return self.start_clock + position
        trace = self.matched
        if trace is None:
            return None
        ahead, offset = trace.successor, len(trace)
        for age in range(1, CHAIN + 1):
            if ahead is None:
                return None
            for key in keys_of(storage, self.segment + age):
                found = ahead.first_use.get(key)
                if found is not None:
                    return self.start_clock + offset + found
            offset += len(ahead)
            ahead = ahead.successor
        return NEVER

    def end_clock(self, storage: Storage, local: int) -> int:
        """Return the clock at which the program frees a storage that it does not use again; NEVER if unknown.

        `local` is its index in the matched trace.
        """
        ahead = self.matched
        if ahead is None:
            return NEVER
        found = ahead.ends.get(local)
        if found is not None:
            return self.start_clock + found
        offset = 0
        for age in range(1, CHAIN + 1):
            offset += len(ahead)
            ahead = ahead.successor
            if ahead is None:
                return NEVER
            for key in keys_of(storage, self.segment + age):
                found = ahead.ends_before.get(key)
                if found is not None:
                    return self.start_clock + offset + found
        return NEVER

    # -- between segments

    def end_segment(self, clock: int) -> bool:
        """End the segment; return whether it matched its trace from beginning to end."""
        recorded = self._recorder.trace
        if not recorded.entries:
            return self.matched is not None
        whole = self.matched is not None and len(self.matched.entries) == len(recorded.entries)
        if whole and self.matched is not None:
            trace = self.matched
            trace.ends, trace.ends_before = recorded.ends, recorded.ends_before
        else:
            trace = self._keep(self._recorder.finish())
        if self._previous is not None:
            self._previous.successor = trace
        self._previous = trace
        self._traces.move_to_end(trace.prefixes[-1])
        self.segments_matched += whole
        self.segment += 1
        self.position = 0
        self.start_clock = clock
        self._born = {birth: number for birth, number in self._born.items() if self.segment - birth[0] <= CHAIN}
        self._recorder = Recorder(self.segment)
        self.matched = trace.successor
        return whole

    def _keep(self, trace: Trace) -> Trace:
        same = self._traces.get(trace.prefixes[-1])
        if same is not None:
            trace.successor = same.successor
        self._traces[trace.prefixes[-1]] = trace
        while len(self._traces) > TRACES_KEPT or (
            len(self._traces) > 1 and sum(map(len, self._traces.values())) > OPERATORS_KEPT
        ):
            _, gone = self._traces.popitem(last=False)
            self._forget(gone)
        return trace

    def _forget(self, gone: Trace) -> None:
        for trace in self._traces.values():
            if trace.successor is gone:
                trace.successor = None

"""A plan for the step that the program repeats: recorded once, adopted if it moves less.

The search runs in parallel with the program, and the plan names the storages to evict after each operator. If pages go
to flash that wears out, the plan may take a little longer and write less. Everything else works as without a plan: when
memory is short, evictions are chosen each time, those of the plan first. So a plan that no longer fits costs only time.
It is dropped if steps with it take longer than before. Plans are kept for the next run of the same program.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec
import torch

from port_agent.energy.sources.estimated import PowerModel
from port_agent.energy.sources.power_models import power_with
from port_agent.intercept.decisions.kept_plans import KeptPlan, forget_plan, keep_plan, plan_name, read_plan
from port_agent.intercept.decisions.step_recording import StepRecording
from port_agent.intercept.residency.memory import ProcessBudget
from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.trace import OPERATORS_KEPT, Trace
from port_agent.system.helper_process import HelperCommand
from port_agent.system.python_process import one_thread_environment
from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.ir.traced import (
    GREEDY_BYTES,
    PLANNING_MODULE,
    SEARCH_BYTES,
    TracedPlan,
    TracedRequest,
    read_traced_plans,
)
from port_planner.search.wear import SPARING_TIME

LONGEST_STEP = 32
"""Largest number of segments in a planned step; an accumulation over more micro-batches is not planned."""

_SEARCHES = 8
"""Largest number of steps of different shapes that are planned in one run."""

_FORESEEN = 4
"""Number of steps recorded before any has been repeated.

Most programs repeat their second step, and need not wait for a fourth.
"""

_SEARCH_S = 12.0
"""CPU seconds of one search, in which GPT-2's comes within 1 % of its bound."""

_LONGEST_SEARCH_S = 60.0
"""Longest duration of a search in seconds.

On a busy machine it then ends with its best plan, because its memory is missing meanwhile.
"""

_MAX_PLAN_BYTES = 64 << 20

_LARGEST_SHARE = 0.25
"""Share of the memory for tensors that the search process may take while it runs; with less,
only the greedy plan is made.
"""

_SLACK_SHARE = 0.04
"""Share of the memory for tensors that plans leave free, for pages on their way in."""

_MEDIUM_WATTS = 0.5
_PAGING_CPU_S_PER_BYTE = 0.1e-9
"""CPU seconds of the page thread, checksums included: 0.06 with huge pages, 0.14 without (x86-64)."""

_LATENCY_S = 1e-4

_SPARED_BYTES_PER_S = 200e6
"""Highest paging speed that is assumed on flash that wears out, to spare it: elementwise operators are then recomputed,
but matrix products are not.
"""

_JUDGED_STEPS = 3
"""Number of steps after which a plan is dropped if each was worse than the step before the plan, by what was
moved, recomputed and worn.
"""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Limits of a planned step; None: no limit."""

    deadline_s: float | None = None
    written_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a step read, wrote and recomputed: seconds at the medium's speed, independent of
    the load, and bytes written.

    Infinite seconds mean that it broke a limit.
    """

    seconds: float
    written_bytes: int

    def worse_than(self, other: "StepTraffic", wear_s_per_byte: float, slower_s: float) -> bool:
        """Return whether this costs more at `joules` per second and written byte, or takes
        more than `slower_s` longer.
        """
        cost_s, other_s = (traffic.seconds + wear_s_per_byte * traffic.written_bytes for traffic in (self, other))
        return cost_s > other_s or self.seconds > other.seconds + slower_s


_LIMIT_BROKEN = StepTraffic(float("inf"), 0)


@dataclass(slots=True)
class AdoptedPlan:
    """A plan in force, the predicted and measured seconds of its step, and the traffic of steps before and with it."""

    segments: tuple[Trace, ...]
    strategy: str
    predicted_s: float
    bytes_per_s: tuple[float, float]
    before: StepTraffic
    after_s: float
    """Seconds from the start of the budget until the plan took effect."""
    traffic: list[StepTraffic] = field(default_factory=list)
    measured_s: float | None = None
    written_bytes: int | None = None
    """Bytes that the last step wrote."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """Totals at the end of a segment."""

    at_s: float
    read_bytes: int
    written_bytes: int
    recomputing_s: float

    def traffic(self, earlier: "_Spent", bytes_per_s: tuple[float, float]) -> StepTraffic:
        """Return what was moved and recomputed since then, at these speeds."""
        read, written = self.read_bytes - earlier.read_bytes, self.written_bytes - earlier.written_bytes
        recomputing_s = self.recomputing_s - earlier.recomputing_s
        return StepTraffic(read / bytes_per_s[0] + written / bytes_per_s[1] + recomputing_s, written)


@dataclass
class _Search:
    """A process that plans a recorded step."""

    recording: StepRecording
    name: str
    process: "subprocess.Popen[bytes]"
    plans: IO[bytes]
    """An unnamed file to which the process writes."""
    until_s: float
    before: StepTraffic
    """The traffic of the recorded step."""
    seen: int = 0
    """Number of plans read so far."""

    def newest(self) -> TracedPlan | None:
        """Return the best plan so far; None if there is none since the last call."""
        plans = list(read_traced_plans(os.pread(self.plans.fileno(), _MAX_PLAN_BYTES, 0)))
        if len(plans) == self.seen:
            return None
        self.seen = len(plans)
        return plans[-1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.plans.close()


class StepPlanner:
    """Finds the repeating step among the segments that end, and a plan for it."""

    def __init__(
        self,
        residency: Residency,
        process: ProcessBudget | None,
        budget_bytes: int,
        limits: StepBounds,
        wear_joules_per_byte: float,
    ) -> None:
        self._residency, self._process, self._budget_bytes = residency, process, budget_bytes
        self._limits, self._wear_joules_per_byte = limits, wear_joules_per_byte
        self.recording: StepRecording | None = None
        self.adopted: AdoptedPlan | None = None
        self._search: _Search | None = None
        self._tried: set[tuple[int, ...]] = set()
        self._foreseen = _FORESEEN
        self._segments_since_step = 0
        self._searches_left = _SEARCHES
        self._history: deque[Trace] = deque(maxlen=2 * LONGEST_STEP)
        self._spent: deque[_Spent] = deque(maxlen=LONGEST_STEP + 1)
        self._optimizers = False
        self._began_s = time.perf_counter()

    def paging_seconds(self, nbytes: int) -> float:
        """Return the cost of writing and reading `nbytes`, if no plan has compared it with recomputing."""
        measured_s = self._residency.paging_seconds(nbytes)
        return max(measured_s, 2 * nbytes / _SPARED_BYTES_PER_S) if self._wear_joules_per_byte > 0 else measured_s

    def segment_ended(self, trace: Trace | None, *, whole: bool, stepped: bool) -> None:
        """Record that a segment ended, `stepped` by an optimizer, and adopt a plan that was found meanwhile."""
        self._optimizers = self._optimizers or stepped
        if self._search is not None:
            self._look()
        if trace is None:
            return
        if not whole:
            self.recording = None
        self._remember(trace)
        self._segments_since_step += 1
        stats, counters = self._residency.backing.stats, self._residency.counters
        self._spent.append(
            _Spent(time.perf_counter(), stats.read_bytes, stats.written_bytes, counters.recomputing_seconds)
        )
        recording = self.recording
        if recording is not None:
            recording.end_segment(trace)
            if recording.complete:
                self._begin_search(recording)
            if (
                recording.complete
                or recording.broken
                or len(recording.segments) > LONGEST_STEP
                or len(recording) > OPERATORS_KEPT
            ):
                self.recording = None
            elif recording.expected:
                return
        if self._residency.pressed and (stepped or not self._optimizers):
            self._step_ended()

    def _remember(self, trace: Trace) -> None:
        """Add a segment to the history, of which no more operators stay in memory than of the book of traces."""
        self._history.append(trace)
        while len(self._history) > 1 and sum(map(len, set(self._history))) > OPERATORS_KEPT:
            self._history.popleft()

    def _step_ended(self) -> None:
        """Judge the plan in force, or find one for a repeated step or one that an earlier run planned."""
        recording, self.recording = self.recording, None
        last, self._segments_since_step = self._segments_since_step, 0
        step = repeated(self._history)
        if self.adopted is not None and self.adopted.segments == step:
            self._judge(self.adopted)
            return
        if self._search is not None or self._searches_left <= 0:
            return
        if step is not None:
            self._plan(step, recording)
        elif self._foreseen > 0 and last <= LONGEST_STEP:
            self._adopt_kept(tuple(self._history)[-last:])
        if self.recording is None and self.adopted is None and self._search is None and self._foreseen > 0:
            self._foreseen -= 1
            self.recording = StepRecording()

    def _plan(self, step: tuple[Trace, ...], recording: StepRecording | None) -> None:
        """Adopt a stored plan for a step or search for one, once: now if the step is recorded, otherwise when it is."""
        key = tuple(t.prefixes[-1] for t in step)
        if key in self._tried:
            return
        self._tried.add(key)
        self._searches_left -= 1
        if self._adopt_kept(step):
            return
        if recording is not None and recording.segments == step:
            self._begin_search(recording)
        else:
            self.recording = StepRecording(step)

    def _adopt_kept(self, step: tuple[Trace, ...]) -> bool:
        """Adopt the plan that an earlier run stored for a step, if there is one for such a medium."""
        kept = read_plan(self._kept_name(step))
        if kept is None or not kept.suits(self._bytes_per_s()):
            return False
        self._tried.add(tuple(t.prefixes[-1] for t in step))
        self._adopt(step, kept)
        return True

    def _traffic(self, segments: int, bytes_per_s: tuple[float, float]) -> StepTraffic:
        """Return what the last step, of `segments` segments, moved and recomputed.

        If it took longer or wrote more than allowed, any plan within the limits is better.
        """
        if len(self._spent) <= segments:
            return _LIMIT_BROKEN
        now, before = self._spent[-1], self._spent[-1 - segments]
        deadline_s, max_bytes = self._limits.deadline_s, self._limits.written_bytes
        late = deadline_s is not None and now.at_s - before.at_s > deadline_s
        if late or (max_bytes is not None and now.written_bytes - before.written_bytes > max_bytes):
            return _LIMIT_BROKEN
        return now.traffic(before, bytes_per_s)

    def _worse(self, traffic: StepTraffic, before: StepTraffic, plan_s: float) -> bool:
        """Return whether a step of `plan_s` seconds has worse traffic than the step before the plan.

        It may take `SPARING_TIME` times as long if that reduces wear, but no longer than the plan predicts.
        """
        wear_s_per_byte = self._wear_joules_per_byte / _power().full_watts
        return traffic.worse_than(before, wear_s_per_byte, (1 - 1 / SPARING_TIME) * plan_s)

    # -- searching

    def _begin_search(self, recording: StepRecording) -> None:
        free_bytes = min(recording.tensor_bytes, self._residency.limit_bytes)
        searching_bytes = (
            SEARCH_BYTES if self._process is None or free_bytes * _LARGEST_SHARE >= SEARCH_BYTES else GREEDY_BYTES
        )
        if self._process is not None and free_bytes * _LARGEST_SHARE < GREEDY_BYTES:
            return
        request = TracedRequest(
            recording.step(),
            self._device(),
            int(free_bytes * (1 - _SLACK_SHARE)),
            _SEARCH_S if searching_bytes == SEARCH_BYTES else 0.0,
            self._limits.deadline_s,
            self._limits.written_bytes,
        )
        command = HelperCommand(PLANNING_MODULE, (), one_thread_environment(), directory=None)
        with contextlib.ExitStack() as opened:
            try:
                given, plans = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                given.write(msgspec.msgpack.encode(request))
                given.seek(0)
                process = command.start(stdin=given, stdout=plans, stderr=subprocess.DEVNULL)
            except OSError:  # no disk space or no process: the program continues without a plan
                return
            opened.pop_all()
        given.close()
        until_s = time.perf_counter() + _LONGEST_SEARCH_S
        before = self._traffic(len(recording.segments), self._bytes_per_s())
        self._search = _Search(recording, self._kept_name(recording.segments), process, plans, until_s, before)
        if self._process is not None:
            self._process.beside_bytes = searching_bytes

    def _look(self) -> None:
        """Adopt a plan that was found since the last check; close a search that ended."""
        search = self._search
        if search is None:
            return
        over = search.process.poll() is not None or time.perf_counter() > search.until_s
        plan = search.newest()
        if plan is not None and not self._worse(
            StepTraffic(plan.moved_seconds, plan.written_bytes), search.before, plan.seconds
        ):
            kept = KeptPlan.of(plan, search.recording.segment_plans(plan.departures), self._bytes_per_s())
            self._adopt(search.recording.segments, kept)
            keep_plan(search.name, kept)
        if over:
            self.close()

    def _device(self) -> DeviceCosts:
        """Return the medium's measured speeds and wear, with watts as in planning a bundle."""
        read, write = self._bytes_per_s()
        power = _power()
        cpu = power.compute_watts * _PAGING_CPU_S_PER_BYTE
        flash = Flash(
            "pages",
            read,
            write,
            _LATENCY_S,
            cpu + _MEDIUM_WATTS / read,
            cpu + _MEDIUM_WATTS / write,
            wear_joules_per_byte=self._wear_joules_per_byte,
        )
        return DeviceCosts("this machine", 0, power.static_watts, power.compute_watts, flash)

    # -- plans in force

    def _adopt(self, segments: tuple[Trace, ...], kept: KeptPlan) -> None:
        speeds = self._bytes_per_s()
        before = self._traffic(len(segments), speeds)
        if self.adopted is not None and self.adopted.segments == segments:
            speeds, before = self.adopted.bytes_per_s, self.adopted.before
        for trace, plan in zip(segments, kept.segment_plans(len(segments)), strict=True):
            trace.plan = plan
        after_s = time.perf_counter() - self._began_s
        self.adopted = AdoptedPlan(segments, kept.strategy, kept.predicted_s, speeds, before, after_s)

    def _judge(self, adopted: AdoptedPlan) -> None:
        """Measure the step that ended under the plan; drop a plan that costs more than the step before it."""
        count = len(adopted.segments)
        if len(self._spent) > count:
            now, before = self._spent[-1], self._spent[-1 - count]
            adopted.measured_s = now.at_s - before.at_s
            adopted.written_bytes = now.written_bytes - before.written_bytes
        if len(adopted.traffic) > _JUDGED_STEPS:
            return
        adopted.traffic.append(self._traffic(count, adopted.bytes_per_s))
        judged = adopted.traffic[1:]  # in the first step, residency was not the plan's choice
        if len(judged) == _JUDGED_STEPS and all(
            self._worse(traffic, adopted.before, adopted.predicted_s) for traffic in judged
        ):
            for trace in adopted.segments:
                trace.plan = None
            forget_plan(self._kept_name(adopted.segments))
            self.adopted = None

    def _kept_name(self, step: Sequence[Trace]) -> str:
        hashes = [t.prefixes[-1] for t in step]
        return plan_name(
            hashes,
            self._budget_bytes,
            self._limits.deadline_s,
            self._limits.written_bytes,
            self._wear_joules_per_byte,
            whole_process=self._process is not None,
        )

    def _bytes_per_s(self) -> tuple[float, float]:
        return self._residency.bytes_per_s(write=False), self._residency.bytes_per_s(write=True)

    def close(self) -> None:
        """End the search, if one is running."""
        search, self._search = self._search, None
        if self._process is not None:
            self._process.beside_bytes = 0
        if search is not None:
            search.close()

    def interrupt(self) -> None:
        """End the search, if one is running; it starts again once the program has repeated its step."""
        if self._search is not None:
            self._tried.discard(tuple(t.prefixes[-1] for t in self._search.recording.segments))
            self._searches_left += 1
            self.close()

    def plan_nothing(self) -> None:
        """Plan nothing from now on: in a forked child, because the search is its parent's, or
        if no step can be recorded.
        """
        self._search = self.recording = None
        self._searches_left = 0


def _power() -> PowerModel:
    """Return the power of this machine with the number of threads that the program's operators use now."""
    return power_with(torch.get_num_threads())


def repeated(history: Sequence[Trace]) -> tuple[Trace, ...] | None:
    """Return the shortest sequence of segments that occurred twice at the end of `history`; None if there is none."""
    ended = list(history)
    for length in range(1, len(ended) // 2 + 1):
        if all(a is b for a, b in zip(ended[-length:], ended[-2 * length : -length], strict=True)):
            return tuple(ended[-length:])
    return None

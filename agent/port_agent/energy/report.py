"""Read the ledger into one report.

What was used, by job, day, phase and epoch, against the plan, and the wear.

The same report feeds the terminal, JSON, CSV, the HTML page and the dashboard. Units are in the names. What is not
known is None.
"""

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from port_agent.energy.attribution.one_job import EnergyPhase
from port_agent.energy.baseline import stored_baselines
from port_agent.energy.ledger import DAY_S, KEEP_S, SCHEMA_VERSION, LedgerError, open_for_reading, period_start
from port_agent.energy.wear import WearOutlook, outlook
from port_agent.system.clock import local_clock_s
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.times import LATEST_UNIX
from port_planner.base.units import LARGEST_BYTES, shown

_Line = TypeVar("_Line")
JOULES_PER_KWH = 3.6e6
PHASES = tuple(phase.value for phase in EnergyPhase if phase is not EnergyPhase.UNMEASURED)
_PHASE_ORDER = {phase.value: place for place, phase in enumerate(EnergyPhase)}
_MAX_POINTS = 3000
_MAX_IN_A_QUERY = {
    "since": LATEST_UNIX,
    "price_per_kwh": 1e9,
    "co2_grams_per_kwh": 1e9,
    "flash_bytes_per_day": LARGEST_BYTES,
    "flash_endurance_bytes": LARGEST_BYTES,
}
"""Largest accepted values in a query; higher prices and emissions are not plausible."""
"""Points of a curve in a report: more than any screen shows, and a phone still draws them at once."""


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report is about."""

    since_unix: float | None = None
    job: str | None = None
    price_per_kwh: float | None = None
    currency: str = ""
    co2_grams_per_kwh: float | None = None
    flash_bytes_per_day: int | None = None
    flash_endurance_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """Energy and time of one line of a table."""

    name: str
    kind: str
    seconds: float
    gross_joules: float
    net_joules: float | None
    """Joules above the idle baseline; None if that was not known for all of it."""
    unmeasured_s: float
    steps: int | None = None
    cost: float | None = None
    co2_grams: float | None = None


@dataclass(frozen=True, slots=True)
class GpuAmount:
    """The part of a job's energy that the GPU, or the rail that feeds it, took; included in the job's gross joules.

    `covers`: a description, including what else the rail feeds. `seconds`: duration of the measurement.
    """

    job: str
    covers: str
    seconds: float
    joules: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one job, planned and measured over the same steps."""

    job: str
    epoch: int
    kind: str
    steps: int
    measured_steps: int
    """Number of completely measured steps; the planned joules belong to these steps."""
    wall_s: float
    gross_joules: float
    net_joules: float
    unmeasured_s: float
    planned_s: float | None
    planned_joules: float | None
    paged_in_bytes: int
    paged_out_bytes: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step, or several short ones, planned and measured."""

    job: str
    first_step: int
    last_step: int
    plan: int
    end_unix: float
    wall_s: float
    planned_s: float | None
    gross_joules: float | None
    planned_joules: float | None
    loss: float | None
    kind: str


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """Mean watts by phase over equal periods of time; None if more than half of a period was not measured."""

    period_s: int
    start_unix: tuple[int, ...]
    watts: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class WearDay:
    """Bytes written to flash on one day (UTC)."""

    day_unix: int
    agent_bytes: int
    machine_bytes: int | None
    """Bytes that the whole machine wrote, agent included; None if the disk does not count."""


@dataclass(frozen=True, slots=True)
class Note:
    """A gap or an event."""

    start_unix: float
    end_unix: float
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source with figures in this ledger."""

    name: str
    kind: str
    coverage: str
    covers: str
    resolution_watts: float | None
    period_s: float


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """All data that a page or table shows."""

    generated_unix: float
    since_unix: float | None
    options: ReportOptions
    total: tuple[Amount, ...]
    """One line per kind: measured and estimated."""
    jobs: tuple[Amount, ...]
    days: tuple[Amount, ...]
    phases: tuple[Amount, ...]
    epochs: tuple[Epoch, ...]
    steps: tuple[StepRow, ...]
    power: PowerCurve
    gaps: tuple[Note, ...]
    events: tuple[Note, ...]
    wear: tuple[WearDay, ...]
    wear_outlook: WearOutlook
    baselines_watts: Mapping[str, float]
    flash_used_life: float | None
    labels: Mapping[str, str]
    """Names by which people know the jobs, by the names in this report."""
    sources: tuple[SourceLine, ...]
    """The sources of the figures, and what they cover."""
    gpu: tuple[GpuAmount, ...] = ()
    """Energy of the GPU by job, if a source reports it; empty if an older agent wrote the report."""

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self)

    def label(self, job: str) -> str:
        """Return the name by which people know `job`; idle time has no job."""
        return self.labels.get(job, job) or "(idle)"


def options_from_query(query: Mapping[str, str]) -> ReportOptions:
    """Return the options in a query such as `since=1760000000&job=3`.

    Raises `ReportQueryError` for a bad one.
    """
    numbers: dict[str, float] = {}
    for key, most in _MAX_IN_A_QUERY.items():
        if key in query:
            try:
                numbers[key] = float(query[key])
            except ValueError as error:
                raise ReportQueryError(key, query[key], most) from error
            if not 0 <= numbers[key] <= most:
                raise ReportQueryError(key, query[key], most)
    options: dict[str, Any] = {
        key: int(number) if key.endswith(("_bytes", "_bytes_per_day")) else number for key, number in numbers.items()
    }
    since = options.pop("since", None)
    return ReportOptions(since, query.get("job"), currency=query.get("currency", ""), **options)


class ReportQueryError(PortError):
    """A query to the ledger that cannot be understood."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, key: str, value: str, most: float) -> None:
        super().__init__(
            f"{key}={shown(value)} is not a valid number from 0 to {most:g}; leave it out or give one of these"
        )
        self.key = key
        self.value = value


def report_from_query(path: Path, query: Mapping[str, str]) -> dict[str, object]:
    """Return the report that a control request asks for, as plain values.

    Raises `LedgerError` if the ledger at `path` cannot be read and `ReportQueryError` for a bad query.
    """
    return read_report(path, options_from_query(query)).as_dict()


def report_from_dict(plain: Mapping[str, Any]) -> EnergyReport:
    """Return the report whose JSON form is `plain`.

    Raises PortError for one of another version.
    """
    try:
        return msgspec.convert(plain, EnergyReport)
    except msgspec.ValidationError as error:
        raise PortError(f"the agent's report cannot be read ({error}); restart the agent after an update") from error


def read_report(path: Path, options: ReportOptions, now_unix: float | None = None) -> EnergyReport:
    """Return the report on the ledger at `path`; raise `LedgerError` if it cannot be read."""
    now = time.time() if now_unix is None else now_unix
    with open_for_reading(path) as database:
        reader = _Reader(database, options, now)
        meta = {str(row["key"]): str(row["value"]) for row in database.execute("SELECT key, value FROM meta")}
        wear = reader.wear()
        used = float(meta["flash_used_life"]) if "flash_used_life" in meta else None
        size = int(meta["flash_bytes"]) if "flash_bytes" in meta else None
        return EnergyReport(
            generated_unix=now,
            since_unix=options.since_unix,
            options=options,
            total=reader.amounts("'all'"),
            jobs=reader.amounts("job"),
            days=reader.amounts("strftime('%Y-%m-%d', start_unix + period_s / 2, 'unixepoch', 'localtime')"),
            phases=tuple(sorted(reader.amounts("phase"), key=lambda row: _PHASE_ORDER[row.name])),
            epochs=reader.epochs(),
            steps=reader.steps(),
            power=reader.power(),
            gaps=reader.gaps(),
            events=reader.events(),
            wear=wear,
            wear_outlook=_wear_outlook(wear, options, used, size, now),
            baselines_watts=stored_baselines(meta.get("baselines")),
            flash_used_life=used,
            labels={key.removeprefix("label:"): value for key, value in meta.items() if key.startswith("label:")},
            sources=tuple(_source(path, value) for key, value in meta.items() if key.startswith("source:")),
            gpu=reader.gpu(),
        )


def _of_row(kind: type[_Line], row: sqlite3.Row) -> _Line:
    """Return a line of a report from a row whose columns have the names of the line's fields."""
    return kind(**{one.name: row[one.name] for one in fields(kind)})  # type: ignore[arg-type]  # a dataclass


def _source(path: Path, content: str) -> SourceLine:
    try:
        return msgspec.json.decode(content, type=SourceLine)
    except msgspec.DecodeError as error:
        raise LedgerError(
            path, f"a source in it cannot be read ({error})", "move it aside; a new one begins"
        ) from error


class _Reader:
    """Queries over one ledger within the bounds of the options."""

    def __init__(self, database: sqlite3.Connection, options: ReportOptions, now_unix: float) -> None:
        self._database = database
        self._options = options
        self._since = options.since_unix or 0.0
        self._now_unix = now_unix

    def _period_s(self, max_points: int | None = None) -> int:
        """Return the finest roll-up that still covers the report's whole time in at most `max_points`."""
        spans = {
            row["period_s"]: (row["first"], row["last"])
            for row in self._database.execute(
                "SELECT period_s, MIN(start_unix) AS first, MAX(start_unix) AS last FROM rollup"
                " WHERE start_unix + period_s > ? GROUP BY 1",
                (self._since,),
            )
        }
        for period_s in KEEP_S:
            first, last = spans.get(period_s, (None, None))
            if first is None or DAY_S not in spans or first >= max(spans[DAY_S][0], self._since) + DAY_S:
                continue  # the oldest part of it has expired
            if max_points is None or (last - first) / period_s <= max_points:
                return period_s
        return DAY_S

    def amounts(self, group: str) -> tuple[Amount, ...]:
        """Return energy summed over `group`, an expression over the columns of the roll-ups."""
        rows = self._database.execute(
            f"""SELECT {group} AS name, kind,
                SUM(seconds * (job = '' OR phase IN ('static', 'unmeasured'))) AS clock_s, SUM(seconds) AS phase_s,
                SUM(gross_joules) AS gross, SUM(net_joules) AS net, SUM(unsplit_joules) AS unsplit,
                SUM(seconds * (phase = 'unmeasured')) AS unmeasured_s
                FROM rollup WHERE period_s = ? AND start_unix + period_s > ? AND (? IS NULL OR job = ?)
                GROUP BY 1, 2 ORDER BY 1, 2""",
            (self._period_s() if self._since else DAY_S, self._since, self._options.job, self._options.job),
        )
        steps = self._steps_by_job() if group == "job" else {}
        return tuple(self._amount(row, group == "phase", steps) for row in rows)

    def _amount(self, row: sqlite3.Row, by_phase: bool, steps: Mapping[tuple[str, str], int]) -> Amount:
        gross = float(row["gross"])
        kwh = gross / JOULES_PER_KWH
        price, intensity = self._options.price_per_kwh, self._options.co2_grams_per_kwh
        return Amount(
            name=str(row["name"]),
            kind=str(row["kind"]),
            # The phases of a job overlap (hidden transfers); its static part runs by the clock.
            seconds=float(row["phase_s"] if by_phase else row["clock_s"]),
            gross_joules=gross,
            net_joules=float(row["net"]) if row["unsplit"] == 0 else None,
            unmeasured_s=float(row["unmeasured_s"]),
            steps=steps.get((str(row["name"]), str(row["kind"]))),
            cost=None if price is None else kwh * price,
            co2_grams=None if intensity is None else kwh * intensity,
        )

    def _steps_by_job(self) -> dict[tuple[str, str], int]:
        rows = self._database.execute(
            "SELECT job, kind, SUM(steps) AS steps FROM epoch WHERE end_unix >= ? GROUP BY 1, 2", (self._since,)
        )
        return {(str(row["job"]), str(row["kind"])): int(row["steps"]) for row in rows}

    def gpu(self) -> tuple[GpuAmount, ...]:
        """Return the GPU's energy by job; empty for an older ledger that did not record it."""
        if self._database.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
            return ()
        rows = self._database.execute(
            """SELECT job, covers, SUM(seconds) AS seconds, SUM(joules) AS joules FROM gpu
               WHERE period_s = ? AND start_unix + period_s > ? AND (? IS NULL OR job = ?) GROUP BY 1, 2 ORDER BY 1, 2""",
            (self._period_s() if self._since else DAY_S, self._since, self._options.job, self._options.job),
        )
        return tuple(_of_row(GpuAmount, row) for row in rows)

    def epochs(self) -> tuple[Epoch, ...]:
        """Return all epochs in the order in which they ended."""
        rows = self._database.execute(
            "SELECT * FROM epoch WHERE end_unix >= ? AND (? IS NULL OR job = ?) ORDER BY end_unix",
            (self._since, self._options.job, self._options.job),
        )
        epochs = (_of_row(Epoch, row) for row in rows)
        return tuple(
            replace(epoch, planned_s=epoch.planned_s or None, planned_joules=epoch.planned_joules or None)
            for epoch in epochs
        )

    def steps(self) -> tuple[StepRow, ...]:
        """Return the newest step rows, oldest first."""
        rows = self._database.execute(
            """SELECT * FROM step WHERE end_unix >= ? AND (? IS NULL OR job = ?) ORDER BY id DESC LIMIT ?""",
            (self._since, self._options.job, self._options.job, _MAX_POINTS),
        ).fetchall()
        return tuple(_of_row(StepRow, row) for row in reversed(rows))

    def power(self) -> PowerCurve:
        """Return the power by phase over the report's time, as fine as the ledger and `_MAX_POINTS` allow."""
        period_s = self._period_s(_MAX_POINTS)
        joules: dict[int, dict[str, float]] = {}
        unseen: dict[int, float] = {}
        seen: dict[int, float] = {}
        for row in self._database.execute(
            """SELECT start_unix, job, phase, SUM(seconds) AS seconds, SUM(gross_joules) AS joules FROM rollup
               WHERE period_s = ? AND start_unix + period_s > ? GROUP BY 1, 2, 3 ORDER BY 1""",
            (period_s, self._since),
        ):
            start = period_start(
                row["start_unix"] + period_s / 2, period_s
            )  # also of days that an older agent began in UTC
            if row["phase"] == EnergyPhase.UNMEASURED.value:
                unseen[start] = unseen.get(start, 0.0) + row["seconds"]
                continue
            at = joules.setdefault(start, {})
            at[row["phase"]] = at.get(row["phase"], 0.0) + row["joules"]
            if not row["job"] or row["phase"] == EnergyPhase.STATIC.value:
                seen[start] = seen.get(start, 0.0) + row["seconds"]
        return _curve(period_s, joules, seen, unseen)

    def gaps(self) -> tuple[Note, ...]:
        """Return the periods without figures."""
        rows = self._database.execute("SELECT * FROM gap WHERE end_unix >= ? ORDER BY start_unix", (self._since,))
        notes: list[Note] = []
        for row in rows:
            note = Note(row["start_unix"], row["end_unix"], row["source"], row["reason"])
            last = notes[-1] if notes else None
            if last and (last.code, last.text) == (note.code, note.text) and note.start_unix - last.end_unix < 1:
                notes[-1] = Note(last.start_unix, note.end_unix, note.code, note.text)  # one gap over several flushes
            else:
                notes.append(note)
        return tuple(notes)

    def events(self) -> tuple[Note, ...]:
        """Return all other events."""
        rows = self._database.execute("SELECT * FROM event WHERE unix >= ? ORDER BY unix", (self._since,))
        return tuple(Note(row["unix"], row["unix"], row["code"], row["text"]) for row in rows)

    def wear(self) -> tuple[WearDay, ...]:
        """Return the bytes written on each local date."""
        days: dict[int, tuple[int, int | None]] = {}
        for row in self._database.execute(
            "SELECT day_unix, writer, SUM(written_bytes) AS count FROM wear WHERE day_unix >= ? GROUP BY 1, 2",
            (local_clock_s(self._since) // DAY_S * DAY_S,),
        ):
            agent, machine = days.get(row["day_unix"], (0, None))
            if row["writer"] == "agent":
                days[row["day_unix"]] = (agent + row["count"], machine)
            else:
                days[row["day_unix"]] = (agent, (machine or 0) + row["count"])
        return tuple(WearDay(day, *counts) for day, counts in sorted(days.items()))


def _curve(
    period_s: int, joules: Mapping[int, Mapping[str, float]], seen: Mapping[int, float], unseen: Mapping[int, float]
) -> PowerCurve:
    starts = sorted(joules.keys() | unseen.keys())
    # a hole between periods is a gap, too: nobody was there to measure
    holes = {period_start(start + 1.5 * period_s, period_s) for start in starts} - joules.keys() - unseen.keys()
    starts = sorted({*starts, *(hole for hole in holes if starts and hole < starts[-1])})
    present = [phase for phase in PHASES if any(phase in at for at in joules.values())]

    def watts(start: int, phase: str) -> float | None:
        seen_s = seen.get(start, 0.0)
        if seen_s <= 0 or seen_s < unseen.get(start, 0.0):
            return None
        return joules.get(start, {}).get(phase, 0.0) / seen_s

    return PowerCurve(
        period_s, tuple(starts), {phase: tuple(watts(start, phase) for start in starts) for phase in present}
    )


def _wear_outlook(
    wear: tuple[WearDay, ...], options: ReportOptions, used: float | None, size: int | None, now_unix: float
) -> WearOutlook:
    """Return how long the flash lasts, based on the writes of the whole machine if they are known."""
    written = sum(day.agent_bytes if day.machine_bytes is None else day.machine_bytes for day in wear)
    days = max((local_clock_s(now_unix) - wear[0].day_unix) / DAY_S, 1 / 24) if wear else 0.0
    return outlook(written, days, options.flash_endurance_bytes, used or 0.0, size)


_CSV_COLUMNS = ("table", "name", "kind", "seconds", "gross_joules", "net_joules", "unmeasured_seconds", "steps", "cost",
                "co2_grams")  # fmt: skip


def csv_rows(report: EnergyReport) -> list[tuple[object, ...]]:
    """Return the tables by kind, job, day and phase as rows under one heading; unknown figures are empty."""
    rows: list[tuple[object, ...]] = [_CSV_COLUMNS]
    for table, amounts in (
        ("total", report.total),
        ("job", report.jobs),
        ("day", report.days),
        ("phase", report.phases),
    ):
        for amount in amounts:
            figures = (amount.seconds, amount.gross_joules, amount.net_joules, amount.unmeasured_s)
            more = (amount.steps, amount.cost, amount.co2_grams)
            cells = ("" if value is None else value for value in (*figures, *more))
            rows.append((table, amount.name, amount.kind, *cells))
    rows += [("gpu", one.job, one.covers, one.seconds, one.joules, "", "", "", "", "") for one in report.gpu]
    return rows

"""The power sources of this machine, best first.

The plug before the board's input, before parts, before a model.

Other people's meters come in through the entry point group `port_agent.power_sources` (see README.md).
"""

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from port_agent.energy.sources import battery, ina2xx, ina3221, nvidia, pi5_pmic, rapl, tegrastats
from port_agent.energy.sources.background import PLUGIN_FAILURES, BackgroundSource
from port_agent.energy.sources.estimated import NAME as ESTIMATED
from port_agent.energy.sources.estimated import EstimatedSource, PowerModel, generic_model
from port_agent.energy.sources.power_source import Coverage, Kind, PowerSource, SourceAbsent, SourceError, SourceInfo
from port_agent.energy.sources.subprocess_source import ChildOutput
from port_agent.energy.sources.timely import ReadThreads
from port_agent.system.clock import now_s
from port_planner.base.errors import ExitCode, PortError

if TYPE_CHECKING:
    import importlib.metadata

ENTRY_POINTS = "port_agent.power_sources"
AUTOMATIC = "auto"
_RANK = {coverage: rank for rank, coverage in enumerate(Coverage)}
_PI5_MODELS = ("Raspberry Pi 5", "Raspberry Pi Compute Module 5")


class EnergyConfigError(PortError):
    """An `[energy]` setting that cannot be used; `key` names it."""

    exit_code = ExitCode.IMPOSSIBLE

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"energy.{key} {problem}")
        self.key = key


_Text = Annotated[str, msgspec.Meta(description="a text")]
_Positive = Annotated[float, msgspec.Meta(gt=0, description="a number above zero")]
_Wire = Annotated[ina2xx.Wire, msgspec.Meta(description=f"one of {[wire.value for wire in ina2xx.Wire]}")]


@dataclass(frozen=True, slots=True)
class EnergyConfig:
    """The `[energy]` table of the configuration."""

    source: _Text = AUTOMATIC
    """Name of the one source to use, or `auto`."""
    disable: Annotated[tuple[str, ...], msgspec.Meta(description="a list of texts")] = ()
    board: _Text = ""
    """Name or path of a board file for the estimate; if empty, the board is detected."""
    ina2xx_wire: _Wire = ina2xx.Wire.UNKNOWN
    ina2xx_i2c: _Text = ""
    """Address of a HAT without a kernel driver, such as `/dev/i2c-1:0x42`."""
    ina2xx_shunt_ohms: _Positive = 0.1
    static_watts: _Positive | None = None
    full_watts: _Positive | None = None
    price_per_kwh: _Positive | None = None
    currency: _Text = ""
    co2_grams_per_kwh: _Positive | None = None
    flush_s: _Positive = 300.0
    flash_endurance_bytes: Annotated[int, msgspec.Meta(gt=0, description="a number above zero")] | None = None
    flash_price: Annotated[float, msgspec.Meta(ge=0, description="a number above zero, or zero")] | None = None
    """Price of the medium for pages and checkpoints, in `currency`; 0 if its wear does not matter."""
    plugins: Annotated[
        Mapping[str, Mapping[str, Any]], msgspec.Meta(description="a table with one table per plug-in")
    ] = field(default_factory=dict)

    @staticmethod
    def from_table(table: Mapping[str, object]) -> "EnergyConfig":
        """Return the configuration in a TOML table.

        Raises `EnergyConfigError` for unknown keys and wrong types.
        """
        return EnergyConfig(**{key: _checked(key, value) for key, value in table.items()})  # type: ignore[arg-type]


_HINTS = get_type_hints(EnergyConfig, include_extras=True)


def _checked(key: str, value: object) -> object:
    """Return the value of a setting; raises EnergyConfigError for one that does not match its declaration."""
    if key not in _HINTS:
        raise EnergyConfigError(key, f"is not a setting; the settings are {', '.join(_HINTS)}")
    declared = next((kind for kind in get_args(_HINTS[key]) if get_origin(kind) is Annotated), _HINTS[key])
    whole = isinstance(value, float) and value.is_integer() and get_args(declared)[0] is int
    try:
        return msgspec.convert(int(value) if whole else value, declared)  # type: ignore[call-overload]  # a number
    except msgspec.ValidationError as error:
        what = next(note.description for note in declared.__metadata__ if note.description)
        raise EnergyConfigError(key, f"must be {what}, not {value!r}") from error


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The outcome for one kind of source on this machine, for `doctor`."""

    name: str
    ok: bool
    present: bool
    text: str
    remedy: str
    info: SourceInfo | None


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """Open sources, best first, and the report on all that were tried."""

    sources: tuple[PowerSource, ...]
    reports: tuple[SourceReport, ...]

    @property
    def broken(self) -> tuple[SourceReport, ...]:
        """Sources that exist but do not work, which become health items."""
        return tuple(report for report in self.reports if report.present and not report.ok)


_ON_THREADS = (ina3221.NAME, ina2xx.NAME, battery.NAME, rapl.NAME)
"""Sources that read files and chips themselves, which may hang.

The others already wait elsewhere, for a process or a network.
"""


def open_sources(
    config: EnergyConfig, model: PowerModel | None, root: Path, threads: ReadThreads | None = None
) -> SourceChoice:
    """Return every source that works here, best first; the estimated one is always the last.

    `threads`: the threads to reuse if sources are opened repeatedly.

    Never raises for a sensor: what fails is in the reports. Raises `EnergyConfigError` if `energy.source` names a
    source that does not exist.
    """
    openers = {**_openers(config, root), **_plugin_openers(config)}
    openers[ESTIMATED] = lambda: EstimatedSource(configured_model(config, model))
    if config.source != AUTOMATIC:
        if config.source not in openers:
            raise EnergyConfigError("source", f"is {config.source!r}; use one of {AUTOMATIC}, {', '.join(openers)}")
        openers = {config.source: openers[config.source]}
    threads = threads or ReadThreads()
    opened: list[PowerSource] = []
    reports = []
    for name, opener in openers.items():
        if name in config.disable:
            continue
        source, report = _try(name, functools.partial(threads.open, name, opener) if name in _ON_THREADS else opener)
        reports.append(report)
        if source is not None:
            opened.append(source)
    opened.sort(key=lambda source: _order(source.info))
    if config.source == AUTOMATIC:
        opened = _with_cards(opened)
    return SourceChoice(tuple(opened), tuple(reports))


def _with_cards(opened: Sequence[PowerSource]) -> list[PowerSource]:
    """Return the machine's sources; the best one is combined with the cards if it is measured and has no GPU figure."""
    cards = next((source for source in opened if source.info.coverage is Coverage.CARD), None)
    others = [source for source in opened if source is not cards]
    if cards is not None and others and others[0].info.kind is Kind.MEASURED:
        others[0] = nvidia.WithCards(others[0], BackgroundSource(cards))
    return others


def _order(info: SourceInfo) -> tuple[bool, int]:
    """Return the sort key of sources: measured before estimated, then by coverage."""
    return info.kind is Kind.ESTIMATED, _RANK[info.coverage]


def configured_model(config: EnergyConfig, model: PowerModel | None) -> PowerModel:
    """Return the board's model with the user's measurements instead of its own.

    Raises EnergyConfigError if full load takes less than rest.
    """
    base = model or generic_model(os.cpu_count() or 1)
    if config.static_watts is None and config.full_watts is None:
        return base
    static = config.static_watts if config.static_watts is not None else base.static_watts
    full = config.full_watts if config.full_watts is not None else static + base.compute_watts
    if full < static:
        raise EnergyConfigError("full_watts", f"is {full:g}, below energy.static_watts of {static:g}")
    return PowerModel(
        base.name, static, full, base.read_joules_per_byte, base.write_joules_per_byte, "set in the configuration"
    )


def diagnose(config: EnergyConfig, model: PowerModel | None, root: Path) -> tuple[SourceReport, ...]:
    """Return the report on every source, and leave nothing open: working ones, best first, then
    broken ones, then absent ones.

    The agent uses the first.
    """
    choice = open_sources(config, model, root)
    for source in choice.sources:
        source.close()
    working = sorted((r for r in choice.reports if r.ok and r.info), key=lambda r: _order(r.info) if r.info else ())
    return (*working, *choice.broken, *(report for report in choice.reports if not report.present))


def _try(name: str, opener: Callable[[], PowerSource]) -> tuple[PowerSource | None, SourceReport]:
    try:
        source = opener()
    except SourceAbsent as error:
        return None, SourceReport(name, False, False, error.problem, error.remedy, None)
    except SourceError as error:
        return None, SourceReport(name, False, True, error.problem, error.remedy, None)
    test = source.self_test(now_s())
    report = SourceReport(name, test.ok, True, test.text, test.remedy, source.info)
    if not test.ok:
        source.close()
        return None, report
    return source, report


def _openers(config: EnergyConfig, root: Path) -> dict[str, Callable[[], PowerSource]]:
    openers: dict[str, Callable[[], PowerSource]] = {
        ina3221.NAME: lambda: ina3221.Ina3221Source(root),
        tegrastats.NAME: lambda: _open_tegrastats(root),
        pi5_pmic.NAME: lambda: _open_pi5(root),
        ina2xx.NAME: lambda: _open_ina2xx(config, root),
        battery.NAME: lambda: battery.BatterySource(root),
        rapl.NAME: lambda: rapl.RaplSource(root),
        nvidia.NAME: lambda: nvidia.NvidiaSource(root),
    }
    return openers | _mac_openers() if sys.platform == "darwin" else openers


def _require_tool(source: str, tool: str) -> None:
    """Raise `SourceAbsent` unless `tool` is installed."""
    if shutil.which(tool) is None:
        raise SourceAbsent(source, f"there is no {tool} here", "it belongs to another platform; nothing to do")


def _open_tegrastats(root: Path) -> PowerSource:
    _require_tool(tegrastats.NAME, "tegrastats")
    if _reads_ina3221(root):
        raise SourceAbsent(tegrastats.NAME, "the same sensors are already read directly", "nothing to do")
    return tegrastats.tegrastats_source(
        ChildOutput(tegrastats.NAME, ("tegrastats", "--interval", "1000"), r"\n", stale_after_s=10.0)
    )


def _reads_ina3221(root: Path) -> bool:
    try:
        ina3221.Ina3221Source(root)
    except SourceError:
        return False
    return True


def _open_pi5(root: Path) -> PowerSource:
    model = root / "proc/device-tree/model"
    name = model.read_text(encoding="ascii", errors="replace").rstrip("\0\n") if model.exists() else ""
    if not name.startswith(_PI5_MODELS):
        raise SourceAbsent(pi5_pmic.NAME, f"this is {name or 'no Raspberry Pi'}, not a Pi 5", "nothing to do")
    return pi5_pmic.pi5_source()


def ups_amperes(table: Mapping[str, object], root: Path = Path("/")) -> Callable[[], float] | None:
    """Return a function that reads the current into a UPS board's battery, negative while it feeds the machine; None if
    `[energy]` names none.

    The function raises OSError if the chip does not answer. Raises `EnergyConfigError`.
    """
    config = EnergyConfig.from_table(table)
    if config.ina2xx_wire is not ina2xx.Wire.UPS:
        return None

    def read() -> float:
        try:
            return _ina2xx_bus(config, root)().amperes
        except (SourceError, EnergyConfigError) as error:
            raise OSError(str(error)) from error

    return read


def _open_ina2xx(config: EnergyConfig, root: Path) -> PowerSource:
    return ina2xx.Ina2xxSource(_ina2xx_bus(config, root), config.ina2xx_wire)


def _ina2xx_bus(config: EnergyConfig, root: Path) -> Callable[[], ina2xx.BusReading]:
    """Return a function that reads the chip; raises `SourceAbsent`, `EnergyConfigError`."""
    if config.ina2xx_i2c:
        bus, _, address = config.ina2xx_i2c.partition(":")
        try:
            number = int(address, 16)
        except ValueError as error:
            raise EnergyConfigError("ina2xx_i2c", f"is {config.ina2xx_i2c!r}; write it like /dev/i2c-1:0x42") from error
        return functools.partial(ina2xx.read_i2c, root / bus.lstrip("/"), number, config.ina2xx_shunt_ohms)
    folder = ina2xx.find_hwmon(root)
    if folder is None:
        raise SourceAbsent(ina2xx.NAME, "there is no INA219, INA226, INA238 or INA260", "nothing to do")
    return functools.partial(ina2xx.read_hwmon, folder)


def _mac_openers() -> dict[str, Callable[[], PowerSource]]:
    """Return the openers of sources that exist only on a Mac."""
    from port_agent.energy.sources import macos

    def open_battery() -> PowerSource:
        _require_tool(macos.BATTERY, "ioreg")
        return macos.mac_battery_source()

    def open_powermetrics() -> PowerSource:
        name = macos.POWERMETRICS
        _require_tool(name, "powermetrics")
        if os.geteuid() != 0:
            raise SourceAbsent(
                name, "powermetrics needs root and the agent does not run as root", "the estimate is used"
            )
        return macos.powermetrics_source(
            ChildOutput(name, macos.POWERMETRICS_COMMAND, macos.RECORD_END, stale_after_s=10.0)
        )

    return {macos.BATTERY: open_battery, macos.POWERMETRICS: open_powermetrics}


def _plugin_openers(config: EnergyConfig) -> dict[str, Callable[[], PowerSource]]:
    """Return an opener for each installed entry point."""
    if not _has_plugin():
        return {}
    import importlib.metadata

    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: functools.partial(_open_plugin, entry, config.plugins.get(entry.name, {})) for entry in entries}


def _has_plugin() -> bool:
    """Return whether an installed distribution declares a power source, by the files that Python's
    packaging installs for it.

    Most machines have none, and `importlib.metadata`, which would say more, takes 2 MB of a long-lived process.
    """
    files = (path for folder in sys.path for path in Path(folder).glob("*-info/entry_points.txt"))
    return any(f"[{ENTRY_POINTS}]" in path.read_text("utf-8", "replace") for path in files)


def _open_plugin(entry: "importlib.metadata.EntryPoint", settings: Mapping[str, object]) -> PowerSource:
    try:
        source: PowerSource = entry.load()(settings)
        source.read(now_s())
        return BackgroundSource(source)
    except SourceError:
        raise
    except PLUGIN_FAILURES as error:
        raise SourceError(
            entry.name,
            f"the plug-in failed with {type(error).__name__}: {error}",
            f"see {entry.value} and its settings",
        ) from error

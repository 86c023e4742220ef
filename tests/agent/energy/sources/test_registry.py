"""Choice of sources: best first, configured, plug-ins, broken ones reported."""

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from port_agent.energy.sources import registry
from port_agent.energy.sources.estimated import PowerModel
from port_agent.energy.sources.ina2xx import Wire
from port_agent.energy.sources.power_source import Coverage, Kind, PowerSource, SourceInfo
from port_agent.energy.sources.registry import EnergyConfig, EnergyConfigError, configured_model, diagnose, open_sources
from tests.agent.energy.device_trees import ORIN_NANO, hwmon, supply, zone
from tests.agent.energy.recordings import ScriptedSource, local
from tests.agent.trees import write_tree

BOARD = PowerModel("test board", 2.0, 6.0)


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own tools."""
    monkeypatch.setattr(shutil, "which", lambda tool: None)


def names(root: Path, **settings: object) -> list[str]:
    """Return the names of the chosen sources, best first."""
    sources = open_sources(EnergyConfig.from_table(settings), BOARD, root).sources
    found = [source.info.name for source in sources]
    for source in sources:
        source.close()
    return found


def test_bare_machine_is_estimated(tmp_path: Path) -> None:
    choice = open_sources(EnergyConfig(), BOARD, tmp_path)
    assert [source.info.name for source in choice.sources] == ["estimated"]
    assert choice.sources[0].info.kind is Kind.ESTIMATED
    assert choice.broken == ()


def test_best_first(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    supply(tmp_path, "BAT0", local("legion_go_s.BAT0.uevent"))
    assert names(tmp_path) == ["battery", "rapl", "estimated"]
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    assert names(tmp_path) == ["ina3221", "battery", "rapl", "estimated"]
    assert names(tmp_path, disable=["battery", "ina3221"]) == ["rapl", "estimated"]
    assert names(tmp_path, source="rapl") == ["rapl"]


def test_broken_sensor_is_reported_and_the_rest_works(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (folder / "energy_uj").write_text("nonsense\n")
    choice = open_sources(EnergyConfig(), BOARD, tmp_path)
    assert [source.info.name for source in choice.sources] == ["estimated"]
    (report,) = choice.broken
    assert (report.name, report.ok) == ("rapl", False)
    assert "nonsense" in report.text and report.remedy


def test_diagnosis_begins_with_what_is_used_and_ends_with_what_is_absent(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    supply(tmp_path, "BAT0", "POWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS=Discharging\nPOWER_SUPPLY_POWER_NOW=x\n")
    reports = diagnose(EnergyConfig(), BOARD, tmp_path)
    assert [report.name for report in reports[:4]] == ["ina3221", "rapl", "estimated", "battery"]
    assert [(report.ok, report.present) for report in reports[:4]] == [(True, True)] * 3 + [(False, True)]
    assert not any(report.present for report in reports[4:]) and "tegrastats" in [report.name for report in reports]


@pytest.mark.process
def test_pi_4_has_only_the_estimate_and_pi_5_its_chip(tmp_path: Path) -> None:
    model = tmp_path / "proc/device-tree/model"
    model.parent.mkdir(parents=True)
    model.write_text("Raspberry Pi 4 Model B Rev 1.4\0")
    assert names(tmp_path) == ["estimated"]
    model.write_text("Raspberry Pi 5 Model B Rev 1.0\0")
    (report,) = open_sources(EnergyConfig(), BOARD, tmp_path).broken  # the tool is missing here
    assert report.name == "pi5-pmic" and "vcgencmd" in report.text


def test_user_figures_replace_the_board_file() -> None:
    assert configured_model(EnergyConfig(static_watts=3.5), BOARD).full_watts == 7.5
    model = configured_model(EnergyConfig(static_watts=3.5, full_watts=8.0), BOARD)
    assert (model.static_watts, model.compute_watts, model.origin) == (3.5, 4.5, "set in the configuration")
    with pytest.raises(EnergyConfigError, match=r"below energy\.static_watts"):
        configured_model(EnergyConfig(static_watts=9.0, full_watts=8.0), BOARD)
    unknown = configured_model(EnergyConfig(), None)
    assert "guess" in unknown.origin


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sorce": "rapl"}, "energy.sorce is not a setting"),
        ({"static_watts": "5 W"}, "must be a number above zero"),
        ({"static_watts": True}, "must be a number above zero"),
        ({"flush_s": 0}, "must be a number above zero"),
        ({"ina2xx_wire": "red"}, "must be one of"),
        ({"disable": "rapl"}, "must be a list"),
        ({"plugins": {"meter": 5}}, "one table per plug-in"),
    ],
)
def test_bad_settings_are_refused(table: Mapping[str, object], message: str) -> None:
    with pytest.raises(EnergyConfigError, match=message):
        EnergyConfig.from_table(table)


def test_settings_are_read() -> None:
    config = EnergyConfig.from_table({"ina2xx_wire": "ups", "flash_endurance_bytes": 10**12, "disable": ["rapl"]})
    assert (config.ina2xx_wire, config.flash_endurance_bytes, config.disable) == (Wire.UPS, 10**12, ("rapl",))


def test_unknown_source_is_refused_with_a_list(tmp_path: Path) -> None:
    with pytest.raises(EnergyConfigError, match="'wattmeter'; use one of auto, ina3221"):
        open_sources(EnergyConfig(source="wattmeter"), BOARD, tmp_path)


def test_i2c_address_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(EnergyConfigError, match="write it like"):
        open_sources(EnergyConfig(ina2xx_i2c="/dev/i2c-1"), BOARD, tmp_path)
    choice = open_sources(EnergyConfig(ina2xx_i2c="/dev/i2c-1:0x42"), BOARD, tmp_path)
    assert [report.name for report in choice.broken] == ["ina2xx"]


class WallMeter(ScriptedSource):
    """What a plug-in brings."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        super().__init__("wall")
        self.info = SourceInfo("wall", Kind.MEASURED, Coverage.WALL, "at the plug", 0.1, 1.0)
        self.value = float(str(settings["watts"]))


def failing_plugin(settings: Mapping[str, object]) -> PowerSource:
    """Fail as foreign code does."""
    raise ZeroDivisionError("bad plug-in")


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Install a distribution with entry points, as pip would."""
    info = tmp_path / "site/wall_meter-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wall-meter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{lines}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    importlib.invalidate_caches()


def test_plugin_comes_first_and_runs_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, f"wall = {__name__}:WallMeter\nbad = {__name__}:failing_plugin\nno = nowhere:gone")
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    choice = open_sources(EnergyConfig.from_table({"plugins": {"wall": {"watts": 12.5}}}), BOARD, tmp_path)
    try:
        assert [source.info.name for source in choice.sources] == ["wall", "ina3221", "estimated"]
        reports = {report.name: report for report in choice.broken}
        assert "ZeroDivisionError: bad plug-in" in reports["bad"].text
        assert "ModuleNotFoundError" in reports["no"].text
    finally:
        for source in choice.sources:
            source.close()


def test_the_current_of_a_ups_board_is_read_where_one_is_named(tmp_path: Path) -> None:
    assert registry.ups_amperes({"ina2xx_wire": "supply"}, tmp_path) is None
    read = registry.ups_amperes({"ina2xx_wire": "ups"}, tmp_path)
    assert read is not None
    with pytest.raises(OSError, match="there is no INA219"):
        read()
    chip = {"name": "ina219\n", "in1_input": "8000\n", "curr1_input": "-310\n"}
    for name, value in chip.items():
        write_tree(tmp_path, {f"sys/class/hwmon/hwmon0/{name}": value})
    assert read() == pytest.approx(-0.31)  # it was plugged in later
    wrong = registry.ups_amperes({"ina2xx_wire": "ups", "ina2xx_i2c": "/dev/i2c-1:bus"}, tmp_path)
    assert wrong is not None
    with pytest.raises(OSError, match="write it like"):
        wrong()

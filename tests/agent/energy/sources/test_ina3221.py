"""INA3221 files and tegrastats lines of Jetson boards: totals, old layouts, traps, damage."""

import re
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.energy.sources.base import Coverage, SourceAbsent, SourceError
from agent.energy.sources.ina3221 import Ina3221Source, find_channels
from agent.energy.sources.subprocess_source import ChildOutput
from agent.energy.sources.tegrastats import NAME, parse_line, tegrastats_source
from tests.agent.energy.device_trees import ORIN_NANO, hwmon
from tests.agent.energy.recordings import local

LINES = local("tegrastats_lines.txt").splitlines(keepends=True)
TOTALS = (17.946, 6.755, 5.297, 4.761, 9.110, 4.548, 7.280)
"""Watts of each line by hand: VDD_IN, or VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 on an AGX."""
AGX_ORIN = {1: ("VDD_GPU_SOC", 19200, 144), 2: ("VDD_CPU_CV", 19200, 40), 3: ("VIN_SYS_5V0", 4984, 664)}


@pytest.mark.parametrize("driver", ["ina3221", "ina3221x"])
def test_board_input_is_the_total(tmp_path: Path, driver: str) -> None:
    hwmon(tmp_path, "1-0040", ORIN_NANO, driver)
    source = Ina3221Source(tmp_path)
    assert source.read(0.0).watts == pytest.approx(4.7616)
    assert source.info.coverage is Coverage.BOARD


def test_agx_orin_sums_three_rails_and_says_so(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", AGX_ORIN)
    folder = hwmon(tmp_path, "1-0041", {1: ("NC", 0, 0), 2: ("VDDQ_VDD2_1V8AO", 1800, 160), 3: ("NC", 0, 0)})
    (folder / "in1_input").write_text("")  # the recorded 1-0041 answers unused channels with an error
    source = Ina3221Source(tmp_path)
    assert source.read(0.0).watts == pytest.approx(2.7648 + 0.768 + 3.309376)
    assert source.info.coverage is Coverage.RAIL_SUM
    assert "carrier" in source.info.covers
    assert {channel.rail for channel in find_channels(tmp_path)} == {
        "VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO",
    }  # fmt: skip


def test_jetpack_4_layout(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    folder.mkdir(parents=True)
    for number, (rail, millivolts, milliamperes) in enumerate(
        (("POM_5V_IN", 4968, 312), ("POM_5V_GPU", 4968, 0), ("POM_5V_CPU", 4968, 24))
    ):
        (folder / f"rail_name_{number}").write_text(f"{rail}\n")
        (folder / f"in_voltage{number}_input").write_text(f"{millivolts}\n")
        (folder / f"in_current{number}_input").write_text(f"{milliamperes}\n")
    assert Ina3221Source(tmp_path).read(0.0).watts == pytest.approx(1.550016)


TORN = ("", "49", "4x60\n", "-900\n", "140000\n", "Input/output error\n")


@pytest.mark.parametrize("text", TORN)
@pytest.mark.parametrize("name", ["in1_input", "curr1_input"])
def test_torn_rail_is_never_a_number(tmp_path: Path, name: str, text: str) -> None:
    folder = hwmon(tmp_path, "1-0040", ORIN_NANO)
    source = Ina3221Source(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(SourceError):
        source.read(0.0)
    assert not source.self_test(0.0).ok


def test_rail_that_vanishes_and_returns(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, "1-0040", ORIN_NANO)
    source = Ina3221Source(tmp_path)
    (folder / "curr1_input").rename(folder / "away")
    with pytest.raises(SourceError, match="cannot read"):
        source.read(0.0)
    (folder / "away").rename(folder / "curr1_input")
    assert source.read(1.0).watts == pytest.approx(4.7616)


def test_unknown_rails_are_refused_by_name(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", {1: ("VDD_NEW", 5000, 100)})
    with pytest.raises(SourceError, match="VDD_NEW do not make a known total"):
        Ina3221Source(tmp_path)


def test_no_sensor_is_absent(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent):
        Ina3221Source(tmp_path)


@pytest.mark.parametrize(("line", "watts"), list(zip(LINES, TOTALS, strict=True)))
def test_line_forms_of_all_releases(line: str, watts: float) -> None:
    assert parse_line(line).total.watts == pytest.approx(watts)


def test_three_part_rails_and_temperatures() -> None:
    line = parse_line(LINES[4])
    rail = next(rail for rail in line.rails if rail.name == "VDD_CPU_CV")
    assert (rail.watts, rail.average_watts, rail.peak_watts) == (1.137, 1.296, 2.273)
    assert line.celsius["cpu"] == 47.906
    assert line.memory_total_bytes == 62878 << 20


def test_two_part_rails_have_no_peak_and_absent_zones_no_temperature() -> None:
    line = parse_line(LINES[1])
    assert all(rail.peak_watts is None for rail in line.rails)
    assert line.celsius["gpu"] is None
    assert line.celsius["cpu"] == 44.562


def test_agx_xavier_sums_all_rails() -> None:
    line = (
        "RAM 14700/15692MB (lfb 3x2MB) SWAP 898/8192MB (cached 23MB) CPU [0%@1190,0%@1190] EMC_FREQ 0% GR3D_FREQ 0% "
        "AO@30C GPU@30.5C CPU@31.5C GPU 463/463 CPU 618/618 SOC 2936/2936 CV 0/0 VDDRQ 309/309 SYS5V 3306/3306\n"
    )
    assert parse_line(line).total.watts == pytest.approx(7.632)


@pytest.mark.parametrize("line", LINES)
def test_line_cut_anywhere_is_never_a_number(line: str) -> None:
    for end in range(len(line)):
        with pytest.raises(SourceError):
            parse_line(line[:end])
        if line[end - 1 : end] != " " and end < len(line) - 2:
            # Even with a newline behind the cut, a number is either right or refused.
            try:
                watts = parse_line(line[:end] + "\n").total.watts
            except SourceError:
                continue
            assert watts == pytest.approx(parse_line(line).total.watts)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dirt", ["x", "\x00", " ", "-", "é"])
def test_garbled_total_is_never_a_number(line: str, dirt: str) -> None:
    rail = parse_line(line).total.rails[-1]
    start = line.index(f" {rail} ") + len(rail) + 3
    with pytest.raises(SourceError):
        _ = parse_line(line[:start] + dirt + line[start:]).total


def test_nano_and_xavier_and_orin_logs() -> None:
    nano = [parse_line(line) for line in local("jetson_nano_head.log").splitlines(keepends=True)]
    assert [line.total.watts for line in nano[:3]] == [0.920, 1.537, 2.793]
    orin = [parse_line(line) for line in local("agx_orin_edge.log").splitlines(keepends=True)]
    assert orin[-1].total.watts == pytest.approx(2.399 + 0.399 + 2.813)
    assert orin[-1].total.coverage is Coverage.RAIL_SUM


def test_all_recorded_lines(shared: Callable[[str], str]) -> None:
    lines = [line for line in shared("tegrastats/single_lines.txt").splitlines(keepends=True) if line[0] != "#"]
    totals = [parse_line(line).total.watts for line in lines]
    assert totals == pytest.approx([17.946, 6.755, 5.297, 12.479, 4.761, 13.907, 9.110, 4.548, 7.280])
    for name, count, first, last in (
        ("xavier_nx_burn.log", 103, 5.542, 13.751),
        ("agx_orin_l4t35_36_llm_then_idle.log", 15, 6.912, 5.611),
        ("jetson_nano_pom5v_training.log", 114, 0.920, 1.613),
    ):
        watts = [parse_line(line).total.watts for line in shared(f"tegrastats/{name}").splitlines(keepends=True)]
        assert (len(watts), watts[0], watts[-1]) == (count, pytest.approx(first), pytest.approx(last))


def test_recorded_second_sensor_of_an_agx_orin(shared: Callable[[str], str], tmp_path: Path) -> None:
    """Rebuild 1-0041 as recorded: attributes without labels, one that answers with an error."""
    text = shared("ina3221/agx_orin_1-0041_partial.txt")
    paths = re.findall(r"^(/sys/bus/i2c/drivers/ina3221/1-0041/\S+)\n(.*)$", text, re.MULTILINE)
    assert len(paths) >= 5
    for path, content in paths:
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if content.startswith("cat:") else f"{content}\n")
    with pytest.raises(SourceAbsent):
        Ina3221Source(tmp_path)  # no labelled channel, so nothing to measure
    hwmon(tmp_path, "1-0040", AGX_ORIN)
    assert Ina3221Source(tmp_path).read(0.0).watts == pytest.approx(2.7648 + 0.768 + 3.309376)


def _child(script: str) -> ChildOutput:
    return ChildOutput(NAME, (sys.executable, "-c", script), r"\n", stale_after_s=5.0)


def _first(output: ChildOutput) -> float:
    """Return the watts of the first record, waiting until the child has printed or ended."""
    source = tegrastats_source(output)
    reading = source.read(0.0)
    while reading is None or reading.watts is None:
        select.select([output.fileno()], [], [], 30.0)
        reading = source.read(0.0)
    return reading.watts


def test_newest_line_of_a_real_child_process() -> None:
    script = f"import time; print({LINES[0] + LINES[3]!r}, end='', flush=True); time.sleep(60)"
    output = _child(script)
    try:
        assert _first(output) == pytest.approx(4.761)
        with pytest.raises(SourceError, match="silent"):
            tegrastats_source(output).read(100.0)
    finally:
        output.close()


def test_child_that_dies_or_does_not_exist() -> None:
    with pytest.raises(SourceError, match="ended with code 3"):
        _first(_child("raise SystemExit(3)"))
    missing = tegrastats_source(ChildOutput(NAME, ("/nonexistent/tegrastats",), r"\n", 5.0))
    with pytest.raises(SourceError, match="cannot be started"):
        missing.read(0.0)
    assert not missing.self_test(0.0).ok

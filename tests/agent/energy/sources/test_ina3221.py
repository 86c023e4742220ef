"""INA3221 files and tegrastats lines of Jetson boards: totals, old layouts, traps, damage."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.ina3221 import Ina3221Source, find_channels
from port_agent.energy.sources.power_source import Coverage, SourceAbsent, SourceError
from tests.agent.energy.device_trees import ORIN_NANO, hwmon
from tests.agent.energy.recordings import local

LINES = local("tegrastats_lines.txt").splitlines(keepends=True)
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
        "VDD_GPU_SOC",
        "VDD_CPU_CV",
        "VIN_SYS_5V0",
        "VDDQ_VDD2_1V8AO",
    }


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


@pytest.mark.parametrize(
    ("rails", "said"),
    [
        (
            ORIN_NANO,
            "reads 4.76 W, of it 0.52 W on VDD_CPU_GPU_CV, which feeds the GPU with CPU and vision accelerators",
        ),
        (AGX_ORIN, "reads 6.84 W, of it 2.76 W on VDD_GPU_SOC, which feeds the GPU with the rest of the chip's core"),
    ],
)
def test_what_the_gpus_rail_draws_is_said(tmp_path: Path, rails: dict[int, tuple[str, int, int]], said: str) -> None:
    hwmon(tmp_path, "1-0040", rails)
    source = Ina3221Source(tmp_path)
    assert source.self_test(0.0).text == said
    assert "feeds the GPU with" in source.info.covers


def test_a_gpu_rail_that_fails_leaves_the_total(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, "1-0040", ORIN_NANO)
    source = Ina3221Source(tmp_path)
    (folder / "curr2_input").write_text("")
    test = source.self_test(0.0)
    assert test.ok and "reads 4.76 W, but VDD_CPU_GPU_CV fails" in test.text and test.remedy
    assert source.read(0.0).watts == pytest.approx(4.7616)


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


def test_readings_say_what_the_gpus_rail_draws_and_without_it_the_total_stands(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, "1-0040", ORIN_NANO)
    source = Ina3221Source(tmp_path)
    gpu = source.read(0.0).gpu
    assert gpu is not None and gpu.watts == pytest.approx(0.52, abs=0.005)
    assert gpu.covers == "VDD_CPU_GPU_CV, which feeds the GPU with CPU and vision accelerators"
    (folder / "curr2_input").write_text("")
    reading = source.read(1.0)
    assert reading.watts == pytest.approx(4.7616) and reading.gpu is None

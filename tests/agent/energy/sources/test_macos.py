"""Macs: powermetrics of three generations, AppleSmartBattery's unsigned negatives."""

import itertools
import re
from collections.abc import Callable

import pytest

from port_agent.energy.sources.macos import (
    RECORD_END,
    mac_battery_source,
    parse_powermetrics,
    parse_smart_battery,
    read_register,
)
from port_agent.energy.sources.power_source import GpuReading, SourceError
from tests.agent.energy.recordings import local

TWO = local("powermetrics_m1_two_samples.txt")
FIRST = TWO[: TWO.index("*** Sampled", 10)]
COMBINED = local("powermetrics_combined.txt")
INTEL = local("powermetrics_intel.txt")
DISCHARGING = local("ioreg_discharging.txt")
CHARGING = local("ioreg_charging.txt")


@pytest.mark.parametrize(("text", "watts"), [(FIRST, 1.473), (COMBINED, 0.983), (INTEL, 48.61)])
def test_totals_of_three_generations(text: str, watts: float) -> None:
    assert parse_powermetrics(text).watts == watts


def test_parts_and_length_of_a_sample() -> None:
    sample = parse_powermetrics(FIRST)
    assert sample.components == {"ANE": 0.0, "DRAM": 0.22, "CPU": 0.947, "GPU": 0.153}
    assert sample.gpu == GpuReading(0.153, "the GPU alone, by Apple's energy model")
    assert sample.elapsed_s == pytest.approx(0.10451)


@pytest.mark.parametrize("text", [FIRST, COMBINED, INTEL])
def test_sample_cut_anywhere_is_never_a_number(text: str) -> None:
    for end in range(len(text)):
        with pytest.raises(SourceError):
            parse_powermetrics(text[:end])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1473 mW", "14x3 mW"),
        ("1473 mW", "1473 W"),
        ("1473 mW", "147 mW"),
        ("Package Power", "Packag Power"),
        ("1473 mW", "-1473 mW"),
        ("1473", "9999999"),
    ],
)
def test_garbled_sample_is_never_a_number(old: str, new: str) -> None:
    with pytest.raises(SourceError):
        parse_powermetrics(FIRST.replace(old, new))


def test_combined_power_must_be_the_sum_of_its_parts() -> None:
    for wrong in ("83", "1983", "98"):
        with pytest.raises(SourceError, match="does not fit"):
            parse_powermetrics(COMBINED.replace("983", wrong))


def test_two_glued_samples_are_not_one() -> None:
    with pytest.raises(SourceError, match="2 totals"):
        parse_powermetrics(TWO)
    ends = [match.end() for match in re.finditer(RECORD_END, TWO)]
    assert [parse_powermetrics(TWO[: ends[0]]).watts, parse_powermetrics(TWO[ends[0] :]).watts] == [1.473, 0.773]


def test_unsigned_image_of_a_negative_current() -> None:
    battery = parse_smart_battery(DISCHARGING)
    assert battery.amperes == pytest.approx(-1.092)
    assert battery.volts == 11.974
    assert battery.board_watts == pytest.approx(1.092 * 11.974)
    reading = mac_battery_source(lambda: DISCHARGING).read(0.0)
    assert reading is not None and reading.watts == pytest.approx(13.075608)


def test_charging_mac_has_nothing_to_measure() -> None:
    battery = parse_smart_battery(CHARGING)
    assert (battery.amperes, battery.volts, battery.charging) == (2.465, 12.5, True)
    assert mac_battery_source(lambda: CHARGING).read(0.0) is None


def test_register_in_property_list_form() -> None:
    assert read_register("<key>Amperage</key>\n<integer>-1889</integer>\n", "Amperage") == -1889
    with pytest.raises(SourceError):
        read_register("<key>Amperage</key>\n<integer>-18", "Amperage")


@pytest.mark.parametrize("text", [DISCHARGING, CHARGING])
def test_registers_cut_anywhere_are_never_a_wrong_number(text: str) -> None:
    whole = parse_smart_battery(text)
    for end in range(len(text)):
        try:
            battery = parse_smart_battery(text[:end])
        except SourceError:
            continue
        assert battery == whole


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"InstantAmperage" = 18446744073709550524', '"InstantAmperage" = 1844674407370955'),
        ('"Voltage" = 11974', '"Voltage" = 11x74'),
        ('"Voltage" = 11974', '"Voltage" = 119740'),
        ('"IsCharging" = No', '"IsCharging" = N'),
    ],
)
def test_garbled_registers_are_never_a_number(old: str, new: str) -> None:
    assert old in DISCHARGING
    source = mac_battery_source(lambda: DISCHARGING.replace(old, new))
    with pytest.raises(SourceError):
        source.read(0.0)
    assert not source.self_test(0.0).ok


def test_recorded_powermetrics(shared: Callable[[str], str]) -> None:
    text = shared("macos/powermetrics_m1_air_10x100ms.txt")
    ends = [0, *(match.end() for match in re.finditer(RECORD_END, text))]
    samples = [parse_powermetrics(text[start:end]) for start, end in itertools.pairwise(ends)]
    assert [sample.watts for sample in samples] == [
        int(milliwatts) / 1000 for milliwatts in re.findall(r"Package Power: (\d+) mW", text)
    ]
    assert len(samples) == 10
    assert sum(sample.elapsed_s or 0 for sample in samples) == pytest.approx(1.07, abs=0.02)
    lines = shared("macos/powermetrics_summary_lines.txt")
    intel = next(line for line in lines.splitlines(keepends=True) if line.startswith("Intel"))
    assert parse_powermetrics(intel).watts == 48.61
    with pytest.raises(SourceError, match="0 totals"):  # the cpu_power head of an M1 Pro has clusters but no total
        parse_powermetrics(lines[lines.index("**** Processor usage") :])


def test_recorded_registers(shared: Callable[[str], str]) -> None:
    text = shared("macos/ioreg_smartbattery.txt")
    discharging, charging, plist = re.split(r"^# (?:charging|plist).*\n", text, flags=re.MULTILINE)
    assert parse_smart_battery(discharging).board_watts == pytest.approx(13.075608)
    assert parse_smart_battery(charging).board_watts is None
    assert read_register(plist, "Amperage") == -1889

"""What sources share: files that are torn, numbers that no machine draws, and how figures are called."""

import json
import math
import os
from pathlib import Path

import pytest

from port_agent.energy.sources.power_source import (
    MAX_PLAUSIBLE_WATTS,
    Coverage,
    Kind,
    SensorReading,
    SourceError,
    SourceInfo,
    parse_integer,
    plausible_watts,
    probe_by_reading,
    read_integer,
    read_text,
    title_of,
)
from tests.agent.energy.recordings import ScriptedSource


def test_a_source_describes_itself_in_a_line_and_as_json() -> None:
    info = SourceInfo("chip", Kind.MEASURED, Coverage.RAIL_SUM, "all but the fan", 0.025, 0.5)
    assert info.describe() == "measured in steps of 0.025 W, every 0.5 s: all but the fan"
    plain = json.loads(info.as_json())
    assert (plain["name"], plain["kind"], plain["coverage"], plain["period_s"]) == ("chip", "measured", "rail sum", 0.5)
    silent = SourceInfo("estimated", Kind.ESTIMATED, Coverage.BOARD, "a model", None, 1.0)
    assert silent.describe() == "estimated, every 1 s: a model"
    assert (info.title, silent.title) == ("measured by chip", "estimated")
    assert title_of("rapl", "measured") == "measured by rapl"


@pytest.mark.parametrize(
    ("value", "ok", "text"),
    [
        (4.0, True, "reads 4.00 W"),
        (None, True, "works, but has nothing to measure at the moment"),
        (SensorReading(0.0, counter_joules=3.0), True, "counter is readable"),
        ("torn off", False, "torn off"),
    ],
)
def test_a_self_test_is_one_reading_in_words(value: float | SensorReading | str | None, ok: bool, text: str) -> None:
    source = ScriptedSource()
    source.value = value
    found = probe_by_reading(source, 0.0)
    assert (found.ok, found.text, found.remedy) == (ok, text, "" if ok else "plug it in again")


@pytest.mark.parametrize("watts", [-0.001, MAX_PLAUSIBLE_WATTS * 1.001, math.nan, math.inf])
def test_what_no_machine_draws_is_a_broken_read(watts: float) -> None:
    assert plausible_watts("chip", 0.0) == 0.0 and plausible_watts("chip", MAX_PLAUSIBLE_WATTS) == MAX_PLAUSIBLE_WATTS
    with pytest.raises(SourceError, match=r"chip: reads .* W, which no machine of this class draws; check the wiring"):
        plausible_watts("chip", watts)


@pytest.mark.parametrize("content", [b"", b"4960", b"4960\nmore", b"caf\xc3\xa9\n"])
def test_a_file_without_its_last_newline_or_in_another_alphabet_is_torn(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in1_input").write_bytes(content)
    with pytest.raises(SourceError, match=r"is truncated|cannot read"):
        read_text("chip", tmp_path / "in1_input")


def test_a_file_that_is_not_there_or_forbidden_is_said_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read .*gone .*; check that the driver is loaded"):
        read_text("chip", tmp_path / "gone")
    forbidden = tmp_path / "energy_uj"
    forbidden.write_text("1\n")
    forbidden.chmod(0)
    if os.access(forbidden, os.R_OK):
        pytest.skip("root may read everything")
    with pytest.raises(SourceError, match="may not be read; run as root"):
        read_text("chip", forbidden)


@pytest.mark.parametrize("text", ["-12", "0", "9223372036854775807", " 42 "])
def test_whole_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "value").write_text(f"{text}\n")
    assert read_integer("chip", tmp_path / "value") == int(text)


@pytest.mark.parametrize("text", ["", "1.5", "0x10", "1_000", "12 13", "99999999999999999999"])
def test_text_that_is_no_whole_number_names_its_place(text: str) -> None:
    with pytest.raises(SourceError, match=r"energy_uj holds .*, not a whole number; see the driver's log"):
        parse_integer("chip", text, "energy_uj")

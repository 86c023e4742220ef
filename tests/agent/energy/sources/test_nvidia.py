"""What NVIDIA cards draw, from recorded outputs; a card that sleeps is not asked, and
processor and cards are added up.
"""

from pathlib import Path

import pytest

from port_agent.energy.sources.nvidia import NAME, NvidiaSource, WithCards, parse_draw
from port_agent.energy.sources.power_source import Coverage, Kind, SensorReading, SourceAbsent, SourceError
from port_agent.energy.sources.registry import EnergyConfig, diagnose, open_sources
from tests.agent.energy.device_trees import zone
from tests.agent.energy.recordings import ScriptedSource, local
from tests.agent.facts.machines import fake_program, on_path
from tests.agent.trees import write_tree

V100 = "nvidia_smi_v100_power.txt"
RTX_2080 = "GPU-22b2c6ac-2d49-4863-197c-9c469071178a, 176.98\n"
ANSWERS = """
echo "$2" >> "$ASKED"
[ -z "$FAILS" ] || { echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18; }
printf '%s' "$SAID"
"""


def cards(root: Path, *status: str) -> None:
    """Write what the kernel says of cards."""
    write_tree(
        root / "sys/bus/pci/drivers/nvidia",
        {f"0000:0{i}:00.0/power/runtime_status": f"{s}\n" for i, s in enumerate(status)},
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi prints `$SAID` and notes whom it was asked about."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "nvidia-smi", ANSWERS)
    on_path(monkeypatch, programs)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("SAID", local(V100))
    monkeypatch.setenv("FAILS", "")
    return tmp_path


def asked(root: Path) -> list[str]:
    found = root / "asked"
    return found.read_text().splitlines() if found.exists() else []


def test_recorded_outputs() -> None:
    found = parse_draw(local(V100))
    assert len(found) == 5 and found["GPU-3410aa41-502b-5cf1-d8c4-58dc1c22fbc9"] == 383.55
    assert parse_draw(RTX_2080) == {"GPU-22b2c6ac-2d49-4863-197c-9c469071178a": 176.98}
    assert parse_draw("GPU-22b2c6ac-2d49-4863-197c-9c469071178a, [Not Supported]\n") == {
        "GPU-22b2c6ac-2d49-4863-197c-9c469071178a": None
    }
    for torn in ("GPU-22b2c6ac, 17", "No devices were found", "176.98", "GPU-22b2c6ac, 9999999.00"):
        with pytest.raises(SourceError):
            parse_draw(torn + "\n")


@pytest.mark.process
def test_cards_that_are_awake_are_asked_and_added(root: Path) -> None:
    cards(root, "active", "suspended", "active")
    source = NvidiaSource(root)
    reading = source.read(3.0)
    assert reading.watts == pytest.approx(48.99 + 383.55 + 56.10 + 49.69 + 191.77) and reading.time_s == 3.0
    assert reading.gpu is not None and reading.gpu.watts == reading.watts
    assert set(asked(root)) == {"0000:00:00.0,0000:02:00.0"}
    assert (source.info.coverage, source.info.kind) == (Coverage.CARD, Kind.MEASURED)
    assert source.self_test(4.0).text == "reads 730.10 W"


def test_nobody_is_asked_while_all_sleep(root: Path) -> None:
    cards(root, "suspended")
    assert NvidiaSource(root).read(0.0).watts == 0.0 and asked(root) == []


@pytest.mark.process
def test_one_card_is_asked_for_by_its_uuid(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(root, "active")
    monkeypatch.setenv("SAID", RTX_2080)
    uuid = RTX_2080.partition(",")[0]
    assert NvidiaSource(root, uuid).read(0.0).watts == 176.98 and set(asked(root)) == {uuid}


@pytest.mark.process
def test_no_card_no_sensor_no_driver(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceAbsent, match="no NVIDIA card"):
        NvidiaSource(root)
    cards(root, "active")
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(SourceError, match="version mismatch") as failed:
        NvidiaSource(root)
    assert not isinstance(failed.value, SourceAbsent)
    monkeypatch.setenv("FAILS", "")
    monkeypatch.setenv("SAID", "GPU-22b2c6ac-2d49-4863-197c-9c469071178a, [Not Supported]\n")
    with pytest.raises(SourceAbsent, match="power sensor"):
        NvidiaSource(root)


def both(coverage: Coverage) -> tuple[WithCards, ScriptedSource, ScriptedSource]:
    machine, own = ScriptedSource("machine"), ScriptedSource(NAME)
    object.__setattr__(machine.info, "coverage", coverage)
    return WithCards(machine, own), machine, own


def test_the_processor_and_its_cards_are_added() -> None:
    source, machine, own = both(Coverage.PACKAGE)
    assert source.info.name == "machine+nvidia" and "and the NVIDIA cards" in source.info.covers
    found = []
    for time_s, joules, watts in ((0.0, 100.0, 10.0), (1.0, 130.0, 30.0), (3.0, 160.0, 30.0)):
        machine.value, own.value = SensorReading(time_s, counter_joules=joules), watts
        found.append(source.read(time_s))
    assert [r and r.counter_joules for r in found] == [100.0, 130.0 + 20.0, 160.0 + 20.0 + 60.0]
    machine.value, own.value = 7.0, 5.0
    reading = source.read(4.0)
    assert reading is not None and reading.watts == 12.0
    own.value = "gone"
    with pytest.raises(SourceError):
        source.read(5.0)
    own.value = SensorReading(6.0, watts=None, counter_joules=1.0)
    assert source.read(6.0) is None, "the card has not said anything yet"


def test_of_a_total_the_cards_are_a_part() -> None:
    source, machine, own = both(Coverage.WALL)
    machine.value, own.value = 80.0, SensorReading(0.0, watts=30.0)
    reading = source.read(0.0)
    assert reading is not None and reading.watts == 80.0
    own.value = "gone"
    reading = source.read(1.0)
    assert reading is not None and (reading.watts, reading.gpu) == (80.0, None)
    source.close()
    assert machine.closed and own.closed


@pytest.mark.process
def test_cards_go_with_the_best_measured_source_and_are_never_the_machine(root: Path) -> None:
    cards(root, "active")
    (estimated,) = open_sources(EnergyConfig(), None, root).sources
    assert estimated.info.kind is Kind.ESTIMATED
    zone(root, "intel-rapl:0", "package-0", 5)
    choice = open_sources(EnergyConfig(), None, root)
    first, last = choice.sources
    assert isinstance(first, WithCards) and first.info.name == "rapl+nvidia" and last.info.kind is Kind.ESTIMATED
    assert next(report.text for report in choice.reports if report.name == NAME) == "reads 730.10 W"
    for source in choice.sources:
        source.close()
    without = open_sources(EnergyConfig(disable=(NAME,)), None, root).sources
    assert not isinstance(without[0], WithCards)
    assert NAME in [report.name for report in diagnose(EnergyConfig(), None, root) if report.ok]

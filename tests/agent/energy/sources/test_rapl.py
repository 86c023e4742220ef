"""RAPL: which zones are added, wraps, permissions, containers, virtual machines."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.power_source import SourceAbsent, SourceError
from port_agent.energy.sources.rapl import RaplSource, find_zones
from tests.agent.energy.device_trees import RANGE_UJ, TREE, zone


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """Give a root like a Kaby Lake laptop without psys: package with core, uncore and dram, and its MMIO double."""
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:0/intel-rapl:0:0", "core", 500_000)
    zone(tmp_path, "intel-rapl:0/intel-rapl:0:1", "uncore", 100_000)
    zone(tmp_path, "intel-rapl:0/intel-rapl:0:2", "dram", 2_469_474_853)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000)
    return tmp_path


def test_package_and_memory_are_added_but_not_what_lies_inside(laptop: Path) -> None:
    assert [(zone.path.name, zone.name) for zone in find_zones(laptop)] == [
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0:2", "dram"),
    ]


def test_psys_stands_alone(laptop: Path) -> None:
    zone(laptop, "intel-rapl:1", "psys", 7)
    assert [zone.name for zone in find_zones(laptop)] == ["psys"]
    assert "psys" in RaplSource(laptop).info.covers


def test_counts_joules_of_all_zones(laptop: Path) -> None:
    source = RaplSource(laptop)
    assert source.read(10.0).counter_joules == 0
    zone(laptop, "intel-rapl:0", "package-0", 1_000_000 + 15_000_000)
    zone(laptop, "intel-rapl:0/intel-rapl:0:2", "dram", 2_469_474_853 + 2_000_000)
    assert source.read(11.0).counter_joules == pytest.approx(17.0)


def test_counter_that_every_die_shows_again_counts_once(tmp_path: Path) -> None:
    for die in range(4):
        zone(tmp_path, f"intel-rapl:{die}", f"package-{die}", 50_000_000_000 + die * 40_000)
    assert [zone.name for zone in find_zones(tmp_path)] == ["package-0"]
    zone(tmp_path, "intel-rapl:1", "package-1", 70_000_000_000)
    assert [zone.name for zone in find_zones(tmp_path)] == ["package-0", "package-1"]


def test_wrap_is_counted_on(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 4_000_000)
    source = RaplSource(tmp_path)
    source.read(0.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 6_000_000)
    assert source.read(1.0).counter_joules == pytest.approx(10.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 16_000_000)
    assert source.read(2.0).counter_joules == pytest.approx(20.0)


def test_reset_counter_is_a_failure_and_then_counting_goes_on(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 100_000_000_000)
    source = RaplSource(tmp_path)
    source.read(0.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    with pytest.raises(SourceError, match="jumped by"):
        source.read(1.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 12_000_000)
    assert source.read(2.0).counter_joules == pytest.approx(7.0)


def test_silence_longer_than_a_wrap_can_last_is_a_failure(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    source = RaplSource(tmp_path)
    source.read(0.0)
    with pytest.raises(SourceError, match="may wrap every 262 s"):
        source.read(3600.0)


def test_forbidden_counter_names_the_remedy(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def forbid(path: Path, flags: int) -> int:
        if Path(path).name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", forbid)  # root, as in containers, may read mode 0400 all the same
    with pytest.raises(SourceError, match=r"may not be read.*udev rule"):
        RaplSource(laptop)


def test_dangling_links_of_a_container(tmp_path: Path) -> None:
    (tmp_path / TREE).mkdir(parents=True)
    (tmp_path / TREE / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl/intel-rapl:0")
    with pytest.raises(SourceError, match="dangling links") as caught:
        RaplSource(tmp_path)
    assert not isinstance(caught.value, SourceAbsent)


def test_no_tree_is_absent_rather_than_broken(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent):
        RaplSource(tmp_path)


def test_virtual_machine_counter_beyond_its_range_is_refused(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:1", "package-1", 60_293_987_000_000, 65_712_999_613)
    with pytest.raises(SourceError, match="outside its own range"):
        RaplSource(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "\n", "12", "12x4\n", "0x1f\n", "-5\n", "1.5\n", "nan\n", "9" * 25 + "\n", "No data\n"]
)
def test_torn_or_garbled_counter_is_never_a_number(tmp_path: Path, text: str) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    source = RaplSource(tmp_path)
    source.read(0.0)
    (folder / "energy_uj").write_text(text)
    with pytest.raises(SourceError):
        source.read(1.0)
    assert not source.self_test(2.0).ok


def test_recorded_values(shared: Callable[[str], str], tmp_path: Path) -> None:
    text = shared("rapl/powercap_samples.txt")
    for path, key, value in re.findall(r"^/sys/class/powercap/intel-rapl/(\S+)/(\w+):(\w+)$", text, re.MULTILINE):
        folder = tmp_path / TREE / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(f"{value}\n")
    zone(tmp_path, "intel-rapl:0", "package-0", 17_515_587_911)
    # sub-zone 0:1 has no name in the recording
    (tmp_path / TREE / "intel-rapl:0/intel-rapl:0:1/name").write_text("uncore\n")
    source = RaplSource(tmp_path)
    memory = source.zones[1]
    assert (memory.name, memory.range_joules) == ("dram", pytest.approx(262143.999938))
    source.read(0.0)
    (memory.path / "energy_uj").write_text(f"{2469474853 + 3_500_000}\n")
    assert source.read(1.0).counter_joules == pytest.approx(3.5)
    vm = re.search(r"intel-rapl:1/energy_uj\n(\d+)\n", text)
    assert vm
    zone(tmp_path, "intel-rapl:1", "package-1", int(vm[1]))
    with pytest.raises(SourceError, match="virtual machine"):
        RaplSource(tmp_path)

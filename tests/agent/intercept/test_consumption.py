"""Joules and wear of a followed program."""

from pathlib import Path

import pytest

from port_agent.energy.media import FlashPrices, medium_of
from port_agent.energy.wear import ASSUMED_CYCLES
from port_agent.intercept import consumption
from port_agent.intercept.consumption import EnergyUse, wear_joules_per_byte, wear_share
from port_planner.ir.costs import MediumKind
from tests.agent.energy.device_trees import RANGE_UJ, zone
from tests.agent.trees import write_tree

GIB = 1 << 30


def package(root: Path, joules: float) -> None:
    """Show a processor's counter."""
    zone(root, "intel-rapl:0", "package-0", int(joules * 1e6))


def test_counters_are_measured_from_the_start(tmp_path: Path) -> None:
    package(tmp_path, 100.0)
    use = EnergyUse(tmp_path)
    package(tmp_path, 107.5)
    total = use.total(0, 0)
    assert total is not None and total.joules == pytest.approx(7.5) and total.source == "measured by rapl"


def test_counters_are_read_before_they_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumption, "_READ_EVERY_S", 0.0)
    package(tmp_path, 262143.0)
    use = EnergyUse(tmp_path)
    package(tmp_path, 0.5)
    use.keep_up()
    package(tmp_path, 1.5)
    total = use.total(0, 0)
    assert total is not None and total.joules == pytest.approx(int(RANGE_UJ) / 1e6 - 262143.0 + 1.5)


def test_without_counters_or_when_they_fail_a_model_says_it(tmp_path: Path) -> None:
    package(tmp_path, 1.0)
    failing = EnergyUse(tmp_path)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("none\n")
    for use in (failing, EnergyUse(tmp_path / "nothing")):
        total = use.total(0, 0)
        assert total is not None and total.joules > 0 and total.source == "estimated"


def test_a_known_board_prices_bytes(tmp_path: Path) -> None:
    write_tree(tmp_path, {"proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0"})
    use = EnergyUse(tmp_path)
    little, much = use.total(0, 0), use.total(0, 100 * GIB)
    assert little is not None and much is not None and much.joules > little.joules + 1


def test_wear_is_a_share_of_the_flash_below_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wear_share(tmp_path, GIB, tmp_path / "nothing") is None

    class Card:
        def __init__(self, folder: Path, root: Path) -> None:
            assert folder == tmp_path

        def flash_bytes(self) -> int:
            return 32 * GIB

    monkeypatch.setattr(consumption, "DiskCounter", Card)
    assert wear_share(tmp_path, 32 * GIB) == pytest.approx(1 / ASSUMED_CYCLES)


def test_a_written_byte_is_priced_by_the_medium_below_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumption, "in_ram", lambda folder: False)
    card = medium_of(MediumKind.SD, FlashPrices())
    assert wear_joules_per_byte(tmp_path, root=tmp_path / "nothing") == card.wear_joules_per_byte > 0
    dear = FlashPrices(endurance_bytes=10**12, medium=100.0, per_kwh=0.25)
    assert wear_joules_per_byte(tmp_path, dear, tmp_path / "nothing") == pytest.approx(100 / 10**12 / 0.25 * 3.6e6)
    monkeypatch.setattr(consumption, "in_ram", lambda folder: True)
    assert wear_joules_per_byte(tmp_path, dear, tmp_path / "nothing") == 0.0

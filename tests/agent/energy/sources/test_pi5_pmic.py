"""Raspberry Pi 5 power chip: the right sum, a lower bound; damage is refused."""

from collections.abc import Callable

import pytest

from port_agent.energy.sources.pi5_pmic import parse_pmic, pi5_source
from port_agent.energy.sources.power_source import Coverage, SourceError
from tests.agent.energy.recordings import local

IDLE = local("pi5_pmic_read_adc_idle.txt")
LOADED_TAIL = local("pi5_pmic_read_adc_loaded_tail.txt")


def test_idle_dump_sums_rails_with_both_figures() -> None:
    dump = parse_pmic(IDLE)
    assert dump.rail_watts["VDD_CORE"] == pytest.approx(0.94657990 * 0.72097620)
    assert dump.rail_watts["3V3_SYS"] == pytest.approx(0.04782057 * 3.29982600)
    assert "EXT5V" not in dump.rail_watts
    assert dump.volts["EXT5V"] == pytest.approx(5.11478)
    by_hand = (
        0.07709848 * 3.690497 + 0.04782057 * 3.299826 + 0.1151597 * 1.796335 + 0.00780744 * 1.108058
        + 0.1766433 * 1.101464 + 0.3308403 * 0.802197 + 0.9465799 * 0.7209762 + 0.0014652 * 3.304026
        + 0.00140415 * 3.2967 + 0.00494505 * 0.7994132 + 0.0169719 * 5.11612
    )  # fmt: skip
    assert dump.total_watts() == pytest.approx(by_hand)
    assert by_hand == pytest.approx(1.9005, abs=1e-4)


def test_source_says_lower_bound() -> None:
    source = pi5_source(lambda: IDLE)
    reading = source.read(3.0)
    assert reading is not None and reading.watts == pytest.approx(1.9005, abs=1e-4)
    assert source.info.coverage is Coverage.RAILS
    assert "lower bound" in source.info.covers


def test_dump_that_lost_its_head_has_rails_but_no_total() -> None:
    dump = parse_pmic(LOADED_TAIL)
    assert dump.rail_watts["VDD_CORE"] == pytest.approx(5.03652 * 0.8936988)
    assert "DDR_VDD2" not in dump.rail_watts
    with pytest.raises(SourceError, match="1V8_SYS, 3V3_SYS, 3V7_WL_SW, DDR_VDD2"):
        dump.total_watts()


def test_cut_anywhere_is_never_a_number() -> None:
    for end in range(len(IDLE)):
        with pytest.raises(SourceError):
            parse_pmic(IDLE[:end]).total_watts()
    lines = IDLE.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(SourceError):
            parse_pmic("".join(lines[:number] + lines[number + 1 :])).total_watts()


@pytest.mark.parametrize(
    "old_new",
    [
        ("0.94657990A", "0.9465799OA"),
        ("0.94657990A", "0.94657990V"),
        ("current(7)", "volt(7)"),
        ("=0.946", "0.946"),
        ("0.94657990A", "-0.94657990A"),
        ("VDD_CORE_A current(7)=0.94657990A", 'error=1 error_msg="Command not registered"'),
    ],
)
def test_garbled_is_a_failed_self_test(old_new: tuple[str, str]) -> None:
    source = pi5_source(lambda: IDLE.replace(*old_new))
    with pytest.raises(SourceError):
        source.read(0.0)
    test = source.self_test(0.0)
    assert not test.ok
    assert "Raspberry Pi 5" in test.remedy


@pytest.mark.process
def test_missing_tool_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SourceError, match="cannot run vcgencmd"):
        pi5_source().read(0.0)


def test_full_recordings_are_these(shared: Callable[[str], str]) -> None:
    assert shared("rpi/pi5_pmic_read_adc_idle.txt") == IDLE
    assert shared("rpi/pi5_pmic_read_adc_loaded_tail.txt") == LOADED_TAIL

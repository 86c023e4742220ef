"""macOS: recorded output of its commands, and a whole Mac."""

import asyncio
from pathlib import Path

import pytest

from port_agent.facts import Answer, OwnUse, Power
from port_agent.facts.macos import MacPlatform, parse_hid_idle, parse_pmset_batt, parse_pmset_therm
from tests.agent.facts.machines import OPTIONS, fake_program, on_path
from tests.agent.trees import recorded


def test_recorded_pmset_batt() -> None:
    text = recorded("macos/pmset_g_batt.txt")
    blocks = ["Now drawing" + block for block in text.split("Now drawing")[1:]]
    readings = [parse_pmset_batt(block) for block in blocks]
    assert [(reading.power, reading.battery_percent) for reading in readings] == [
        (Power.BATTERY, 89),
        (Power.BATTERY, 90),
        (Power.EXTERNAL, 88),
        (Power.EXTERNAL, 90),
        (Power.EXTERNAL, 91),
        (Power.BATTERY, 95),
        (Power.BATTERY, 94),
        (Power.EXTERNAL, None),
    ]


def test_pmset_without_a_source_is_unknown() -> None:
    assert parse_pmset_batt("").power is Power.UNKNOWN
    assert parse_pmset_batt("Now drawing from 'Steam'").power is Power.UNKNOWN


@pytest.mark.parametrize(
    ("text", "seconds"),
    [('"HIDIdleTime" = 68130403958', 68.130403958), ('  "HIDIdleTime"=1234567890', 1.23456789), ("", None)],
)
def test_hid_idle(text: str, seconds: float | None) -> None:
    assert parse_hid_idle(text) == seconds


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("CPU_Scheduler_Limit = 100\nCPU_Available_CPUs = 10\nCPU_Speed_Limit = 100", Answer.NO),
        ("CPU_Scheduler_Limit \t= 100\n CPU_Available_CPUs \t= 4\n CPU_Speed_Limit \t= 42", Answer.YES),
        ("Note: No thermal warning level has been recorded", Answer.NO),
        ("", Answer.UNKNOWN),
    ],
)
def test_pmset_therm(text: str, now: Answer) -> None:
    assert parse_pmset_therm(text).now is now


@pytest.mark.process
def test_a_mac_from_command_to_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path)
    battery = "Now drawing from 'Battery Power'\\n -InternalBattery-0 (id=1) 94%%; discharging; 7:08 remaining"
    therm = "CPU_Speed_Limit = 50"
    fake_program(tmp_path, "pmset", f'[ "$2" = batt ] && printf "{battery}" || echo "{therm}"')
    fake_program(tmp_path, "ioreg", "echo '\"HIDIdleTime\" = 12000000000'")
    platform = MacPlatform()
    assert platform.read(OPTIONS, OwnUse(), 0.0).power is Power.UNKNOWN  # nobody was asked yet
    before = platform.plug_monitor()
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert (facts.power, facts.battery_percent) == (Power.BATTERY, 94)
    assert facts.throttle.now is Answer.YES
    assert {signal.name: signal.idle for signal in facts.idle_signals}["input"] is Answer.NO
    assert platform.plug_monitor() != before
    assert facts.faults == () and facts.total_memory_bytes
    fake_program(tmp_path, "pmset", "exit 3")
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 2.0)
    assert facts.power is Power.UNKNOWN
    assert {fault.sensor for fault in facts.faults} == {"power", "throttling"}

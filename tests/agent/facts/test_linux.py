"""Facts of a Linux machine: whole, with readings that fail and return, and of the one that runs this."""

import asyncio
import time
from pathlib import Path

import pytest

from port_agent.facts import Answer, OwnUse, Power, SensorOptions
from port_agent.facts.linux import LinuxPlatform
from tests.agent.facts.machines import OPTIONS, fake_program, linux, on_path, stat
from tests.agent.trees import write_tree


def test_linux_facts(tmp_path: Path) -> None:
    facts = linux(tmp_path).read(OPTIONS, OwnUse(), 0.0)
    assert facts.power is Power.EXTERNAL
    assert facts.temperature_c == 45.0
    assert facts.available_memory_bytes == 512000 * 1024
    assert facts.memory_pressure_percent == 3.0
    assert facts.online is Answer.YES
    assert facts.free_disk_bytes is not None
    assert facts.faults == ()


def test_every_reading_may_fail_alone_and_return(tmp_path: Path) -> None:
    platform = linux(tmp_path)
    assert platform.read(OPTIONS, OwnUse(), 0.0).temperature_c == 45.0
    temperature = tmp_path / "sys/class/thermal/thermal_zone0/temp"
    temperature.unlink()
    (tmp_path / "proc/meminfo").unlink()
    write_tree(tmp_path / "proc", {"stat": stat(110, 990)})
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.temperature_c is None
    assert facts.available_memory_bytes is None
    assert facts.power is Power.EXTERNAL
    assert {fault.sensor for fault in facts.faults} == {"temperature", "memory"}
    temperature.write_text("46000")
    assert platform.read(OPTIONS, OwnUse(), 2.0).temperature_c == 46.0


@pytest.mark.process
def test_this_machine_reads_without_raising(tmp_path: Path) -> None:
    platform = LinuxPlatform()
    asyncio.run(platform.refresh())
    facts = platform.read(SensorOptions(tmp_path), OwnUse(), time.monotonic())
    assert facts.total_memory_bytes is None or facts.total_memory_bytes > 0


@pytest.mark.process
def test_a_pi_without_the_sysfs_file_asks_vcgencmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "vcgencmd", "echo throttled=0x50005")
    on_path(monkeypatch, programs)
    platform = linux(tmp_path)
    asyncio.run(platform.refresh())
    assert platform.read(OPTIONS, OwnUse(), 0.0).throttle.detail == "under-voltage, throttled"
    fake_program(programs, "vcgencmd", "echo 'VCHI initialization failed' >&2; exit 255")
    write_tree(tmp_path / "proc", {"stat": stat(110, 990)})
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.throttle.now is Answer.UNKNOWN
    assert "group video" in facts.faults[0].reason
    write_tree(tmp_path / "sys", {"devices/platform/soc/soc:firmware/get_throttled": "0"})
    asyncio.run(platform.refresh())
    assert platform.read(OPTIONS, OwnUse(), 2.0).throttle.now is Answer.NO


@pytest.mark.process
def test_logind_and_network_manager_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(tmp_path, "busctl", 'case "$*" in *IdleHint) echo "b true";; *Metered) echo "u 3";; esac')
    on_path(monkeypatch, tmp_path)
    platform = LinuxPlatform()
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 0.0)
    assert {signal.name: signal.idle for signal in facts.idle_signals}["logind"] is Answer.YES
    assert facts.metered is Answer.YES
    fake_program(tmp_path, "busctl", 'case "$*" in *IdleHint) echo "b false";; esac')
    asyncio.run(platform.refresh())
    hint = next(s for s in platform.read(OPTIONS, OwnUse(), 0.5).idle_signals if s.name == "logind")
    assert hint.idle is Answer.NO and not hint.weak, "it once said yes, so its no means something"
    fake_program(tmp_path, "busctl", "exit 1")
    asyncio.run(platform.refresh())
    assert "logind" in {fault.sensor for fault in platform.read(OPTIONS, OwnUse(), 1.0).faults}, "it fell silent"
    platform = LinuxPlatform()  # no such service: normal on a headless machine
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.metered is Answer.UNKNOWN
    assert not [fault for fault in facts.faults if "bus" in fault.reason or fault.sensor == "logind"]

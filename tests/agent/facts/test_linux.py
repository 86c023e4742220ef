"""Load, pressure, terminals, temperature, throttling, memory on Linux; macOS and Jetson on recorded output."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from agent.facts import Answer, OwnUse, Power, SensorOptions
from agent.facts.idle import CpuLoad, cpu_signal, logind_signal, parse_busctl, parse_pressure, terminal_signal
from agent.facts.jetson import parse_tegrastats, read_tegrastats
from agent.facts.linux import LinuxPlatform
from agent.facts.macos import MacPlatform, parse_hid_idle, parse_pmset_batt, parse_pmset_therm
from agent.facts.platform import run_command
from agent.facts.sysfs import Tree
from agent.facts.thermal import parse_measure_temp, parse_throttled, read_temperature
from tests.agent.trees import MAINS, recorded, supply_tree, write_tree

OPTIONS = SensorOptions(state_dir=Path("/"))


def stat(user: int, idle: int, nice: int = 0) -> str:
    return f"cpu  {user} {nice} 0 {idle} 0 0 0 0 0 0\ncpu0 {user} {nice} 0 {idle} 0 0 0 0 0 0\n"


def test_load_leaves_out_the_own_worker(tmp_path: Path) -> None:
    load, tree = CpuLoad(ticks_per_s=100), Tree(proc=tmp_path)
    write_tree(tmp_path, {"stat": stat(1000, 1000)})
    assert load.sample(tree, 0.0, 0.0) is None
    write_tree(tmp_path, {"stat": stat(1090, 1110)})  # 200 ticks passed, 90 busy
    assert load.sample(tree, 0.8, 1.0) == pytest.approx(5.0)  # 80 of them ours
    write_tree(tmp_path, {"stat": stat(1290, 1110)})
    assert load.sample(tree, 0.8, 1.2) == pytest.approx(5.0)  # too soon for a new figure
    assert load.sample(tree, 0.8, 2.0) == pytest.approx(100.0)


def test_load_survives_a_worker_that_ended(tmp_path: Path) -> None:
    load, tree = CpuLoad(ticks_per_s=100), Tree(proc=tmp_path)
    write_tree(tmp_path, {"stat": stat(1000, 1000)})
    load.sample(tree, 50.0, 0.0)
    write_tree(tmp_path, {"stat": stat(1010, 1090)})
    assert load.sample(tree, 0.0, 1.0) is None


@pytest.mark.parametrize("text", ["", "intr 1 2 3", "cpu  a b c d e f\n"])
def test_unknown_stat_format_is_a_fault(tmp_path: Path, text: str) -> None:
    load, tree = CpuLoad(), Tree(proc=write_tree(tmp_path, {"stat": text}))
    assert load.sample(tree, 0.0, 0.0) is None
    assert [fault.sensor for fault in tree.take_faults()] == ["cpu load"]


def test_voices() -> None:
    assert cpu_signal(None, OPTIONS).idle is Answer.UNKNOWN
    assert cpu_signal(24.0, OPTIONS).idle is Answer.YES
    assert cpu_signal(26.0, OPTIONS).idle is Answer.NO
    assert logind_signal(False).weak
    assert parse_busctl("b true\n") is True
    assert parse_busctl("t 68130403958") == 68130403958
    assert parse_busctl("Failed to connect") is None


def test_pressure() -> None:
    assert parse_pressure("some avg10=1.53 avg60=0.87 avg300=0.10 total=1234\nfull avg10=0.00") == 1.53
    assert parse_pressure("") is None


def test_terminals(tmp_path: Path) -> None:
    tree = Tree(dev=tmp_path)
    assert terminal_signal(tree, OPTIONS, 1000.0).idle is Answer.UNKNOWN
    write_tree(tmp_path, {"pts/0": "", "pts/1": "", "pts/ptmx": ""})
    for name, stamp in (("0", 500), ("1", 990), ("ptmx", 5000)):
        os.utime(tmp_path / "pts" / name, (stamp, stamp))
    assert terminal_signal(tree, OPTIONS, 1000.0).idle is Answer.NO
    assert terminal_signal(tree, OPTIONS, 1060.0).idle is Answer.YES
    assert terminal_signal(tree, OPTIONS, 900.0).idle is Answer.UNKNOWN  # clock set back


def test_temperature_ignores_dead_and_foreign_zones(tmp_path: Path) -> None:
    zones = {"cpu-thermal": 48312, "iwlwifi_1": 90000, "GPU-therm": -256000, "PMIC-Die": 100000, "soc": 51200}
    for number, (kind, value) in enumerate(zones.items()):
        zone = f"class/thermal/thermal_zone{number}"
        write_tree(tmp_path, {f"{zone}/type": kind, f"{zone}/temp": str(value)})
    assert read_temperature(Tree(sys=tmp_path)) == pytest.approx(51.2)


def test_temperature_falls_back_to_hwmon(tmp_path: Path) -> None:
    files = {"hwmon0/name": "coretemp", "hwmon0/temp1_input": "61000", "hwmon0/temp2_input": "59000"}
    files |= {"hwmon1/name": "nvme", "hwmon1/temp1_input": "80000"}
    write_tree(tmp_path / "class/hwmon", files)
    assert read_temperature(Tree(sys=tmp_path)) == pytest.approx(61.0)


def test_nonsense_in_a_zone_is_a_fault(tmp_path: Path) -> None:
    zone = "class/thermal/thermal_zone0"
    tree = Tree(sys=write_tree(tmp_path, {f"{zone}/type": "cpu", f"{zone}/temp": "warm"}))
    assert read_temperature(tree) is None
    assert "expected a number" in tree.take_faults()[0].reason


@pytest.mark.parametrize(
    ("text", "now", "since_boot", "detail"),
    [
        ("throttled=0x0", Answer.NO, Answer.NO, ""),
        ("throttled=0x50000", Answer.NO, Answer.YES, ""),
        ("throttled=0x50005", Answer.YES, Answer.YES, "under-voltage, throttled"),
        ("50008", Answer.YES, Answer.YES, "soft temperature limit"),
    ],
)
def test_throttled_bits(text: str, now: Answer, since_boot: Answer, detail: str) -> None:
    reading = parse_throttled(text)
    assert reading is not None
    assert (reading.now, reading.since_boot, reading.detail) == (now, since_boot, detail)


def test_recorded_vcgencmd() -> None:
    lines = recorded("rpi/vcgencmd_samples.txt").splitlines()
    readings = [parse_throttled(line) for line in lines if line.startswith("throttled=")]
    assert [reading.now for reading in readings if reading] == [Answer.NO, Answer.YES, Answer.NO]
    temperatures = [parse_measure_temp(line) for line in lines if line.startswith("temp=")]
    assert temperatures == [39.2, 38.6, 62.3]


def linux(tmp_path: Path) -> LinuxPlatform:
    proc = {"stat": stat(100, 900), "meminfo": "MemTotal: 948012 kB\nMemAvailable: 512000 kB\n"}
    proc |= {"pressure/memory": "some avg10=3.00 avg60=0 avg300=0 total=1\n"}
    write_tree(tmp_path / "proc", proc)
    supply_tree(tmp_path / "sys", ACAD=MAINS.format(online=1))
    zone = "class/thermal/thermal_zone0"
    write_tree(tmp_path / "sys", {f"{zone}/type": "cpu", f"{zone}/temp": "45000"})
    write_tree(tmp_path / "sys/class/net", {"lo/operstate": "unknown", "eth0/operstate": "up"})
    return LinuxPlatform(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")


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
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.temperature_c is None
    assert facts.available_memory_bytes is None
    assert facts.power is Power.EXTERNAL
    assert {fault.sensor for fault in facts.faults} == {"temperature", "memory"}
    temperature.write_text("46000")
    assert platform.read(OPTIONS, OwnUse(), 2.0).temperature_c == 46.0


def test_this_machine_reads_without_raising(tmp_path: Path) -> None:
    platform = LinuxPlatform()
    asyncio.run(platform.refresh())
    facts = platform.read(SensorOptions(tmp_path), OwnUse(), time.monotonic())
    assert facts.total_memory_bytes is None or facts.total_memory_bytes > 0


def test_a_command_that_hangs_or_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.facts.platform.COMMAND_TIMEOUT_S", 0.05)
    with pytest.raises(OSError, match="no answer within"):
        asyncio.run(run_command("sleep", "10"))
    monkeypatch.undo()
    with pytest.raises(OSError, match="exit status 1"):
        asyncio.run(run_command("false"))
    with pytest.raises(OSError):
        asyncio.run(run_command(str(tmp_path / "absent")))


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


def test_recorded_tegrastats_single_lines() -> None:
    lines = [line for line in recorded("tegrastats/single_lines.txt").splitlines() if " RAM " in f" {line}"]
    parsed = [parse_tegrastats(line) for line in lines if not line.startswith("#")]
    assert len(parsed) >= 6
    assert all(line.hottest_c is not None and 25 < line.hottest_c < 100 for line in parsed)
    assert all(line.total_memory_bytes for line in parsed)
    assert parsed[0].hottest_c == 65.562
    assert parsed[1].hottest_c == 44.562  # absent zones read -256
    assert "cv0" not in parsed[1].zones_c
    assert parsed[2].hottest_c == 42.5  # PMIC@50C is a constant


@pytest.mark.parametrize(
    "name", ["agx_orin_l4t35_36_llm_then_idle.log", "xavier_nx_burn.log", "jetson_nano_pom5v_training.log"]
)
def test_recorded_tegrastats_logs(name: str) -> None:
    lines = [line for line in recorded(f"tegrastats/{name}").splitlines() if "RAM " in line]
    temperatures = [parse_tegrastats(line).hottest_c for line in lines]
    assert all(value is not None and 15 < value < 90 for value in temperatures)


def test_tegrastats_program_is_read_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "tegrastats"
    program.write_text("#!/bin/sh\nwhile :; do echo 'RAM 775/7620MB cpu@48.468C tj@49.156C'; sleep 0.01; done\n")
    program.chmod(0o755)
    assert asyncio.run(read_tegrastats(str(program))) == 49.156


# --- whole platforms whose commands are stood in for by programs that print recorded output


def fake_program(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def on_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_a_mac_from_command_to_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path)
    battery = "Now drawing from 'Battery Power'\\n -InternalBattery-0 (id=1) 94%%; discharging; 7:08 remaining"
    therm = "CPU_Speed_Limit = 50"
    fake_program(tmp_path, "pmset", f'[ "$2" = batt ] && printf "{battery}" || echo "{therm}"')
    fake_program(tmp_path, "ioreg", "echo '\"HIDIdleTime\" = 12000000000'")
    platform = MacPlatform()
    assert platform.read(OPTIONS, OwnUse(), 0.0).power is Power.UNKNOWN  # nobody was asked yet
    before = platform.tripwire()
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert (facts.power, facts.battery_percent) == (Power.BATTERY, 94)
    assert facts.throttle.now is Answer.YES
    assert {signal.name: signal.idle for signal in facts.idle_signals}["input"] is Answer.NO
    assert platform.tripwire() != before
    assert facts.faults == () and facts.total_memory_bytes
    fake_program(tmp_path, "pmset", "exit 3")
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 2.0)
    assert facts.power is Power.UNKNOWN
    assert {fault.sensor for fault in facts.faults} == {"power", "throttling"}


def test_a_pi_without_the_sysfs_file_asks_vcgencmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "vcgencmd", "echo throttled=0x50005")
    on_path(monkeypatch, programs)
    platform = linux(tmp_path)
    asyncio.run(platform.refresh())
    assert platform.read(OPTIONS, OwnUse(), 0.0).throttle.detail == "under-voltage, throttled"
    fake_program(programs, "vcgencmd", "echo 'VCHI initialization failed' >&2; exit 255")
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.throttle.now is Answer.UNKNOWN
    assert "group video" in facts.faults[0].reason
    write_tree(tmp_path / "sys", {"devices/platform/soc/soc:firmware/get_throttled": "0"})
    asyncio.run(platform.refresh())
    assert platform.read(OPTIONS, OwnUse(), 2.0).throttle.now is Answer.NO


def test_logind_and_network_manager_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(tmp_path, "busctl", 'case "$*" in *IdleHint) echo "b true";; *Metered) echo "u 3";; esac')
    on_path(monkeypatch, tmp_path)
    platform = LinuxPlatform()
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 0.0)
    assert {signal.name: signal.idle for signal in facts.idle_signals}["logind"] is Answer.YES
    assert facts.metered is Answer.YES
    fake_program(tmp_path, "busctl", "exit 1")  # no such service: normal on a headless machine
    asyncio.run(platform.refresh())
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert facts.metered is Answer.UNKNOWN
    assert not [fault for fault in facts.faults if "bus" in fault.reason]

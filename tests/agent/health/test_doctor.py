"""The doctor: each finding that needs attention says how to cure it."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.facts import Answer, IdleSignal
from port_agent.facts.linux import LinuxPlatform
from port_agent.guard import GuardProbe
from port_agent.health.doctor import (
    Check,
    Verdict,
    check_cores,
    check_device,
    check_energy,
    check_guard,
    check_idle_signals,
    check_power_mode,
    check_sleep,
    check_torch,
    check_torch_parts,
    examine,
)
from port_agent.policy.config import AgentOptions, Config
from port_agent.policy.decide import Policy
from port_planner.ir.arithmetic import FLOAT32_INSTEAD
from tests.agent.energy.device_trees import ORIN_NANO, hwmon
from tests.agent.facts.cores import ORIN_NANO as ORIN_NANO_CORES
from tests.agent.facts.cores import PI_5, RK3588, machine
from tests.agent.facts.machines import fake_program, linux, on_path
from tests.agent.trees import LAPTOP_BATTERY, supply_tree, write_tree
from tests.house import ROOT
from tests.simulated_device import installed

GUARD = GuardProbe(trouble="", moves_pages=True, page_bytes=4096, max_mappings=65530, seccomp=False, userfaultfd=False)
TORCH: dict[str, Any] = {"version": "2.13.0", "parts": 3, "missing": [], "bfloat16": None}
GROUPS = {"self/cgroup": "0::/port-agent.service/supervisor\n"}


def findings(state: Path, options: AgentOptions, *, flash_test: bool = False) -> dict[str, Check]:
    return {check.name: check for check in examine(state, Config(options=options), flash_test=flash_test)}


@pytest.fixture(autouse=True)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is looked into by one test alone: each look is a process that imports it."""
    if "really" not in request.node.name:
        monkeypatch.setattr("port_agent.health.doctor._torch_itself", lambda: check_torch(TORCH))
        monkeypatch.setattr("port_agent.health.doctor.probe_guard", lambda _: GUARD)


@pytest.fixture
def options(tmp_path: Path) -> AgentOptions:
    """A healthy device: power, heat, memory, a delegated control group."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    mounts = {"self/mounts": f"cgroup2 {cgroup} cgroup2 rw 0 0\n"}
    numbers = {"meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"}
    quiet = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    pressure = {f"pressure/{what}": quiet for what in ("cpu", "io", "memory")}
    write_tree(proc, GROUPS | mounts | numbers | pressure)
    (proc / "stat").symlink_to("/proc/stat")  # counters that run
    write_tree(cgroup / "port-agent.service", {"cgroup.controllers": "memory cpu", "cgroup.subtree_control": ""})
    (tmp_path / "dev/pts").mkdir(parents=True)
    supply_tree(tmp_path / "sys", BAT0=LAPTOP_BATTERY.format(status="Charging", capacity=50))
    write_tree(tmp_path / "sys/class/thermal/thermal_zone0", {"type": "cpu", "temp": "44000"})
    return replace(AgentOptions(), sysfs_root=tmp_path / "sys", proc_root=proc, dev_root=tmp_path / "dev")


@pytest.mark.process
def test_what_nothing_tells_has_no_tick(tmp_path: Path, options: AgentOptions) -> None:
    ticked = [check for check in findings(tmp_path, options).values() if check.verdict is Verdict.GOOD]
    assert not [check for check in ticked if check.finding.startswith("unknown")]
    assert findings(tmp_path, options)["throttling"].verdict is Verdict.NOTE


@pytest.mark.process
def test_a_healthy_device(tmp_path: Path, options: AgentOptions) -> None:
    found = findings(tmp_path, options, flash_test=True)
    assert [check.finding for check in found.values() if check.verdict is Verdict.BAD and check.name != "torch"] == []
    assert found["temperature"].finding == "44.0 °C"
    assert "battery 50 %" in found["power"].finding
    assert "fsync" in found["flash speed"].finding
    assert not (tmp_path / ".doctor-flash").exists()
    assert "delegated" in found["memory limits"].finding


@pytest.mark.process
def test_links_and_files_that_others_put_there_are_left_alone(tmp_path: Path, options: AgentOptions) -> None:
    write_tree(tmp_path, {"victim": "kept", "state/mine": "kept"})
    for name in (".doctor", ".doctor-flash", ".port-flash-test"):
        (tmp_path / "state" / name).symlink_to(tmp_path / "victim")
    before = {path: path.lstat().st_mtime_ns for path in (tmp_path / "state").iterdir()}
    found = findings(tmp_path / "state", options, flash_test=True)
    assert found["flash speed"].verdict is Verdict.GOOD and found["state directory"].verdict is Verdict.GOOD
    assert (tmp_path / "victim").read_text() == "kept"
    assert {path: path.lstat().st_mtime_ns for path in (tmp_path / "state").iterdir()} == before


@pytest.mark.root
def test_root_looks_with_the_rights_of_the_owner(tmp_path: Path, options: AgentOptions) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to have others' directories")
    state = tmp_path / "state"
    state.mkdir(mode=0o500)
    os.chown(state, 65534, 65534)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    found = findings(state, options, flash_test=True)  # root itself could write there
    assert [found[name].verdict for name in ("state directory", "flash speed")] == [Verdict.BAD, Verdict.BAD]
    assert "Permission denied" in found["state directory"].finding
    (tmp_path / "mine").write_text("")
    assert (tmp_path / "mine").stat().st_uid == 0  # and is root again


@pytest.mark.process
def test_everything_that_is_bad_has_a_cure(tmp_path: Path, options: AgentOptions) -> None:
    supply_tree(tmp_path / "sys", BAT0=LAPTOP_BATTERY.format(status="Unknown", capacity=50))
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("warm")
    (tmp_path / "cgroup/port-agent.service/cgroup.controllers").write_text("hugetlb")
    (tmp_path / "file").write_text("")
    found = findings(tmp_path / "file", options, flash_test=True)
    bad = {name for name, check in found.items() if check.verdict is Verdict.BAD}
    assert {"power", "state directory", "flash speed", "memory limits"} <= bad
    assert any(name.startswith("sensor temperature") for name in bad)
    assert all(check.cure for check in found.values() if check.verdict is Verdict.BAD)
    assert "assume_power" in found["power"].cure
    assert "cgroup_enable=memory" in found["memory limits"].cure


@pytest.mark.process
def test_before_the_first_start_there_is_no_state_directory(tmp_path: Path, options: AgentOptions) -> None:
    found = findings(tmp_path / "not/yet", options, flash_test=True)
    assert "does not exist yet" in found["state directory"].finding and "--state-dir" in found["state directory"].cure
    assert found["state directory"].verdict is Verdict.NOTE
    assert not any(name.startswith(("sensor", "flash")) for name in found)
    assert not (tmp_path / "not").exists()


def test_one_voice_that_answers_is_enough() -> None:
    silent = IdleSignal("load", Answer.UNKNOWN, "one reading so far")
    known = list(check_idle_signals((silent, IdleSignal("pressure", Answer.YES, "cpu 0 %"))))
    assert [check.verdict for check in known] == [Verdict.NOTE, Verdict.GOOD]
    (nothing,) = check_idle_signals((silent,))
    assert nothing.verdict is Verdict.BAD and "one reading so far" in nothing.finding and "idle_for = 0" in nothing.cure


@pytest.mark.process
def test_no_control_groups_at_all(tmp_path: Path, options: AgentOptions) -> None:
    (tmp_path / "proc/self/mounts").write_text("cgroup /x cgroup rw 0 0\n")
    assert "no cgroup v2" in findings(tmp_path, options)["memory limits"].finding


@pytest.mark.process
def test_a_gpu_is_told_with_its_memory_and_who_counts_it(
    tmp_path: Path, options: AgentOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [name for name in findings(tmp_path, options) if name.startswith("GPU")]
    for name, value in installed(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_tree(tmp_path / "dev", {"nvhost-gpu": ""})
    found = findings(tmp_path, options)
    sim = found["GPU: sim"]
    assert sim.verdict is Verdict.GOOD and "sim, has memory of its own (--gpu-ram)" in sim.finding
    assert "take 3.0 MiB" in sim.finding and "operators repeat to the bit" in sim.finding
    if not torch_has_cuda():
        assert found["GPU: cuda"].verdict is Verdict.BAD and "cannot use it" in found["GPU: cuda"].finding


def torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_memory_that_no_count_sees_is_said_to_be_bounded_by_the_plan() -> None:
    report = {
        "kind": "cuda",
        "name": "Orin",
        "unified": True,
        "outside_bytes": 667 << 20,
        "reordered": 33,
        "seen_by": {"resident memory": 0, "control group": 64 << 20},
        "enforced": {"a limit of torch's allocator": "refuses more", "RLIMIT_DATA": "allows more"},
        "bounded": True,
    }
    check = check_device(report)
    detail = check.finding
    assert "Orin, shares the host's memory (--ram covers both)" in detail and "resident memory do not count" in detail
    assert "plans limit it; tested: a limit of torch's allocator refuses more, RLIMIT_DATA allows more; " in detail
    assert check.verdict is Verdict.GOOD and "33 operators do not repeat" in detail
    assert check_device({**report, "bounded": False}).verdict is Verdict.BAD, "nothing would stop a step there"


def test_a_jetson_says_what_its_gpu_draws_and_in_which_power_mode(tmp_path: Path) -> None:
    assert list(check_power_mode(tmp_path)) == []
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    write_tree(
        tmp_path,
        {"var/lib/nvpmodel/status": "pmode:0001\n", "etc/nvpmodel.conf": "< POWER_MODEL ID=1 NAME=7W >\n"},
    )
    found = {check.name: check for check in check_energy(Config(), tmp_path)}
    rail = found["energy: ina3221"]
    assert rail.verdict is Verdict.GOOD and "of it 0.52 W on VDD_CPU_GPU_CV, which feeds the GPU" in rail.finding
    (mode,) = check_power_mode(tmp_path)
    assert mode.finding.startswith("7W; ")


def test_kinds_of_cores_are_named(tmp_path: Path) -> None:
    assert list(check_cores(tmp_path)) == []
    machine(tmp_path / "pi", PI_5)
    machine(tmp_path / "rock", RK3588)
    assert [check.finding for check in check_cores(tmp_path / "pi")] == ["4 x Cortex-A76 at 2.4 GHz"]
    (cores,) = check_cores(tmp_path / "rock")
    assert cores.finding.endswith("4 x Cortex-A55 at 1.8 GHz; `plan` measures the 4 fastest alone, too")


def test_the_pages_for_a_pi_and_an_orin_quote_what_is_printed_there(tmp_path: Path) -> None:
    """Each quoted line is the finding, parts left out by "..."."""
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    status = {"var/lib/nvpmodel/status": "pmode:0000\n", "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n"}
    write_tree(tmp_path, status)
    machine(tmp_path / "pi", PI_5)
    machine(tmp_path / "orin", ORIN_NANO_CORES)
    energy = next(check for check in check_energy(Config(), tmp_path) if check.name == "energy: ina3221")
    page = (ROOT / "deploy/README.md").read_text().splitlines()
    for check in (*check_cores(tmp_path / "pi"), *check_cores(tmp_path / "orin"), energy, *check_power_mode(tmp_path)):
        lines = [line.strip().removeprefix(f"✓ {check.name}: ") for line in page if f"✓ {check.name}: " in line]
        assert any(all(part in check.finding for part in line.split("...")) for line in lines), (check, lines)
    assert sum(FLOAT32_INSTEAD in line for line in page) == 2


@pytest.mark.process
def test_the_private_parts_of_torch_are_really_there(tmp_path: Path, options: AgentOptions) -> None:
    found = findings(tmp_path, options)["torch's private parts"]
    assert found.verdict is Verdict.GOOD and re.fullmatch(r"all \d+ that are used are unchanged", found.finding)


def test_a_torch_that_lacks_a_private_part_is_named_with_what_that_breaks() -> None:
    part = {"name": "torch.Tensor._version", "trouble": "AttributeError: gone", "breaks": "saved tensors are mixed up"}
    found = check_torch_parts({"version": "2.16.0", "parts": 41, "missing": [part]})
    assert found.verdict is Verdict.BAD and "<2.16" in found.cure
    assert found.finding == (
        "torch 2.16.0 lacks torch.Tensor._version (AttributeError: gone), without it: saved tensors are mixed up"
    )


def test_bfloat16_in_software_is_told_with_what_it_costs_and_what_to_do() -> None:
    cost = "this processor multiplies bfloat16 in software, at 1/10 of its speed in float32"
    (_,) = check_torch(TORCH)
    _, told = check_torch({**TORCH, "bfloat16": cost})
    assert told == Check("bfloat16", Verdict.NOTE, cost, FLOAT32_INSTEAD)


def test_guarded_memory_is_judged_by_its_trial() -> None:
    works = check_guard(GUARD)
    assert works.verdict is Verdict.GOOD and works.finding.startswith("works; pages move, of 4 KiB") and not works.cure
    few = check_guard(replace(GUARD, max_mappings=4096))
    assert few.verdict is Verdict.NOTE and "4096" in few.finding and few.cure == "sysctl vm.max_map_count=65530"
    killed = check_guard(replace(GUARD, trouble="the test was killed by SIGSYS"))
    assert killed.verdict is Verdict.NOTE and "SIGSYS" in killed.finding and "--guard-only" in killed.cure
    filtered = check_guard(replace(GUARD, seccomp=True, moves_pages=False, page_bytes=16384))
    assert "seccomp" in filtered.finding and "taken fresh" in filtered.finding and "16 KiB" in filtered.finding


@pytest.mark.process
def test_whether_sleep_can_be_held_off_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "when.keep_awake" in check_sleep(linux(tmp_path), Policy(keep_awake=False)).finding
    assert "systemd-inhibit does not exist" in check_sleep(linux(tmp_path), Policy()).finding
    on_path(monkeypatch, tmp_path)
    for script, verdict in (("exit 0", Verdict.GOOD), ("echo Access denied >&2; exit 1", Verdict.NOTE)):
        fake_program(tmp_path, "systemd-inhibit", script)
        check = check_sleep(LinuxPlatform(), Policy())
        assert check.verdict is verdict and ("polkitd" in check.cure) is (verdict is Verdict.NOTE)

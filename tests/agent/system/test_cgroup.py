"""Control groups on a tree of plain files; the kernel's own behaviour is tested in a virtual machine."""

import os
from pathlib import Path

import pytest

from port_agent.system.cgroup import (
    CgroupError,
    MemoryEvents,
    WorkerGroup,
    WorkerLimits,
    delegated_tree,
    system_oom_kills,
)
from tests.agent.trees import write_tree

MIB = 1 << 20


WORKER_FILES = {
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "cpu.weight": "100",
    "cpu.max": "max 100000",
    "pids.max": "max",
}


def group(root: Path) -> WorkerGroup:
    return WorkerGroup(write_tree(root, WORKER_FILES))


def test_limits_are_written_and_missing_ones_named(tmp_path: Path) -> None:
    worker = group(tmp_path)
    missing = worker.configure(WorkerLimits(300 * MIB, cpu_percent=50.0))
    assert missing == ("io.weight",)
    assert (tmp_path / "memory.max").read_text() == str(300 * MIB)
    assert (tmp_path / "memory.swap.max").read_text()[0] == "0"
    assert (tmp_path / "cpu.max").read_text() == f"{int(50_000 * (os.cpu_count() or 1))} 100000"


def test_without_a_memory_limit_a_worker_is_refused(tmp_path: Path) -> None:
    worker = group(tmp_path)
    (tmp_path / "memory.max").unlink()
    with pytest.raises(CgroupError, match=r"memory\.max"):
        worker.configure(WorkerLimits(300 * MIB))


def test_a_pi_as_it_is_delivered_keeps_the_limits_that_its_kernel_has(tmp_path: Path) -> None:
    """Without a memory controller processor, I/O and the number of processes are limited all the same."""
    proc, base = hierarchy(tmp_path, "/system.slice/port-agent.service", f"{os.getpid()}\n", "cpu io pids")
    write_tree(base, {"supervisor/cgroup.procs": ""})
    tree = delegated_tree(proc)
    assert "the memory controller is not available" in tree.without_memory
    there = WorkerGroup(tmp_path / "worker", limits_memory=False)
    write_tree(there.path, {"cpu.weight": "100", "cpu.max": "max 100000", "io.weight": "", "pids.max": "max"})
    assert there.configure(WorkerLimits(300 * MIB, cpu_percent=50.0)) == (
        "memory.max",
        "memory.swap.max",
        "memory.oom.group",
    )
    assert (there.path / "cpu.weight").read_text()[0] == "1" and (there.path / "pids.max").read_text() == "256"
    assert not tree.worker(7, WorkerLimits(300 * MIB))[0].limits_memory


def test_memory_events_are_read(tmp_path: Path) -> None:
    text = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 1\noom_group_kill 0\n"
    worker = WorkerGroup(write_tree(tmp_path, {"memory.events": text, "cpu.stat": "usage_usec 2500000\nuser_usec 1\n"}))
    assert worker.memory_events() == MemoryEvents(oom=2, oom_kill=1)
    assert worker.cpu_s() == 2.5
    assert WorkerGroup(tmp_path / "gone").memory_events() == MemoryEvents()
    assert WorkerGroup(tmp_path / "gone").cpu_s() is None


def hierarchy(tmp_path: Path, own: str, procs: str, controllers: str = "cpu io memory pids") -> tuple[Path, Path]:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    files = {"self/cgroup": f"0::{own}\n", "self/mounts": f"cgroup2 {mount} cgroup2 rw 0 0\n"}
    write_tree(proc, files)
    base = mount / own.strip("/").removesuffix("supervisor")
    write_tree(base, {"cgroup.controllers": controllers, "cgroup.subtree_control": "", "cgroup.procs": procs})
    return proc, base


def test_the_agent_moves_itself_into_a_leaf(tmp_path: Path) -> None:
    proc, base = hierarchy(tmp_path, "/system.slice/port-agent.service", f"{os.getpid()}\n")
    write_tree(base, {"supervisor/cgroup.procs": ""})
    tree = delegated_tree(proc)
    assert tree.base == base
    assert (base / "supervisor/cgroup.procs").read_text() == str(os.getpid())
    assert (base / "cgroup.subtree_control").read_text().startswith("+")


def test_a_subgroup_made_by_systemd_is_left_as_it_is(tmp_path: Path) -> None:
    proc, base = hierarchy(tmp_path, "/system.slice/port-agent.service/supervisor", "")
    assert delegated_tree(proc).base == base


@pytest.mark.parametrize(
    ("own", "procs", "controllers", "words"),
    [
        ("/user.slice", "1\n2\n", "cpu memory", "shared with 2 other processes"),
        ("/", "", "hugetlb", "memory controller is not available"),
    ],
)
def test_a_tree_that_is_not_ours_is_refused(tmp_path: Path, own: str, procs: str, controllers: str, words: str) -> None:
    proc, _ = hierarchy(tmp_path, own, procs, controllers)
    with pytest.raises(CgroupError, match=words):
        delegated_tree(proc)


def test_without_cgroup_v2_the_reason_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"self/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw 0 0\n"})
    with pytest.raises(CgroupError, match="no cgroup v2"):
        delegated_tree(tmp_path)


def test_kills_for_memory_on_the_whole_machine(tmp_path: Path) -> None:
    assert system_oom_kills(write_tree(tmp_path, {"vmstat": "nr_free_pages 1\noom_kill 7\n"})) == 7
    assert system_oom_kills(tmp_path / "nowhere") is None

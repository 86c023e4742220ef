"""`make check-arm`: an emulated machine with a Cortex-A76, pages of 16 KiB and systemd, as a Raspberry Pi 5 has them.

Slow: its floating point is emulated at some 30 MFLOP/s. One machine serves all tests but the last, in their order.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd import training
from tests.systemd.host import check, show, wait_for
from tests.systemd.machine import ARM_CACHE, PI_5, Machine, data_disk, overlay

pytestmark = [pytest.mark.long, pytest.mark.root]

SUITE = "arm64-16k"
RAM_MIB = 3072
INSTALL_S, IMPORT_S = 2400.0, 1800.0
"""Of unpacking and compiling a version, and of a program that imports torch: two minutes and half a
minute on a quiet machine.
"""
AS_DELIVERED = "cgroup_disable=memory psi=0"
"""What the firmware of a Raspberry Pi puts on the kernel's command line."""
TESTS = (
    "tests/agent/malloc/test_allocator.py tests/agent/system/test_memory_limit.py tests/agent/guard tests/planner/base"
)
PYTHON = "cd /work && PYTHONPATH=/work:/work/agent:/work/planner:$(echo /opt/port-agent/runtimes/cp*) OMP_NUM_THREADS=1 nice python3"


@pytest.fixture(scope="module")
def disks(root_only: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the read-only disks: torch and the other dependencies, and the package beside the source."""
    needed = ("qemu", "root", "runtime", "source", "kernel", "disk")
    missing = [name for name in needed if not (ARM_CACHE / f"{name}.stamp").exists()]
    if missing:
        pytest.skip(f"`make check-arm` builds what is missing here: {', '.join(missing)}")
    content = tmp_path_factory.mktemp("content")
    for package in (ARM_CACHE / "package").glob("*.deb"):
        shutil.copy(package, content)
    shutil.copytree(ARM_CACHE / "source", content / "work", symlinks=True)
    return ARM_CACHE / "runtime.ext4", data_disk(content, tmp_path_factory.mktemp("disk") / "packages.img", "256M")


def start(disks: tuple[Path, Path], folder: Path, boot_options: str = "") -> Machine:
    """Return a machine that was just switched on."""
    disk = overlay(SUITE, folder / "root.qcow2", ARM_CACHE)
    return Machine(SUITE, disk, read_only=disks, ram_mib=RAM_MIB, board=PI_5, boot_options=boot_options)


@pytest.fixture(scope="module")
def machine(disks: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Return a machine whose kernel limits memory, with the source where it can be written to."""
    with start(disks, tmp_path_factory.mktemp("machine")) as booted:
        check(booted, "mkdir -p /work && cp -r /mnt/packages/work/. /work")  # where emulation mounts it, it is there
        yield booted


def test_its_pages_are_of_16_kib(machine: Machine) -> None:
    assert check(machine, "getconf PAGESIZE; uname -m").split() == ["16384", "aarch64"]


def test_allocator_pages_and_the_belt_hold(machine: Machine) -> None:
    select = '-m "not long and not slow and not root and not attack and not process"'
    command = f"{PYTHON} -m pytest -p no:cacheprovider -q --tb=short -o addopts=--strict-markers {select} {TESTS}"
    assert " passed" in check(machine, command, IMPORT_S).splitlines()[-1]


def test_guarded_memory_holds_programs_to_their_limit(machine: Machine) -> None:
    """By faults of this kernel's pages; an emulator of user programs alone has none, and `exec` does without there."""
    programs = '-k "followed and (kept and written or forked or directly)"'
    command = f"{PYTHON} -m pytest -p no:cacheprovider -q --tb=short -o addopts=--strict-markers {programs} tests/agent/guard/test_memory.py"
    assert "3 passed" in check(machine, command, IMPORT_S).splitlines()[-1]


def test_a_followed_program_has_plain_pytorchs_numbers(machine: Machine) -> None:
    check(machine, f"{PYTHON} deploy/arm/against_plain.py exec", IMPORT_S)


def test_weights_that_are_mapped_from_a_file_are_guarded(machine: Machine) -> None:
    check(machine, f"{PYTHON} deploy/arm/against_plain.py mapped", IMPORT_S)


def test_a_budget_is_a_memory_group(machine: Machine) -> None:
    """Rounded to pages as the kernel rounds it, a limit is believed; with pages of 4 KiB
    taken for granted it was not.
    """
    program = "from port_agent.system.memory_limit import scope_command as s; print(*(len(s(n << 20)) for n in (512, 1024, 2048)))"
    assert "0" not in check(machine, f"{PYTHON} -c '{program}'", IMPORT_S).split()


def test_the_package_runs_under_systemd_and_trains(machine: Machine) -> None:
    check(machine, "dpkg -i /mnt/packages/port-agent_*_arm64.deb", INSTALL_S)
    training.configure(machine)
    check(machine, "systemctl restart port-agent", IMPORT_S)
    assert show(machine, "ActiveState") == "active"
    assert check(machine, f"cat /sys/fs/cgroup{show(machine, 'ControlGroup')}/memory.max").isdigit()
    plan = "plan tests/systemd/tiny_job.py --ram 450M --strategy greedy --page-dir /var/tmp -o /tmp/tiny.port"
    check(machine, f"{PYTHON} -m port_agent.cli {plan}", IMPORT_S)
    alone = "train /tmp/tiny.port --steps 20 --out /tmp/alone.safetensors --state-dir /tmp/alone --checkpoint-every 20"
    check(machine, f"{PYTHON} -m port_agent.cli {alone}", IMPORT_S)
    training.submit(machine, "/tmp/tiny.port", "--steps", "20", "--checkpoint-every", "20")
    training.wait_for_job(machine, "state", "== 'finished'", IMPORT_S)
    assert training.trained_weights(machine) == check(machine, "sha256sum /tmp/alone.safetensors").split()[0]


def test_that_bundle_has_plain_pytorchs_numbers(machine: Machine) -> None:
    check(machine, f"{PYTHON} deploy/arm/against_plain.py bundle /tmp/tiny.port", IMPORT_S)


def test_as_delivered_it_keeps_the_other_limits_and_says_what_is_missing(
    disks: tuple[Path, Path], tmp_path: Path
) -> None:
    with start(disks, tmp_path, AS_DELIVERED) as delivered:
        assert "memory" not in check(delivered, "cat /sys/fs/cgroup/cgroup.controllers").split()
        training.configure(delivered)
        check(delivered, "dpkg -i /mnt/packages/port-agent_*_arm64.deb", INSTALL_S)
        wait_for(delivered, "systemctl is-active --quiet port-agent", IMPORT_S)
        group = f"/sys/fs/cgroup{show(delivered, 'ControlGroup')}"
        assert {"cpu", "io", "pids"} <= set(check(delivered, f"cat {group}/cgroup.controllers").split())
        assert "no-memory-limit" in [item["code"] for item in training.status(delivered)["health"]]
        told = delivered.run("port-agent doctor --no-flash", IMPORT_S).out
        assert "cgroup_enable=memory" in told, told

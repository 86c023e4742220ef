"""`make check-systemd`: the package in emulated machines with systemd 257 and 252, cgroup v2 and a plug to pull.

Slow (software emulation; importing torch takes half a minute in there), so tests start from snapshots: `installed`
(the agent is ready, nothing to do) and `training` (a worker is some steps into its job).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.systemd import packages, training
from tests.systemd.conftest import PackageBuilder
from tests.systemd.host import check, show, wait_for
from tests.systemd.machine import BOOT_S, CACHE, Machine, data_disk, overlay

pytestmark = [pytest.mark.long, pytest.mark.root]

SUITES = {"trixie": 257, "bookworm": 252}
STEPS = 300
CHECKPOINT_EVERY = 20
INSTALL_S = 1200.0
"""Unpacking and compiling a version, and two starts of the service: two minutes on a quiet machine."""
IMPORT_S = 900.0
"""A worker's way from its start to its first step: 40 s on a quiet machine, and a busy one is ten times as slow."""
FINISH_S = 1200.0
"""The same for the whole job."""
NO_WORKER = "! pgrep -f '[p]ort_agent.training.worker' >/dev/null"
INHIBITORS = "busctl call org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager ListInhibitors"
PERSON = """
[when]
idle_for = "5s"
min_pause = "1s"
busy_cpu = 100
busy_cores = 1000
busy_pressure = 100
"""
"""The sensors are the machine's own; in software emulation everything else of it looks busy."""
HELD_OFF = f'{INHIBITORS} | grep -q \'"sleep" "PORT agent"\''
SLEEP_S = 20
SLEPT = "python3 -c 'import sys, time; sys.exit(time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() < 5)'"
VERSIONS = "/usr/lib/port-agent/port-agent-versions"


@dataclass(frozen=True, slots=True)
class MeasurementWorker:
    """A prepared disk with snapshots of one suite."""

    suite: str
    disk: Path
    read_only: tuple[Path, ...]

    def start(self, snapshot: str | None) -> Machine:
        """Return a machine that goes on from a snapshot, or boots from its disk as it is."""
        return Machine(self.suite, self.disk, read_only=self.read_only, snapshot=snapshot)


@pytest.fixture(scope="session")
def images(root_only: None) -> Path:
    """Return the cache with qemu, disks and dependencies."""
    needed = ["qemu", "runtime", *(f"disk-{suite}" for suite in SUITES)]
    missing = [name for name in needed if not (CACHE / f"{name}.stamp").exists()]
    if missing:
        pytest.skip(f"`make check-systemd` builds what is missing here: {', '.join(missing)}")
    return CACHE


@pytest.fixture(scope="session")
def content(images: Path, package: PackageBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a disk with the packages and the job."""
    deb = package()
    package(".post1")
    package(".post2", dies_at_start=True)
    training.make_bundle(deb.parent)
    return data_disk(deb.parent, tmp_path_factory.mktemp("content") / "packages.img", "64M")


@pytest.fixture(scope="module", params=list(SUITES))
def bench(
    request: pytest.FixtureRequest, images: Path, content: Path, tmp_path_factory: pytest.TempPathFactory
) -> MeasurementWorker:
    """Return a disk with both snapshots, made by booting, installing and submitting once."""
    suite = request.param
    made = MeasurementWorker(
        suite, overlay(suite, tmp_path_factory.mktemp(suite) / "root.qcow2"), (images / "runtime.ext4", content)
    )
    with made.start(None) as machine:
        prepare(machine, SUITES[suite])
        machine.save("installed")
        options = ["--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        training.submit(machine, "/mnt/packages/tiny.port", *options)
        training.wait_for_job(machine, "step", ">= 20", IMPORT_S)
        machine.save("training")
    return made


def prepare(machine: Machine, systemd: int) -> None:
    """Install the package with a policy that trains at once, and start it by hand."""
    assert check(machine, "systemctl --version").startswith(f"systemd {systemd}")
    training.configure(machine)
    check(machine, f"PORT_PYTHON=/usr/bin/python3.11 dpkg -i {deb_path()}", INSTALL_S)
    check(machine, "systemctl stop port-agent")
    check(machine, "systemctl start port-agent")


def deb_path(suffix: str = "") -> str:
    """Return where the machine finds the package of a version."""
    return f"/mnt/packages/port-agent_{packages.checkout_version()}{suffix}_*.deb"


@pytest.fixture
def installed(bench: MeasurementWorker) -> Iterator[Machine]:
    """Return a machine where the agent runs and has nothing to do."""
    with bench.start("installed") as machine:
        yield machine


@pytest.fixture
def busy(bench: MeasurementWorker) -> Iterator[Machine]:
    """Return a machine where a worker is in the middle of its job."""
    with bench.start("training") as machine:
        yield machine


@pytest.fixture(scope="module")
def undisturbed(bench: MeasurementWorker) -> str:
    """Return the checksum of the weights that the job gives when nobody interferes."""
    with bench.start("training") as machine:
        training.wait_for_job(machine, "state", "== 'finished'", FINISH_S)
        return training.trained_weights(machine)


def test_unit_runs_hardened_in_its_own_delegated_group(installed: Machine) -> None:
    assert show(installed, "ActiveState") == "active"
    assert show(installed, "StatusText") != ""
    check(installed, "systemd-analyze security --threshold=21 --no-pager port-agent")
    warnings = check(installed, "journalctl -b -p warning --no-pager -o cat _PID=1 | grep -i port-agent || true")
    assert warnings == "", "this systemd has something to say about the unit"
    group = "/sys/fs/cgroup" + show(installed, "ControlGroup")
    assert check(installed, f"cat {group}/supervisor/cgroup.procs") == show(installed, "MainPID")
    assert "memory" in check(installed, f"cat {group}/cgroup.subtree_control")
    assert check(installed, f"cat {group}/memory.max").isdigit()
    codes = [item["code"] for item in training.status(installed)["health"]]
    assert "no-memory-limit" not in codes


def test_unplugged_job_pauses_goes_on_and_ends_as_if_undisturbed(busy: Machine, undisturbed: str) -> None:
    training.plug(busy, inserted=False)
    wait_for(busy, NO_WORKER, 60)
    state = training.status(busy)
    assert any("on battery" in reason for reason in state["reasons"]), state["reasons"]
    stopped_at = training.job(busy)["step"]
    assert 20 <= stopped_at < STEPS
    training.plug(busy, inserted=True)
    training.wait_for_job(busy, "step", f"> {stopped_at}", IMPORT_S)
    training.wait_for_job(busy, "state", "== 'finished'", FINISH_S)
    assert training.trained_weights(busy) == undisturbed


def test_a_person_at_the_console_pauses_it_and_leaving_lets_it_go_on(busy: Machine) -> None:
    """With all that is real: keyboard, console, logind, its inhibitors; the machine has no battery."""
    check(busy, "useradd --create-home --groups port-agent ann && passwd -d ann && systemctl start getty@tty1")
    train_by_its_own_sensors(busy)
    assert "held off" in training.status(busy)["sleep"]
    busy.type("ann\n")
    wait_for(busy, NO_WORKER, 60)
    state = training.status(busy)
    assert any("in use" in reason for reason in state["reasons"]), state["reasons"]
    wait_for(busy, "loginctl list-sessions | grep -q ann", 120)
    assert "PORT agent" not in check(busy, INHIBITORS), "it may sleep while somebody uses it"
    stopped_at = training.job(busy)["step"]
    busy.type("exit\n")
    wait_for(busy, "! loginctl list-sessions | grep -q ann", 120)
    training.wait_for_job(busy, "step", f"> {stopped_at}", IMPORT_S)
    told = check(busy, "port-agent why")
    assert "in use" in told and told.rstrip().endswith("training"), told


def train_by_its_own_sensors(machine: Machine) -> None:
    """Let it train while nobody uses it, and keep it awake for that."""
    check(machine, f"cat > /etc/port-agent/config.d/50-test.toml <<'END'\n{PERSON}\nEND")
    check(machine, "systemctl restart port-agent")
    training.wait_for_new_step(machine, IMPORT_S)
    wait_for(machine, HELD_OFF, 60)


def test_a_machine_that_was_sent_to_sleep_trains_on_when_it_is_left_alone(busy: Machine, undisturbed: str) -> None:
    """Suspended to RAM and woken by its clock."""
    train_by_its_own_sensors(busy)
    refused = busy.run("systemctl suspend --check-inhibitors=yes")
    assert refused.rc != 0 and "PORT agent" in refused.out, "whoever asks for sleep is told who holds it off"
    check(
        busy, f"echo +{SLEEP_S} > /sys/class/rtc/rtc0/wakealarm && echo mem > /sys/power/state"
    )  # as firmware may, unasked
    wait_for(busy, SLEPT, 300)
    wait_for(busy, "port-agent why | grep -q 'woke from sleep'", 120)
    training.wait_for_new_step(busy, IMPORT_S)
    assert "the machine slept for" in check(busy, "port-agent why")
    wait_for(busy, HELD_OFF, 60)
    training.wait_for_job(busy, "state", "== 'finished'", FINISH_S)
    assert training.trained_weights(busy) == undisturbed
    wait_for(busy, f"! {HELD_OFF}", 60)


def test_worker_over_its_memory_limit_dies_alone(busy: Machine) -> None:
    service = "/sys/fs/cgroup" + show(busy, "ControlGroup")
    worker = check(busy, f"ls -d {service}/worker-*")
    limit = int(check(busy, f"cat {worker}/memory.max"))
    assert limit < int(check(busy, f"cat {service}/memory.max")), "the plan's limit is the tighter one"
    assert check(busy, f"cat {worker}/memory.swap.max") == "0"
    supervisor = show(busy, "MainPID")
    check(busy, f"echo 32M > {worker}/memory.max")
    wait_for(busy, f"[ ! -d {worker} ]", 60)
    assert show(busy, "MainPID") == supervisor and show(busy, "NRestarts") == "0"
    assert "oom" in check(busy, "dmesg | grep -i oom | tail -3").lower()
    kinds = [entry["kind"] for entry in training.job(busy)["history"]]
    assert "out_of_memory" in kinds, kinds
    assert training.job(busy)["state"] in ("backoff", "queued", "running"), "the job is not lost"


def test_hung_supervisor_is_restarted_and_the_job_goes_on(busy: Machine, undisturbed: str) -> None:
    hung = show(busy, "MainPID")
    check(busy, f"kill -STOP {hung}")
    wait_for(busy, f"systemctl is-active --quiet port-agent && {not_main_pid(hung)}", BOOT_S)
    assert "Watchdog timeout" in check(busy, "journalctl -u port-agent --no-pager -o cat")
    assert int(check(busy, "pgrep -f '[p]ort_agent.training.worker' | wc -l")) <= 1
    training.wait_for_job(busy, "attempts", ">= 2", IMPORT_S)
    training.wait_for_new_step(busy, IMPORT_S)
    training.wait_for_job(busy, "state", "== 'finished'", FINISH_S)
    assert training.trained_weights(busy) == undisturbed


def not_main_pid(pid: str) -> str:
    """Return the shell condition that another process is the service's main one."""
    return f'[ "$(systemctl show --property=MainPID --value port-agent)" != {pid} ]'


def test_power_cut_loses_no_committed_step(bench: MeasurementWorker, undisturbed: str) -> None:
    with bench.start("training") as machine:
        training.wait_for_job(machine, "step", ">= 100", IMPORT_S)
        committed = training.committed_step(machine)
        assert committed >= CHECKPOINT_EVERY
        machine.cut_power()
    with bench.start(None) as machine:
        assert training.committed_step(machine) >= committed, "the worker has not had the time to train yet"
        wait_for(machine, "systemctl is-active --quiet port-agent", BOOT_S)
        training.wait_for_job(machine, "attempts", ">= 2", IMPORT_S)
        training.wait_for_new_step(machine, IMPORT_S)
        training.wait_for_job(machine, "state", "== 'finished'", FINISH_S)
        assert training.trained_weights(machine) == undisturbed


def test_upgrade_rollback_removal_and_purge_under_a_running_job(bench: MeasurementWorker, busy: Machine) -> None:
    if bench.suite == "bookworm":
        pytest.skip("the container tests do this under 252")
    step = training.job(busy)["step"]
    check(busy, f"PORT_PYTHON=/usr/bin/python3.11 dpkg -i {deb_path('.post1')}", INSTALL_S)
    version = packages.checkout_version()
    assert f"current {version}.post1, previous {version}," in check(busy, f"{VERSIONS} list")
    assert training.job(busy)["state"] in ("running", "queued")
    refused = busy.run(f"PORT_PYTHON=/usr/bin/python3.11 dpkg -i {deb_path('.post2')}", INSTALL_S)
    assert refused.rc != 0 and "was rolled back" in refused.out
    assert f"current {version}.post1," in check(busy, f"{VERSIONS} list")
    training.wait_for_job(busy, "step", f"> {step}", IMPORT_S)
    check(busy, "systemctl stop port-agent && umount /opt/port-agent/runtimes && dpkg -r port-agent")
    assert busy.run("pgrep -f '[p]ort-agent/versions'").rc != 0
    check(busy, "test -s /var/lib/port-agent/jobs/1/state/state.pages")
    check(busy, "dpkg -P port-agent && [ ! -e /var/lib/port-agent ] && [ ! -e /etc/port-agent ]")

"""The pure and small parts of the supervisor: outcomes, plans, notify, inbox, logs, locks, schedule, cgroups."""

import asyncio
import multiprocessing
import os
import socket
from dataclasses import replace
from datetime import datetime, time
from pathlib import Path

import pytest

from agent.jobs.model import Job, JobKind, JobMeasurements, JobSpec, WorkerOutcome
from agent.policy.decide import TimeWindow
from agent.supervisor.background_tasks import too_old
from agent.supervisor.inbox import Inboxes
from agent.supervisor.job.exit_status import WorkerExit, classify
from agent.supervisor.job.log import JobLog, read_log, read_more
from agent.supervisor.job.plan_choice import (
    PlanFigures,
    at_measured_speed,
    checkpoint_interval_s,
    choose_plan,
    data_limit,
    eta_s,
    memory_max,
    smaller_plan,
)
from agent.supervisor.job.worker_kinds import (
    BundleFacts,
    RunPaths,
    WorkerKind,
    checkpoint_steps,
    no_environment,
    no_facts,
    torch_environment,
    worker_command,
)
from agent.supervisor.timers import Timers
from agent.system.cgroup import CgroupError, MemoryEvents, WorkerGroup, WorkerLimits, delegated_tree, system_oom_kills
from agent.system.locks import InstanceError, LockFile, lock_instance
from agent.system.sd_notify import Notifier
from agent.system.uevents import UeventListener
from tests.agent.trees import write_tree

MIB = 1 << 20


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        (WorkerExit(0, finished=True), WorkerOutcome.FINISHED, "finished"),
        (WorkerExit(0), WorkerOutcome.FAILED, "without saying"),
        (WorkerExit(75, told_to_leave=True), WorkerOutcome.LEFT, "on request"),
        (WorkerExit(75, cancelled=True), WorkerOutcome.CANCELLED, "by you"),
        (WorkerExit(-9, oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "at its memory limit"),
        (WorkerExit(1, oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "at its memory limit"),
        (WorkerExit(1, failure_code="out-of-memory"), WorkerOutcome.OUT_OF_MEMORY, "out of memory"),
        (WorkerExit(-9, system_oom_kills=1), WorkerOutcome.OUT_OF_MEMORY, "the machine ran out"),
        (WorkerExit(-9), WorkerOutcome.CRASHED, "SIGKILL"),
        (WorkerExit(-11), WorkerOutcome.CRASHED, "SIGSEGV"),
        (WorkerExit(-99), WorkerOutcome.CRASHED, "signal 99"),
        (WorkerExit(-9, told_to_leave=True, killed_after_s=0.85), WorkerOutcome.LEFT, "within 0.8"),
        (WorkerExit(-11, told_to_leave=True), WorkerOutcome.CRASHED, "SIGSEGV"),
        (WorkerExit(-15, told_to_leave=True), WorkerOutcome.LEFT, "on request"),
        (WorkerExit(2), WorkerOutcome.IMPOSSIBLE, "never run"),
        (WorkerExit(1, failure_message="bad", may_retry=False), WorkerOutcome.IMPOSSIBLE, "bad"),
        (WorkerExit(1, failure_message="no data"), WorkerOutcome.FAILED, "no data"),
        (WorkerExit(3), WorkerOutcome.FAILED, "exit status 3"),
    ],
)
def test_why_a_worker_ended(end: WorkerExit, outcome: WorkerOutcome, words: str) -> None:
    found, detail = classify(end)
    assert found is outcome
    assert words in detail


FRONTIER = (
    PlanFigures(0, 900 * MIB, 1.0, 5.0),
    PlanFigures(1, 600 * MIB, 1.4, 6.0),
    PlanFigures(2, 400 * MIB, 2.5, 4.0),
)


@pytest.mark.parametrize(
    ("limit", "ceiling", "steps", "left", "warm", "index"),
    [
        (None, None, None, None, False, 2),  # the least energy
        (2000 * MIB, None, 100, 1000.0, False, 2),  # in time
        (2000 * MIB, None, 100, 200.0, False, 0),  # 2.5 s a step is too slow; of the others the least energy
        (700 * MIB, None, 100, 200.0, False, 1),
        (2000 * MIB, None, 100, 50.0, False, 0),  # none in time: the fastest
        (2000 * MIB, 900 * MIB, 100, 50.0, False, 1),  # the fastest was killed before
        (500 * MIB, None, None, None, False, 2),
        (100 * MIB, None, None, None, False, None),
        (2000 * MIB, None, None, None, True, 2),  # the least power: 4 J / 2.5 s
    ],
)
def test_choice_of_the_plan(
    limit: int | None, ceiling: int | None, steps: int | None, left: float | None, warm: bool, index: int | None
) -> None:
    plan = choose_plan(FRONTIER, limit, ceiling, steps_left=steps, time_left_s=left, warm=warm)
    assert (plan.index if plan else None) == index


def test_times_are_taken_as_measured() -> None:
    scaled = at_measured_speed(FRONTIER, 1, 2.8)  # this device needs twice the planned time
    assert [plan.step_s for plan in scaled] == [2.0, 2.8, 5.0]
    assert at_measured_speed(FRONTIER, None, 2.8) == FRONTIER
    assert at_measured_speed(FRONTIER, 1, None) == FRONTIER


def test_smaller_plan_and_limits() -> None:
    smaller = smaller_plan(FRONTIER, 900 * MIB)
    assert smaller is not None and smaller.index == 1
    assert smaller_plan(FRONTIER, 400 * MIB) is None
    assert 400 * MIB < memory_max(400 * MIB) < data_limit(400 * MIB)
    assert eta_s(10, 30, 2.0) == 40.0
    assert eta_s(10, None, 2.0) is None


def test_checkpoints_follow_cost_and_wear() -> None:
    budget = 4096 * MIB
    assert checkpoint_interval_s(None, None, budget) == 600.0
    assert checkpoint_interval_s(0.1, MIB // 10, budget) == 10.0  # cheap: often, but not more often than it is worth
    assert checkpoint_interval_s(4.0, MIB, budget) == 200.0  # 2 % of the time
    assert checkpoint_interval_s(60.0, MIB, budget) == 600.0  # a power cut costs at most ten minutes,
    wear = checkpoint_interval_s(1.0, 100 * MIB, budget)  # unless the card would suffer
    assert wear == pytest.approx(86400 * 100 / 2048)


def test_worker_command(tmp_path: Path) -> None:
    spec = JobSpec("birds", "bundle.port", epochs=3, arguments=("--board", "m0"))
    paths = RunPaths(tmp_path, tmp_path / "bundle.port")
    kind = WorkerKind(("python", "-m", "worker"), no_facts, no_environment)
    command = " ".join(worker_command(kind, Job(1, spec, 0.0), paths, 2, 7))
    state, out = tmp_path / "state", tmp_path / "out.safetensors"
    assert command == (
        f"python -m worker --bundle {tmp_path}/bundle.port --state-dir {state} --control-fd {{control_fd}} "
        f"--plan 2 --epochs 3 --out {out} --checkpoint-every 7 --board m0"
    )


def test_steps_between_checkpoints() -> None:
    job, budget = Job(1, JobSpec("birds", "bundle.port"), 0.0), 4096 * MIB
    assert checkpoint_steps(job, budget) == 50
    known = replace(job, measured=JobMeasurements(step_s=2.0, checkpoint_s=4.0, checkpoint_bytes=MIB))
    assert checkpoint_steps(known, budget) == 100
    assert checkpoint_steps(replace(job, spec=replace(job.spec, checkpoint_every=3)), budget) == 3
    assert checkpoint_steps(replace(job, spec=replace(job.spec, kind=JobKind.MCU)), budget) is None


def test_a_torch_worker_gets_its_allocator_and_its_threads() -> None:
    environment = torch_environment(BundleFacts(FRONTIER, threads=3), FRONTIER[0])
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert len(environment) > 2


def test_notify_speaks_to_systemd(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
        taken = dict(environment)
        notifier = Notifier(taken)
        assert taken == {}, "no child process may speak in our name"
        assert notifier.watchdog_s == 10.0
        notifier.send(READY=1, STATUS="two\nlines")
        assert server.recv(4096) == b"READY=1\nSTATUS=two lines"
    notifier.send(WATCHDOG=1)  # systemd is gone: no error
    assert Notifier({**environment, "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({}).watchdog_s is None
    Notifier({}).send(READY=1)


def test_notify_does_not_wait_for_a_manager_that_does_not_listen(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        notifier = Notifier({"NOTIFY_SOCKET": str(path)})
        for i in range(3000):  # more than the queue of any kernel holds
            notifier.send(STATUS=i)
        assert manager.recv(100) == b"STATUS=0"


def test_notify_on_an_abstract_socket() -> None:
    name = f"port-agent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).send(WATCHDOG=1)
        assert server.recv(4096) == b"WATCHDOG=1"


def test_inbox_waits_until_files_stop_growing(tmp_path: Path) -> None:
    inboxes, job_dir = Inboxes(tmp_path / "inbox"), tmp_path / "job"
    job_dir.mkdir()
    assert inboxes.scan("birds", job_dir).new == ()
    write_tree(tmp_path / "inbox/birds", {"a.wav": "one", ".hidden": "x", "b.wav.part": "x", "empty": ""})
    assert inboxes.scan("birds", job_dir).new == ()  # seen once
    (tmp_path / "inbox/birds/a.wav").write_text("one and more")
    assert inboxes.scan("birds", job_dir).new == ()  # still growing
    assert inboxes.scan("birds", job_dir).new == ("a.wav",)
    first = inboxes.round_directory("birds", job_dir, 1)
    assert [path.name for path in first.iterdir()] == ["a.wav"]
    write_tree(tmp_path / "inbox/birds", {"c.wav": "late"})
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    assert [path.name for path in inboxes.round_directory("birds", job_dir, 1).iterdir()] == ["a.wav"]
    inboxes.finish_round("birds", job_dir, 1)
    assert not inboxes.has_round("birds", job_dir, 2)
    assert inboxes.scan("birds", job_dir).new == ("c.wav",)
    again = Inboxes(tmp_path / "inbox")  # after a restart
    again.scan("birds", job_dir)
    assert again.scan("birds", job_dir).new == ("c.wav",)


def test_a_file_that_changed_after_its_round_is_new(tmp_path: Path) -> None:
    inboxes, job_dir = Inboxes(tmp_path), tmp_path / "job"
    job_dir.mkdir()
    write_tree(tmp_path / "birds", {"log.csv": "1"})
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    inboxes.round_directory("birds", job_dir, 1)
    inboxes.finish_round("birds", job_dir, 1)
    (tmp_path / "birds/log.csv").write_text("1 2 3")
    for _ in range(2):
        state = inboxes.scan("birds", job_dir)
    assert state.new == ("log.csv",)


def test_an_unreadable_inbox_says_so(tmp_path: Path) -> None:
    (tmp_path / "birds").write_text("a file where a directory belongs")
    assert "birds" in Inboxes(tmp_path).scan("birds", tmp_path).error


def test_job_log_is_capped_and_followed(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 20_000)
    log.note("started", 0.0)
    _, position = read_log(tmp_path, 10)
    log.output(b"half a li", 0.0)
    assert read_more(tmp_path, position) == ("", position)
    log.output(b"ne\nnext\n", 0.0)
    text, position = read_more(tmp_path, position)
    assert text.count("worker:") == 2 and "half a line" in text
    for _ in range(200):
        log.output(b"x" * 300 + b"\n", 0.0)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 22_000
    text, _ = read_log(tmp_path, 3)
    assert len(text.splitlines()) == 3
    assert read_more(tmp_path, position)[0]  # after a rotation it starts anew
    assert read_log(tmp_path / "nowhere", 5) == ("", 0)


def _hold_lock(path: str, ready: "multiprocessing.synchronize.Event", end: "multiprocessing.synchronize.Event") -> None:
    lock = LockFile(Path(path))
    assert lock.try_lock()
    lock.write("4711")
    ready.set()
    end.wait()


def test_locks_die_with_their_holder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=_hold_lock, args=(str(tmp_path / "port-agent.lock"), ready, end))
    holder.start()
    assert ready.wait(30.0)
    with pytest.raises(InstanceError, match="process 4711"):
        lock_instance(tmp_path, tmp_path / "state")
    holder.kill()
    holder.join()
    locks = lock_instance(tmp_path, tmp_path / "state")
    assert len(locks) == 1  # the state directory does not exist: nothing to protect
    for lock in locks:
        lock.close()


def test_agenda_wakes_at_borders_and_never_drops_late_jobs() -> None:
    async def plan() -> dict[str, datetime]:
        timers = Timers(lambda: None)
        timers.start()
        timers.set_windows([TimeWindow(6, time(22), time(7)), TimeWindow(0, time(1, 30), time(2))])
        timers.set_deadline(4, datetime(2035, 1, 1).timestamp())
        timers.every(60.0, "chore", lambda: asyncio.sleep(0))
        times = timers.next_times()
        assert timers.has("chore")
        timers.clock_changed()
        for job in timers._scheduler.get_jobs():
            assert (job.misfire_grace_time, job.coalesce, job.max_instances) == (None, True, 1)
        timers.cancel("chore")
        timers.set_deadline(4, None)
        timers.set_windows([])
        assert timers.next_times() == {}
        timers.stop()
        return times

    times = asyncio.run(plan())
    assert {f"{at:%a %H:%M}" for name, at in times.items() if name.startswith("window-")} == {
        "Sun 22:00",
        "Mon 07:00",
        "Mon 01:30",
        "Mon 02:00",
    }
    assert times["deadline-4"].year == 2035


def test_a_deadline_in_the_past_wakes_at_once() -> None:
    async def wait() -> None:
        woken = asyncio.Event()
        timers = Timers(woken.set)
        timers.start()
        timers.set_deadline(1, 1_000_000.0)
        await asyncio.wait_for(woken.wait(), 10.0)
        timers.stop()

    asyncio.run(wait())


# --- control groups, on a tree of plain files (the kernel's own behaviour is tested in a virtual machine)

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


# --- tidying up


def test_the_oldest_jobs_go_first_beyond_count_or_size() -> None:
    jobs = [Job(number, JobSpec("x", "b"), 0.0) for number in range(1, 6)]
    sizes = {1: 10, 2: 50, 3: 10, 4: 10, 5: 10}
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=100) == []
    assert too_old(jobs, sizes, keep_jobs=3, keep_bytes=100) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=80) == [1]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=40) == [1, 2]
    assert too_old(jobs, sizes, keep_jobs=10, keep_bytes=5) == [1, 2, 3, 4, 5]
    assert too_old([], {}, keep_jobs=0, keep_bytes=0) == []


def test_a_kernel_event_of_a_plug_wakes_the_loop() -> None:
    async def listen() -> list[str]:
        heard: list[str] = []
        ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        listener = UeventListener(ours, lambda: heard.append("power"))
        with kernel:
            kernel.send(b"change@/devices/x\0ACTION=change\0SUBSYSTEM=net\0")
            kernel.send(b"change@/devices/ACAD\0ACTION=change\0SUBSYSTEM=power_supply\0SEQNUM=1\0")
            for _ in range(5):
                await asyncio.sleep(0)
        listener.close()
        return heard

    assert asyncio.run(listen()) == ["power"]

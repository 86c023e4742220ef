"""The daemon: one loop that observes, decides and acts, with its start and stop."""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent import facts
from port_agent.energy.media import FlashPrices, medium_under, used_life
from port_agent.energy.meter import open_meter
from port_agent.energy.sources.registry import EnergyConfig, ups_amperes
from port_agent.energy.wear_account import WearAccount
from port_agent.facts import Answer, Facts, OwnUse, Platform
from port_agent.facts.sensor_thread import DEADLINE_S
from port_agent.health.conditions import HealthBoard
from port_agent.jobs.job import JobState, Migratable
from port_agent.jobs.store import JobStore
from port_agent.malloc import release_free_memory
from port_agent.policy.config import Config, ConfigError, load_config, restart_needed
from port_agent.policy.decide import PolicyDecision, device_in_use
from port_agent.policy.usual_times import UsualTimes
from port_agent.supervisor.admission import Admission, without_plug
from port_agent.supervisor.background_tasks import BackgroundTasks
from port_agent.supervisor.context import (
    HINT_SETTING,
    PAUSE_SETTING,
    USUAL_TIMES_SETTING,
    DaemonContext,
    DaemonSeams,
    Settings,
)
from port_agent.supervisor.dispatch import Dispatcher, granted_limits
from port_agent.supervisor.heartbeat import HeartbeatSource
from port_agent.supervisor.http_api import ControlServer, ServerSettings
from port_agent.supervisor.job.inbox import Inboxes
from port_agent.supervisor.job.runner import LAST_COMMIT_S, Runner
from port_agent.supervisor.job.runners import WORKER_LOCKS, Runners
from port_agent.supervisor.metering import report_issues
from port_agent.supervisor.old_worker import clear_old_workers
from port_agent.supervisor.pause import LOST, Pause
from port_agent.supervisor.peers.peer_answers import FederatedContext
from port_agent.supervisor.peers.peer_discovery import public_state
from port_agent.supervisor.peers.peers import Peers
from port_agent.supervisor.plug_monitor import PlugMonitor
from port_agent.supervisor.service import Service
from port_agent.supervisor.sleep_inhibitor import SleepInhibitor, inhibition
from port_agent.supervisor.stall_monitor import StallMonitor
from port_agent.supervisor.status import pause_text
from port_agent.supervisor.timeline import ASLEEP, STARTED, STOPPED, Timeline
from port_agent.supervisor.timers import Timers
from port_agent.system.cgroup import CgroupError, delegated_tree
from port_agent.system.clock import zone_changed
from port_agent.system.locks import LockFile, lock_instance
from port_agent.system.sd_notify import Notifier
from port_agent.system.uevents import UeventListener
from port_planner.base.errors import PortError
from port_planner.base.units import format_seconds

if TYPE_CHECKING:
    from port_agent.supervisor.migration_guests import Guests
    from port_agent.supervisor.migrations import Migrations

IDLE_LOOK_S = 30.0
"""Seconds between looks while there is nothing to do: often enough for health items and `status`."""
STOP_PATIENCE_S = LAST_COMMIT_S + 2.0
"""Seconds that stopping may take, well below TimeoutStopSec of the unit."""
_STORE_RETRY_S = 10.0
_TIMES_WRITTEN_S = 3600.0
"""Seconds between writes of the usual times; a power cut loses at most an hour of what was learned."""
_DISK_THREADS = 2
"""Number of threads for the disk: one for the store, and one for uploads and the doctor. Each thread costs memory."""


class RuntimeDirError(PortError):
    """The runtime directory, which contains the socket, cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(f"{path} cannot be used ({reason}); create it for this user, or give another --runtime-dir")


class Daemon:
    """One supervisor process."""

    def __init__(self, settings: Settings, seams: DaemonSeams | None = None) -> None:
        self._settings, self._seams = settings, seams or DaemonSeams()
        self.ready = asyncio.Event()
        """Set once the control socket answers."""
        self._notifier = Notifier()
        self._stopping = self._plug_changed = False
        self._next_flush_s = 0.0
        self._next_times_s = 0.0
        self._status = ""
        self._migrations: Migrations | None = None

    async def run(self) -> None:
        """Serve until stopped.

        Raises InstanceError if another daemon is running, and ConfigError at the start.
        """
        self._locks = _directories(self._settings)
        try:
            await self._serve()
        finally:
            for lock in self._locks:
                lock.close()

    def stop(self) -> None:
        """Ask the loop to end; the worker leaves, and everything is written."""
        self._stopping = True
        self._context.wake.set()

    def retry_storage(self) -> None:
        """Retry now what the disk rejected, instead of in a few seconds."""
        self._next_flush_s = 0.0
        self._context.wake.set()

    async def tidy(self) -> None:
        """Do the housekeeping now instead of in a few minutes."""
        await self._background.keep_house()

    @property
    def context(self) -> DaemonContext:
        """The parts of the daemon, for tests."""
        return self._context

    # --- start and stop

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_DISK_THREADS))
        self._context = context = self._build(load_config(self._settings.config))
        self._background = BackgroundTasks(context)
        self._dispatcher = Dispatcher(context)
        self._stall_watch = StallMonitor(context.health, context.clock)
        self._recover()
        self._trust_hint()
        self._listen_to_signals()
        server = self._control_server()
        try:
            await server.start()
        except OSError as error:
            context.store.close()
            raise RuntimeDirError(self._settings.runtime_dir, error.strerror or str(error)) from error
        self._notifier.send(READY=1, STATUS="starting")
        self.ready.set()
        release_free_memory()
        context.peers.apply(context.config.options)
        context.peers.go_on_federating()
        context.timers.set_windows(context.config.policy.windows)
        self._background.plan()
        listener = UeventListener.open(context.wake.set)
        try:
            await clear_old_workers(
                partial(LockFile, path) for path in sorted(self._settings.state_dir.glob(WORKER_LOCKS))
            )
            async with asyncio.TaskGroup() as group:  # should one of these ever fail, so does the daemon, visibly
                background = [
                    group.create_task(self._background.refresh_slow_sensors()),
                    group.create_task(self._background.flush_when_pending()),
                    group.create_task(context.sleep.run()),
                ]
                await self._loop()
                for task in background:
                    task.cancel()
        finally:
            if listener is not None:
                listener.close()
            self._notifier.send(STOPPING=1)
            context.timers.stop()
            await server.stop()
            if self._migrations is not None:
                await self._migrations.stop()
            await asyncio.gather(self._end_workers(), context.peers.stop())
            context.runners.host.attachments.close()
            context.admission.close()
            self._close()

    def _build(self, config: Config) -> DaemonContext:
        settings, seams = self._settings, self._seams
        clock, health, wake = seams.clock, HealthBoard(), asyncio.Event()
        store = JobStore(settings.state_dir)
        inboxes = Inboxes(settings.state_dir / "inbox")

        def runner(lock: Callable[[], LockFile]) -> Runner:
            return Runner(store, inboxes, health, clock, seams.kinds, lock, wake.set)

        context = DaemonContext(
            settings=settings,
            seams=seams,
            config=config,
            started_with=config,
            clock=clock,
            health=health,
            store=store,
            inboxes=inboxes,
            admission=Admission(self._platform(config), clock, health, settings.state_dir),
            runners=Runners(store, settings.state_dir, runner),
            timers=Timers(wake.set),
            wake=wake,
            started_s=clock.monotonic_s(),
            reload=self._reload,
            peers=Peers(
                settings.state_dir,
                health,
                clock,
                store,
                lambda name: self._heartbeat.heartbeat(name),
                lambda: self._heartbeat.objection(),
                FederatedContext(lambda: self._heartbeat.not_federating(), self._stop_worker, wake.set),
                lambda client, request: self._guests.answer(client, request),
            ),
            wear=WearAccount(clock.wall_s, store),
            usual_times=UsualTimes.from_json(store.setting(USUAL_TIMES_SETTING)),
            pause=Pause(settings.state_dir, clock),
            timeline=Timeline(settings.state_dir),
            sleep=SleepInhibitor(lambda what: context.admission.platform.awake_command(what), clock.monotonic_s),
        )
        self._heartbeat = HeartbeatSource(context)
        with contextlib.suppress(PortError, OSError):  # unknown here; `doctor` examines the state directory
            energy = EnergyConfig.from_table(config.energy)
            prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
            context.medium, context.used_life = medium_under(settings.state_dir, prices), used_life(settings.state_dir)
        try:
            context.meter = open_meter(settings.state_dir, config.energy, wear=context.wear)
            context.runners.set_meter(context.meter)
        except (PortError, OSError) as error:
            health.report("no-meter", clock.monotonic_s(), clock.wall_s(), reason=str(error))
        try:
            tree = delegated_tree()
            tree.clean()
            context.runners.set_tree(tree)
            if tree.without_memory:
                health.report("no-memory-limit", clock.monotonic_s(), clock.wall_s(), reason=tree.without_memory)
        except CgroupError as error:
            health.report("no-memory-limit", clock.monotonic_s(), clock.wall_s(), reason=error.reason)
        return context

    @cached_property
    def _guests(self) -> "Guests":
        from port_agent.supervisor.migration_guests import Guests  # few jobs move: not worth resident memory

        return Guests(self._context)

    def _migrate_jobs(self) -> None:
        """Let jobs move to paired devices and back, and end those of devices that are no longer paired."""
        jobs = self._context.store.all()
        if any(
            job.away is not None or (job.spec.movable is not Migratable.NEVER and not job.state.is_over) for job in jobs
        ):
            if self._migrations is None:
                from port_agent.supervisor.migrations import Migrations

                self._migrations = Migrations(self._context)
            self._migrations.look()
        if any(job.spec.guest is not None for job in jobs):
            self._guests.drop_unpaired({str(row["id"]) for row in self._context.peers.fleet.rows()})

    def _stop_worker(self, job_id: int) -> None:
        """Make a job's worker leave at once, because its result is no longer needed."""
        runner = self._context.runners.of_job(job_id)
        if runner is not None:
            runner.leave("its round has ended")

    def _control_server(self) -> ControlServer:
        context, options = self._context, self._context.config.options
        settings = ServerSettings(
            self._settings.runtime_dir, self._settings.state_dir, options.control_group, options.metrics_listen
        )

        def report(reason: str) -> None:
            context.health.report("config", context.clock.monotonic_s(), context.clock.wall_s(), reason=reason)

        return ControlServer(Service(context), settings, report)

    def _platform(self, config: Config) -> Platform:
        if self._seams.platform is not None:
            return self._seams.platform(config, self._settings)
        sysfs, proc, dev = config.options.sensor_roots
        sysfs = self._settings.sysfs_root or sysfs
        return facts.this_platform(sysfs, proc, dev, ups_amperes(config.energy, sysfs.parent))

    def _recover(self) -> None:
        """Queue the jobs that ran when the agent last stopped."""
        context, now_s = self._context, self._context.clock.monotonic_s()
        context.timeline.note(context.clock.wall_s(), STARTED)
        for job in context.store.all():
            if job.state is JobState.RUNNING:
                context.store.save(replace(job, state=JobState.QUEUED, reason="the agent was restarted"))
            if job.spec.deadline_at is not None and not job.state.is_over:
                context.timers.set_deadline(job.id, job.spec.deadline_at)
        self._recover_pause()
        for aside in context.store.set_aside.values():
            context.health.report(
                "job-set-aside",
                now_s,
                context.clock.wall_s(),
                key=str(aside.id),
                id=aside.id,
                job=f"{aside.id} ({aside.name})" if aside.name else str(aside.id),
                reason=aside.reason,
                directory=aside.directory,
            )
        if context.store.recovered_from is not None:
            context.health.report("database", now_s, context.clock.wall_s(), aside=context.store.recovered_from)

    def _recover_pause(self) -> None:
        """Adopt a pause that an earlier version kept in the database; if that record is lost, start paused."""
        context = self._context
        kept = context.store.setting(PAUSE_SETTING)
        if context.pause.left_s() is None and kept is not None:
            with contextlib.suppress(ValueError):  # no agent wrote that; it was a pause
                left_s = float(kept) - context.clock.wall_s()
                context.pause.begin(None if math.isinf(left_s) else left_s)
            if not context.pause.reason:
                context.pause.begin(None)
        if kept is not None:
            context.store.remember(PAUSE_SETTING, None)
        if context.pause.left_s() is None and context.store.lost:
            context.pause.begin(None, LOST)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    async def _end_workers(self) -> None:
        runners = self._context.runners
        runners.leave("the agent is stopping", LAST_COMMIT_S)
        end = time.monotonic() + STOP_PATIENCE_S
        while runners.busy():
            if time.monotonic() >= end:
                runners.kill()
            await asyncio.sleep(0.01)

    def _close(self) -> None:
        context = self._context
        context.store.on_pending = lambda: None
        self._count_wear()
        context.timeline.note(context.clock.wall_s(), STOPPED)
        with contextlib.suppress(OSError):  # a disk that refuses was a health item all along
            context.timeline.flush(context.clock.wall_s())
        if context.meter is not None:
            with contextlib.suppress(PortError):  # a ledger that cannot be written was a health item all along
                context.meter.close(context.clock.monotonic_s())
        context.store.close()

    # --- the loop

    async def _loop(self) -> None:
        context = self._context
        plug_monitor = PlugMonitor(lambda: context.admission.platform.plug_monitor(), self._on_plug)
        try:
            while not self._stopping:
                context.wake.clear()
                own = OwnUse(bool(context.runners.busy()), context.runners.own_cpu_s())
                self._plug_changed = False
                facts = await context.admission.read(context.config.policy, own)
                if self._plug_changed:  # what was read may be from before
                    facts = await context.admission.read(context.config.policy, own)
                self._look(facts if plug_monitor.silent_s() < DEADLINE_S else without_plug(facts))
                self._background.looked.set()
                rest_s = self._rest_s()
                self._stall_watch.rests(rest_s)
                if context.runners.training:
                    plug_monitor.arm()
                else:
                    plug_monitor.disarm()
                await _wait(context.wake, rest_s)
        finally:
            plug_monitor.close()

    def _on_plug(self) -> None:
        """Stop all workers before any slow sensor is read; the next look resumes those that may run."""
        for runner, _ in self._context.runners.busy().values():
            runner.pause()
        self._plug_changed = True
        self._context.wake.set()

    def _look(self, facts: Facts) -> None:
        """Decide by the sensors' readings and act, once."""
        context = self._context
        now_s = context.clock.monotonic_s()
        self._stall_watch.looked()
        if zone_changed():
            context.timers.zone_changed(context.config.policy.windows)
        if slept_s := context.admission.slept_s():
            fell_asleep_s = context.clock.wall_s() - slept_s
            context.timeline.note(fell_asleep_s, f"{ASLEEP} for {format_seconds(round(slept_s))}")
        if context.admission.clock_jump_s():
            context.timers.clock_changed()
            context.usual_times.skip(context.clock.wall_s())
        self._count_wear()
        self._watch_store(now_s)
        if context.pause.reason and context.pause.left_s() is None:
            context.pause.end()
        context.end_run_now()
        decision = context.admission.judge(facts, context.policy, context.wear.today_bytes(), pause_text(context))
        self._learn_times(decision, now_s)
        self._trust_hint()
        self._tick_meter(now_s)
        self._dispatcher.act(decision)
        context.timeline.take(context.clock.wall_s(), decision, busy=bool(context.runners.busy()))
        has_work = any(job.state in (JobState.QUEUED, JobState.RUNNING) for job in context.store.all())
        context.sleep.want(inhibition(decision, context.admission.facts, context.policy, has_work=has_work))
        if context.pause.pending or context.timeline.pending:
            self._background.pending.set()
        self._migrate_jobs()
        self._notify(decision)

    def _trust_hint(self) -> None:
        """Remember that logind's idle hint was once seen to work, for these sensors and for the agent's next run."""
        context, platform = self._context, self._context.admission.platform
        known = context.store.setting(HINT_SETTING) is not None
        if platform.hint_works and not known:
            context.store.remember(HINT_SETTING, "yes")
        platform.hint_works |= known

    def _learn_times(self, decision: PolicyDecision, now_s: float) -> None:
        """Record whether training may run now, regardless of jobs; write it to disk from time to time."""
        context = self._context
        granted = granted_limits(context.config.policy, decision.state)
        usual = decision.state.trains and context.run_now is None
        speed = min(1.0, granted.cpu_percent / 100.0) if usual else 0.0
        context.usual_times.look(context.clock.wall_s(), speed)
        if now_s >= self._next_times_s:
            self._next_times_s = now_s + _TIMES_WRITTEN_S
            context.store.remember(USUAL_TIMES_SETTING, context.usual_times.to_json())

    def _tick_meter(self, now_s: float) -> None:
        context = self._context
        if context.meter is None or any(
            "power_supply" in path.parts for path in context.admission.platform.tree.silent
        ):
            return  # it would hang in the same sensor; unmetered time is a gap
        left_alone = {Answer.YES: False, Answer.NO: True}.get(device_in_use(context.admission.facts.idle_signals))
        context.meter.tick(now_s, machine_idle=left_alone)
        for event in context.meter.take_events():
            if event.correction is not None:
                context.runners.correct(event.correction)
            else:
                context.store.note(context.clock.wall_s(), None, event.code, event.text)
        report_issues(context.meter.health(), context.health, context.clock)

    def _rest_s(self) -> float:
        """Return for how long nothing needs to be done unless something wakes the loop."""
        context, now_s = self._context, self._context.clock.monotonic_s()
        alive = [job for job in context.store.all() if not job.state.is_over]
        rest_s = IDLE_LOOK_S
        if context.runners.busy():
            rest_s = self._seams.training_look_s
        elif any(job.state is JobState.QUEUED for job in alive):
            rest_s = self._seams.waiting_look_s
        retries = [at - now_s for _, at in context.retry_at_s.values()]
        if self._notifier.watchdog_s is not None:
            rest_s = min(rest_s, self._notifier.watchdog_s / 2)
        self._background.plan_inbox_scans(alive)
        context.peers.show(public_state(context.runners, has_work=bool(alive)))
        return max(0.0, min([rest_s, *(left for left in retries if left > 0)]))

    # --- around the loop

    def _watch_store(self, now_s: float) -> None:
        """Retry what the disk rejected, and report the problem meanwhile."""
        context = self._context
        if context.store.trouble is not None and now_s >= self._next_flush_s:
            self._next_flush_s = now_s + _STORE_RETRY_S
            self._background.pending.set()
        if context.store.trouble is not None:
            trouble = context.store.trouble
            context.health.report(
                "state-unwritable", now_s, context.clock.wall_s(), reason=str(trouble), path=context.settings.state_dir
            )
            context.runners.leave("the state directory cannot be written")
        else:
            context.health.clear("state-unwritable")

    def _count_wear(self) -> None:
        self._context.wear.add(self._context.runners.take_written_bytes())

    def _notify(self, decision: PolicyDecision) -> None:
        """Report to systemd that the loop is alive, and its state in one line."""
        busy = self._context.runners.busy().values()
        runs = [f"{runner.phase.value}: job {job.label}" for runner, job in busy if runner.phase is not None]
        text = "; ".join(runs or decision.reasons)
        if self._notifier.watchdog_s is not None:
            self._notifier.send(WATCHDOG=1)
        if text != self._status:
            self._status = text
            self._notifier.send(STATUS=text[:200])

    def _reload(self) -> None:
        """Read the configuration again; raises ConfigError, in which case the old one stays in force."""
        context, now_s, wall_s = self._context, self._context.clock.monotonic_s(), self._context.clock.wall_s()
        try:
            config = load_config(context.settings.config)
        except ConfigError as error:
            context.health.report("config", now_s, wall_s, reason=str(error))
            raise
        before, context.config = context.config, config
        context.health.clear("config")
        if before.options.sensor_roots != config.options.sensor_roots:
            context.admission.platform = self._platform(config)
            self._background.sensors_changed.set()
        waiting = restart_needed(context.started_with, config)
        if waiting:
            context.health.report("restart-needed", now_s, wall_s, settings=", ".join(waiting))
        else:
            context.health.clear("restart-needed")
        context.timers.set_windows(context.config.policy.windows)
        context.peers.apply(config.options)
        context.wake.set()

    def _on_hangup(self) -> None:
        with contextlib.suppress(ConfigError):  # it has become a health item
            self._reload()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def _directories(settings: Settings) -> list[LockFile]:
    """Create both directories and return their locks. A state directory that cannot be created is reported later."""
    try:
        settings.runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise RuntimeDirError(settings.runtime_dir, error.strerror or str(error)) from error
    with contextlib.suppress(OSError):
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return lock_instance(settings.runtime_dir, settings.state_dir)
    except OSError as error:
        raise RuntimeDirError(settings.runtime_dir, error.strerror or str(error)) from error

"""One bit flips in a file of the state directory, at rest or after a kill; then the agent starts on it."""

import asyncio
import collections
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from deploy.versions import SetupError, Store, rollback, write_stamp
from port_agent.energy.attribution.one_job import Charge, EnergyPhase
from port_agent.energy.ledger import Ledger, LedgerError, MeterGap
from port_agent.energy.sources.power_source import Kind
from port_agent.intercept.decisions.kept_plans import KeptPlan, keep_plan, read_plan
from port_agent.jobs.job import Job, JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.peers.identity.keys import own_identity
from port_agent.supervisor.job.inbox import Inboxes
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import BundleError
from tests.agent.jobs_small import small_bundle
from tests.agent.training.trained_job import train
from tests.attack.outcome import AttackOutcome
from tests.attack.short_service import flip_result, jobs_afterwards, serve_shortly
from tests.planner.bundles import read_everything

CUT_AFTER = 4
NOON = 1_760_011_200.0
PAUSE = repr(NOON + 600)


def flips(files: list[Path], every_bytes: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Yield file and number of a random bit in each stretch of `every_bytes`."""
    choose = random.Random(seed)
    for file in files:
        nbytes = file.stat().st_size
        for start in range(0, nbytes, every_bytes):
            yield file, choose.randrange(start * 8, min(start + every_bytes, nbytes) * 8)


def flip_each(
    name: str, original: Path, scratch: Path, every_bytes: int, seed: int, judge: Callable[[Path], tuple[str, str]]
) -> AttackOutcome:
    """Flip bit after bit in copies of a directory; `judge` says how it ended, and what is wrong if anything is."""
    files = sorted(path for path in original.rglob("*") if path.is_file() and not path.is_symlink())
    endings: collections.Counter[str] = collections.Counter()
    harmed = []
    for file, bit in flips(files, every_bytes, seed):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(original, scratch, symlinks=True)
        victim = scratch / file.relative_to(original)
        content = bytearray(victim.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        ending, wrong = judge(scratch)
        endings[ending] += 1
        if wrong:
            harmed.append(f"{file.relative_to(original)} bit {bit}: {wrong}")
    tried = sum(endings.values())
    notes = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    return AttackOutcome(name, tried, tried - len(harmed), tuple(harmed), notes)


# --- the job store


def fill_job_store(state_dir: Path) -> list[Job]:
    """Make a store with jobs in several states, history, wear and a pause, and leave it open as a kill would."""
    store = JobStore(state_dir)
    for number, state in enumerate((JobState.QUEUED, JobState.PAUSED, JobState.CANCELLED, JobState.FINISHED)):
        spec = JobSpec(f"job{number}", "bundle.port", epochs=3, priority=number, deadline_at=NOON + number)
        job = store.add(spec, NOON)
        store.note(NOON, job.id, "submitted", "by the test")
        store.save(replace(job, state=state, step=10 * number, loss=0.5))
        store.flush()
    store.remember("paused", PAUSE)
    store.add_wear("2026-06-03", 12345)
    store.flush()
    store.save(replace(store.get(2), state=JobState.CANCELLED))
    store.flush()
    return store.all()


def attack_job_store(scratch: Path, *, closed: bool, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in database, log and manifests: no job is lost or changed, and what was lost of the rest is said."""
    made = scratch / "made"
    jobs = fill_job_store(made)
    original = scratch / "original"
    shutil.copytree(made, original)
    if closed:
        JobStore(original).close()

    def judge(state_dir: Path) -> tuple[str, str]:
        try:
            store = JobStore(state_dir)
        except Exception as error:
            return "not started", f"{type(error).__name__}: {error}"
        try:
            return _judge_store(store, jobs)
        finally:
            store.close()

    return flip_each(
        f"bit flips, jobs ({'at rest' if closed else 'killed'})", original, scratch / "x", every_bytes, seed, judge
    )


def _judge_store(store: JobStore, jobs: list[Job]) -> tuple[str, str]:
    told = store.recovered_from is not None or bool(store.set_aside)
    ending = "set aside and said" if told else "harmless"
    if store.trouble is not None:
        return ending, f"nothing can be written: {store.trouble}"
    kept = {job.id: job for job in store.all()}
    for job in jobs:
        if job.id not in kept and job.id not in store.set_aside:
            return ending, f"job {job.id} is lost"
        if job.id in kept and kept[job.id] != job:
            return ending, f"job {job.id} is another: {kept[job.id]}"
    if store.setting("paused") != PAUSE and not told:
        return ending, f"the pause is {store.setting('paused')}, and nobody says so"
    added = store.add(JobSpec("next", "bundle.port"), NOON)
    if added.id in {job.id for job in jobs} or not store.flush():
        return ending, "it takes no job any more"
    return ending, ""


# --- what else a daemon keeps: manifests, logs, locks, uploads, the device's id


_ATTACKED_ALONE = ("jobs.db", "energy.sqlite", "out.safetensors", "bundle.port", "slot-")


def attack_daemon_files(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in all small files that a killed daemon left: the next one starts, and has every job as it was."""
    original = scratch / "work/state"
    original.parent.mkdir(parents=True)
    serve_shortly(original.parent)
    own_identity(original)
    small = scratch / "original"
    for file in original.rglob("*"):
        if file.is_file() and not file.name.startswith(_ATTACKED_ALONE):
            (small / file.relative_to(original)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, small / file.relative_to(original))

    def judge(flipped: Path) -> tuple[str, str]:
        folder = scratch / "again"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder / "state")
        shutil.copytree(flipped, folder / "state", dirs_exist_ok=True)
        return "started, every job there", jobs_afterwards(folder)

    return flip_each("bit flips, other files of a daemon", small, scratch / "x", every_bytes, seed, judge)


# --- the result of a finished job


def attack_result(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in a result: the daemon hands out none that is not what was written, and has it written again."""
    folder = scratch / "work"
    folder.mkdir()
    return asyncio.run(flip_result(folder / "service", lambda file: flips([file], every_bytes, seed)))


# --- plans that are kept for programs that are followed


def attack_kept_plans(
    scratch: Path, setenv: Callable[[str, str], None], *, every_bytes: int, seed: int = 1
) -> AttackOutcome:
    """Flip bits in a kept plan: it is not read, and is made anew."""
    original = scratch / "cache"
    setenv("XDG_CACHE_HOME", str(original))
    plan = KeptPlan("milp", 1.5, [(0, 3, 1, False), (1, 0, 2, True)], [(0, 2)], (45e6, 25e6))
    keep_plan("a" * 32, plan)

    def judge(directory: Path) -> tuple[str, str]:
        setenv("XDG_CACHE_HOME", str(directory))
        found = read_plan("a" * 32)
        return "made anew" if found is None else "harmless", "" if found in (None, plan) else f"another plan: {found}"

    return flip_each("bit flips, kept plans", original, scratch / "x", every_bytes, seed, judge)


# --- what says at boot which version runs


def attack_boot_files(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits while a version that does not come up is on trial: the one before runs again, with its dependencies."""
    original = scratch / "original"
    store = Store(original)
    for version in ("1.0", "1.1", "1.2"):
        runtime = store.root / "runtimes" / f"cp311-{version}"
        runtime.mkdir(parents=True)
        store.version(version).mkdir(parents=True)
        write_stamp(store.version(version), version, runtime.name)
        store.switch(version)

    def judge(root: Path) -> tuple[str, str]:
        found = Store(root)
        try:
            rollback(found, _NoService(), only_unconfirmed=True)
            found.prune()
        except (SetupError, ValueError, OSError) as error:
            return "not rolled back", f"{type(error).__name__}: {error}"
        wrong = "" if found.linked("previous") == "1.0" else "the version before is forgotten"
        wrong = wrong if found.linked("current") == "1.1" else f"{found.linked('current')} is current"
        if not (root / "runtimes/cp311-1.1").is_dir():
            wrong = "the dependencies of the version that runs are gone"
        return "rolled back, nothing lost", wrong

    return flip_each("bit flips, boot files", original, scratch / "x", every_bytes, seed, judge)


class _NoService:
    """A machine at boot: nothing runs yet."""

    def wanted(self) -> bool:
        return False

    def restart(self) -> None:
        raise AssertionError("nothing is to be started")

    def alive(self) -> bool:
        return False

    def use(self, directory: Path) -> None:
        pass

    def runtime_dir(self) -> str | None:
        return None


# --- what the rounds of a job took from its inbox


def attack_inbox(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in what was noted of a finished round and of one under way: no data is
    trained on twice without a word.
    """
    original = scratch / "original"
    original.mkdir()
    inboxes = Inboxes(scratch / "inbox")
    inboxes.create("birds")
    for number, file in ((1, "first.csv"), (2, "second.csv")):
        (scratch / "inbox/birds" / file).write_text("1 2 3")
        for _ in range(2):
            inboxes.scan("birds", original)
        inboxes.round_directory("birds", original, number)
        if number == 1:
            inboxes.finish_round("birds", original, number)

    def judge(job_dir: Path) -> tuple[str, str]:
        found = Inboxes(scratch / "inbox")
        found.scan("birds", job_dir)
        told = found.scan("birds", job_dir)
        found.finish_round("birds", job_dir, 2)
        after = found.scan("birds", job_dir)
        if told.forgotten or after.forgotten:
            return "trained on again and said", ""
        again = after.new or set(told.new) - {"second.csv"}
        return "harmless", f"{again} is new again, and nobody says so" if again else ""

    return flip_each("bit flips, rounds of an inbox", original, scratch / "x", every_bytes, seed, judge)


# --- the ledger of energy


def attack_ledger(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in the ledger: it opens, or says why not, and can be written."""
    original = scratch / "original"
    ledger = Ledger(original / "energy.sqlite", NOON)
    ledger.set_meta("baselines", '{"cpu": 3.25}')
    for minute in range(40):
        charge = Charge(NOON + 60 * minute, f"{minute % 3}", EnergyPhase.FORWARD, Kind.MEASURED, 1.0, 2.0, 1.0)
        ledger.add_charges([charge], 0.0)
        ledger.add_event(NOON + minute, "test", "an event")
        ledger.add_gap(MeterGap(NOON + minute, NOON + minute + 0.5, "cpu", f"gap {minute}"))
    ledger.close(NOON + 3600)

    def judge(directory: Path) -> tuple[str, str]:
        try:
            ledger = Ledger(directory / "energy.sqlite", NOON + 4000)
        except LedgerError as error:
            return "refused and said", "" if "format" in str(error) else str(error)
        except Exception as error:
            return "not started", f"{type(error).__name__}: {error}"
        aside = any(".damaged-" in path.name for path in directory.iterdir())
        try:
            baselines = ledger.meta("baselines")
            ledger.add_charges([Charge(NOON + 4000, "0", EnergyPhase.FORWARD, Kind.MEASURED, 1.0, 2.0, 1.0)], 0.0)
            ledger.close(NOON + 4001)
        except (LedgerError, sqlite3.Error) as error:
            return "not written", str(error)
        told = aside or baselines is None
        wrong = "" if baselines in (None, '{"cpu": 3.25}') else f"a baseline of {baselines}"
        return "set aside and said" if told else "harmless or a figure", wrong

    return flip_each("bit flips, energy ledger", original, scratch / "x", every_bytes, seed, judge)


# --- a bundle


def attack_bundle(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in a bundle: whoever reads all of it is refused, or finds what was there before."""
    original = scratch / "original"
    original.mkdir()
    shutil.copy(small_bundle(), original / "job.port")
    good = Bundle(original / "job.port")

    def judge(directory: Path) -> tuple[str, str]:
        try:
            found = Bundle(directory / "job.port")
            read_everything(found)
        except BundleError:
            return "refused", ""
        same = (found.id, found.graphs, found.plans, found.costs) == (good.id, good.graphs, good.plans, good.costs)
        return "harmless", "" if same else "it is another bundle, and nobody says so"

    return flip_each("bit flips, bundle", original, scratch / "x", every_bytes, seed, judge)


# --- the state of a job that trains: commit records and page file


def attack_training_state(scratch: Path, *, every_bytes: int, seed: int = 1) -> AttackOutcome:
    """Flip bits in what a run that was cut after a few steps left: the next run ends with the
    bits of an undisturbed one.
    """
    expected = train(scratch / "undisturbed")[1]
    original = scratch / "original"
    train(original, stop_after=CUT_AFTER)
    left = len(train(shutil.copytree(original, scratch / "resumed"))[0])

    def judge(state_dir: Path) -> tuple[str, str]:
        try:
            losses, digest = train(state_dir)
        except PortError:
            return "refused and said", ""
        ending = "recovered, steps trained again" if len(losses) > left else "harmless"
        return ending, "" if digest == expected else "other bits, and nobody says so"

    return flip_each("bit flips, state of a training job", original, scratch / "x", every_bytes, seed, judge)

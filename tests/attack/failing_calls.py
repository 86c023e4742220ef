"""Every system call of a short run fails once, or from then on: no job and no step is lost, and nothing is told raw.

The run is a process of its own under a preloaded library (`failing_calls.c`, compiled here), which forks for each
attempt. Several such processes share the work: `attack_every_call`.
"""

import ctypes
import errno
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from port_agent.jobs.job import JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_planner.base.errors import PortError
from tests.attack.outcome import AttackOutcome
from tests.attack.short_service import check_service, serve_and_be_heard

SOURCE = Path(__file__).with_suffix(".c")
PATIENCE_S = 120
FAULTS = {
    "ENOSPC from then on": (errno.ENOSPC, True),
    "EROFS from then on": (errno.EROFS, True),
    "EIO once": (errno.EIO, False),
    "EINTR once": (errno.EINTR, False),
    "half a write": (0, False),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` works in a directory while a call fails, `check` looks at what it left, both in processes of their own.

    `run` raises PortError for what it could not do. `check` returns what is wrong, or an empty text.
    """

    run: Callable[[Path], None]
    check: Callable[[Path], str]


def attack_every_call(name: str, scratch: Path, every: int, processes: int = 1) -> AttackOutcome:
    """Run a scenario in so many processes with the library; every `every`-th call of it is made to fail."""
    library = scratch / "failing_calls.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    tried, refused = 0, 0
    harmed: list[str] = []
    with ExitStack() as running:
        started = []
        for place in range(processes):
            folder = scratch / str(place)
            folder.mkdir()
            command = [
                sys.executable,
                "-m",
                __name__,
                name,
                str(folder / "work"),
                str(every),
                str(place),
                str(processes),
            ]
            said = running.enter_context(tempfile.TemporaryFile("w+"))
            environment = {**os.environ, "LD_PRELOAD": str(library)}
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
            started.append((running.enter_context(process), said))
        for process, said in started:
            failed = process.wait()
            said.seek(0)
            text = said.read()
            if failed:
                raise RuntimeError(text[-3000:])
            part = json.loads(text.splitlines()[-1])
            tried, refused, harmed = tried + part["tried"], refused + part["refused"], harmed + part["harmed"]
    notes = f"{refused} refused with a sentence, {tried - refused - len(harmed)} went through"
    return AttackOutcome(f"failing system calls, {name}", tried, tried - len(harmed), tuple(harmed), notes)


def _attack(scenario: Scenario, folder: Path, every: int, place: int, processes: int) -> dict[str, object]:
    """Do the `place`-th share of the work; return how many attempts were made, how many refused, and what did harm."""
    library = ctypes.CDLL(None)
    library.failing_calls.restype = ctypes.c_long
    library.failing_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    tried, harmed, refused = 0, [], 0
    for order, (fault, (error, stays)) in enumerate(FAULTS.items()):
        count = _calls(scenario, folder, library, error)
        first = 1 + order * every // len(FAULTS) + place * every  # not the same calls for each fault
        for number in range(first, count + 1, every * processes):
            tried += 1
            where = f"{fault}, call {number} of {count}"
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "out").mkdir(parents=True)
            library.failing_arm(str(folder).encode(), number, error, int(stays))
            said = _in_a_fork(lambda: scenario.run(folder))
            library.failing_arm(b"", 0, 0, 0)
            refused += said.startswith("refused")
            if not said.startswith(("done", "refused")):
                harmed.append(f"{where}: {said}")
                continue
            wrong = _in_a_fork(lambda: _must_be_clean(scenario.check(folder)))
            if wrong != "done":
                harmed.append(f"{where}: {said}; afterwards {wrong}")
    return {"tried": tried, "refused": refused, "harmed": harmed}


def _calls(scenario: Scenario, folder: Path, library: ctypes.CDLL, error: int) -> int:
    """Return how many calls an undisturbed run makes that this fault can befall."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    counted = folder.with_name("calls")

    def run() -> None:
        library.failing_arm(str(folder).encode(), 0, error, 0)
        scenario.run(folder)
        counted.write_text(str(library.failing_calls()))

    said = _in_a_fork(run)
    if said != "done":
        raise RuntimeError(said)
    return int(counted.read_text())


def _must_be_clean(wrong: str) -> None:
    if wrong:
        raise AssertionError(wrong)


def _in_a_fork(work: Callable[[], None]) -> str:
    """Return how a piece of work ended in a process of its own: "done", "refused: ...", or
    what is wrong with its end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.dump_traceback_later(PATIENCE_S - 5)
        signal.alarm(PATIENCE_S)
        try:
            work()
            said = "done"
        except PortError as error:
            said = f"refused: {error}"
        except BaseException as error:  # whatever else ends it is what this attack looks for
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return said if os.WIFEXITED(status) else f"ended by signal {os.WTERMSIG(status)}"


# --- the job store: what was acknowledged is there afterwards


def _use_store(folder: Path) -> None:
    acknowledged = (folder.with_name("acknowledged")).open("w")
    store = JobStore(folder / "state")
    for number in range(3):
        job = store.add(JobSpec(f"job{number}", "bundle.port"), 1.0)
        acknowledged.write(f"{job.id} {int(job.state)}\n")
        acknowledged.flush()
        store.save(replace(job, state=JobState.PAUSED))
        store.note(1.0, job.id, "request", "paused")
        if store.flush():
            acknowledged.write(f"{job.id} {int(JobState.PAUSED)}\n")
            acknowledged.flush()
    store.save(replace(store.get(1), state=JobState.CANCELLED))
    store.remember("paused", "inf")
    if store.flush():
        acknowledged.write(f"1 {int(JobState.CANCELLED)}\n")
        acknowledged.flush()
    store.forget(1)
    if store.flush():
        acknowledged.write("1 0\n")
        acknowledged.flush()
    store.close()
    if store.trouble is not None:
        raise store.trouble


def _check_store(folder: Path) -> str:
    promised = dict(line.split() for line in (folder.with_name("acknowledged")).read_text().splitlines())
    store = JobStore(folder / "state")
    found = {str(job.id): job.state for job in store.all()}
    unkept = {number: job for number, job in store.set_aside.items() if str(number) in promised}
    if unkept or store.trouble is not None:  # one that was refused may be set aside
        return f"set aside {unkept}, trouble {store.trouble}"
    for number, state in promised.items():
        if state == "0" and number in found:
            return f"job {number} is back after it was forgotten"
        if state != "0" and number not in found and number != "1":
            return f"job {number} is lost"
        if state == str(int(JobState.PAUSED)) and found.get(number, JobState.PAUSED) is JobState.QUEUED:
            return f"job {number} runs although it was paused"
    added = store.add(JobSpec("next", "bundle.port"), 2.0)
    store.close()
    return "" if added.id not in map(int, promised) else f"id {added.id} is used twice"


# --- the trainer: what is resumed has the bits of an undisturbed run


def _train(folder: Path) -> None:
    from tests.agent.training.trained_job import trainer

    t = trainer(folder / "state", steps=4, checkpoint_every=2)
    t.start()
    t.train(lambda event: None, lambda *_: None)
    t.save_weights(folder / "out/w.safetensors")
    t.close()


def _check_trained(digest: str, folder: Path) -> str:
    from tests.agent.training.trained_job import train

    left = {path.name for path in (folder / "out").glob("*")} - {"w.safetensors"}
    got = train(folder / "state", steps=4)[1]
    if left:
        return f"left behind: {left}"
    return "" if got == digest else "other bits"


def main() -> None:
    """Attack as `attack_every_call` says, and print what came of it as JSON."""
    name, folder, every = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    place, processes = (int(word) for word in sys.argv[4:6])
    scenario = Scenario(_use_store, _check_store)
    if name == "daemon":
        scenario = Scenario(serve_and_be_heard, check_service)
    if name == "train":
        from tests.agent.training.trained_job import train

        digest = train(folder.with_name("reference"), steps=4)[1]
        scenario = Scenario(_train, lambda made: _check_trained(digest, made))
    sys.stdout.write(json.dumps(_attack(scenario, folder, every, place, processes)) + "\n")


if __name__ == "__main__":
    main()

"""What the daemon starts becomes the recipe with the rights of who submitted."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.worker.protocol import TrainingFailed, TrainingFinished, WorkerReady
from port_agent.worker.start import start_worker
from port_agent.worker.worker_options import FINETUNE_WORKER, WorkerOptions
from port_planner.base.errors import ExitCode
from tests.agent.finetuning.tiny_model import make_data, make_model

pytestmark = pytest.mark.process

USER = "nobody"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that all users may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


ROOTS_RIGHTS = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can take another user's rights")


@ROOTS_RIGHTS
def test_rights_are_given_up_for_good(tmp_path: Path) -> None:
    (tmp_path / "roots").write_text("secret")
    program = (
        "import os, sys\nfrom port_agent.finetuning.job import start\n"
        "home = start._take_rights_of(sys.argv[1])\n"
        "print(*os.getresuid(), *os.getresgid(), os.getgroups(), home['USER'], home['HOME'])\n"
        "for attempt in (lambda: os.setuid(0), lambda: open(sys.argv[2])):\n"
        "    try: attempt(); print('went')\n"
        "    except PermissionError: print('refused')\n"
    )
    words = [sys.executable, "-c", program, USER, str(tmp_path / "roots")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    entry = pwd.getpwnam(USER)
    ids = f"{entry.pw_uid} " * 3 + f"{entry.pw_gid} " * 3
    assert done.stdout.splitlines() == [f"{ids}[{entry.pw_gid}] {USER} {entry.pw_dir}", "refused", "refused"]


@ROOTS_RIGHTS
def test_a_user_who_is_gone_is_named(tmp_path: Path) -> None:
    options = FinetuneOptions("/model", ("/data",), "/out")
    job = FinetuneJob(options=options, ram_bytes=700 << 20, threads=1, page_dir="/", weights={}, data_sha256="")
    (tmp_path / "bundle.port").write_bytes(job.encoded())
    told = WorkerOptions(bundle=tmp_path / "bundle.port", state_dir=tmp_path, user="no-such-user")
    worker = start_worker([*FINETUNE_WORKER, *told.words()], limit_bytes=700 << 20)
    (failed,) = worker.events()
    assert isinstance(failed, TrainingFailed) and worker.process.returncode == ExitCode.IMPOSSIBLE
    assert failed.message == "user no-such-user, who submitted the job, no longer exists; submit the job again"


def runs_for(user: str) -> bool:
    """Return whether a user may run this interpreter."""
    entry = pwd.getpwnam(user)
    try:
        done = subprocess.run([sys.executable, "-c", ""], user=entry.pw_uid, group=entry.pw_gid, extra_groups=[])
    except PermissionError:
        return False
    return done.returncode == 0


@ROOTS_RIGHTS
def test_started_by_root_it_runs_as_the_user_and_leaves_that_users_files(open_folder: Path) -> None:
    if not runs_for(USER):
        pytest.skip(f"{sys.executable} is not for {USER}")
    model, data = make_model(open_folder / "model"), make_data(open_folder / "data.jsonl")
    mine, roots = open_folder / "mine", open_folder / "roots"
    mine.mkdir()
    roots.mkdir(mode=0o700)
    os.chown(mine, pwd.getpwnam(USER).pw_uid, -1)
    for path in model.iterdir():
        path.chmod(0o644)
    options = FinetuneOptions(str(model), (str(data),), str(mine / "out"), sequence_tokens=32, updates=2)
    job = roots / "bundle.port"
    job.write_bytes(FinetuneJob.of(options, ram_bytes=700 << 20, threads=1, page_dir=mine).encoded())
    told = WorkerOptions(bundle=job, state_dir=roots / "state", user=USER)
    worker = start_worker([*FINETUNE_WORKER, *told.words()], limit_bytes=700 << 20)
    rights = ""
    events = []
    for event in worker.events():
        events.append(event)
        if isinstance(event, WorkerReady):
            rights = Path(f"/proc/{worker.process.pid}/status").read_text()
    assert worker.process.returncode == ExitCode.DONE and isinstance(events[-1], TrainingFinished)
    number = pwd.getpwnam(USER).pw_uid
    assert f"Uid:\t{number}\t{number}\t{number}\t{number}" in rights and "CapEff:\t0000000000000000" in rights
    assert {path.stat().st_uid for path in (mine / "out").iterdir()} == {number}

"""A worker started with the environment it needs: threads, limits, its line, and nothing else of ours open."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.malloc import preload_environment
from port_agent.system.python_process import threads_environment
from port_agent.worker.protocol import LeaveNow, TrainingFinished, WorkerReady
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions

pytestmark = pytest.mark.process

TELLS_ITS_ENVIRONMENT = """
import json, os, resource, socket, sys
from pathlib import Path
from port_agent.worker.protocol import *
assert sys.argv[1] == "--control-fd"
line = socket.socket(fileno=int(sys.argv[2]))
found = [dict(os.environ), resource.getrlimit(resource.RLIMIT_DATA), sys.stdin.read(), sys.argv[2]]
Path(os.environ["REPORT"]).write_text(json.dumps(found))
line.sendall(encode_message(WorkerReady(pid=os.getpid(), step=0, total_steps=None)))
command = decode_command(line.recv(4096))
line.sendall(encode_message(TrainingFinished(step=0, out=type(command).__name__)))
"""


@pytest.mark.parametrize("data_limit_bytes", [None, 3 << 30])
def test_a_worker_has_its_threads_its_limits_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_limit_bytes: int | None
) -> None:
    monkeypatch.setenv("REPORT", str(tmp_path / "report"))
    worker = start_worker(
        [sys.executable, "-c", TELLS_ITS_ENVIRONMENT], limit_bytes=1 << 30, threads=3, data_limit_bytes=data_limit_bytes
    )
    events = worker.events()
    ready = next(events)
    assert isinstance(ready, WorkerReady) and ready.pid == worker.process.pid
    worker.send(LeaveNow())
    assert list(events) == [TrainingFinished(step=0, out="LeaveNow")]
    assert worker.process.returncode == 0, "the end of the line is awaited together with the process"
    environment, limit, stdin, _ = json.loads((tmp_path / "report").read_text())
    assert (
        threads_environment(3).items() <= environment.items() and environment["OMP_NUM_THREADS"] == "3" and stdin == ""
    )
    assert preload_environment(1 << 30).items() <= environment.items()
    expected = resource.getrlimit(resource.RLIMIT_DATA) if data_limit_bytes is None else (data_limit_bytes,) * 2
    assert tuple(limit) == expected


def test_a_worker_that_dies_ends_its_events() -> None:
    worker = start_worker([sys.executable, "-c", "import sys; sys.exit(9)"], limit_bytes=1 << 30)
    assert list(worker.events()) == [] and worker.process.returncode == 9
    worker.send(LeaveNow())  # nobody hears it, and that is no error


def test_where_its_errors_go() -> None:
    worker = start_worker(
        [sys.executable, "-c", "raise SystemExit('too bad')"], limit_bytes=1 << 30, stderr=subprocess.PIPE
    )
    assert list(worker.events()) == []
    assert worker.process.stderr is not None
    with worker.process.stderr as stream:
        assert stream.read() == b"too bad\n"


def test_the_torch_worker_reads_back_what_it_is_told(tmp_path: Path) -> None:
    told = TorchOptions(bundle=tmp_path / "a bundle", state_dir=tmp_path, steps=3, verify=4, digest=True)
    program, dash_m, module, *words = [word for word in torch_worker(told) if word != "-P"]
    assert (program, dash_m, module) == (sys.executable, "-m", "port_agent.training.worker")
    assert TorchOptions.parse(words, program="test") == told

"""The control socket: HTTP as it should and should not come, who may speak, metrics, and the command line on top."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main
from agent.control.agent_metrics import agent_families
from agent.control.client import ControlClient, ControlError
from agent.control.http import (
    HttpError,
    HttpRequest,
    HttpResponse,
    SocketPeer,
    json_response,
    peer_of,
    serve_connection,
)
from agent.system.prometheus import exposition
from tests.agent.live_daemon import BUNDLE, CONFIG, ROOT, daemon


async def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/fail":
        raise HttpError(409, "it is as it is")
    if request.path == "/stream":
        return HttpResponse(200, b"", "text/plain", pieces())
    if request.path == "/ignore":
        return json_response({})
    fields = await request.json()
    return json_response({"method": request.method, "path": request.path, "query": dict(request.query), **fields})


async def pieces() -> Any:
    for piece in (b"one ", b"", b"two"):
        yield piece


def converse(data: bytes, step: int | None = None, refused: str = "") -> bytes:
    """Return everything the server answers to `data`, sent whole or in pieces of `step` bytes."""

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        server_reader, server_writer = await asyncio.open_unix_connection(sock=theirs)
        task = asyncio.create_task(serve_connection(server_reader, server_writer, echo, lambda writer: refused))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        size = step or len(data) or 1
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        writer.write_eof()
        answer = await reader.read()
        await task
        writer.close()
        return answer

    return asyncio.run(asyncio.wait_for(run(), 20.0))


GET = b"GET /a%20b?x=1&y= HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b'POST /p HTTP/1.1\r\nContent-Length: 7\r\n\r\n{"a":1}'


@pytest.mark.parametrize("step", [None, 1, 7])
def test_requests_whole_in_pieces_and_glued(step: int | None) -> None:
    answer = converse(GET + POST + GET, step)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b'"path": "/a b", "query": {"x": "1", "y": ""}' in answer
    assert b'"path": "/p", "query": {}, "a": 1' in answer
    assert answer.count(b"Port-Agent-Api: 1") == 3


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, b"no HTTP/1.1 request"),
        (b"GET / SPDY/3\r\n\r\n", 400, b"no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400, b"is no number"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, b"Content-Length"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n{bad}", 400, b"no JSON"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400, b"no JSON object"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b" " * 9999999, 413, b"bytes of JSON"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 413, b"bytes of headers"),
        (b"GET / HTTP/1.1\r\nHost", 400, b"ends in its headers"),
        (b"GET /fail HTTP/1.1\r\n\r\n", 409, b"it is as it is"),
    ],
)
def test_bad_requests_are_answered(data: bytes, status: int, words: bytes) -> None:
    answer = converse(data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert words in answer


def test_a_body_that_nobody_reads_does_not_hide_the_answer() -> None:
    body = b"x" * 300_000
    request = b"POST /ignore HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert converse(request + body + GET).count(b"HTTP/1.1 200 OK") == 2


def test_a_torn_body_gets_no_answer_and_breaks_nothing() -> None:
    assert converse(b"POST /ignore HTTP/1.1\r\nContent-Length: 100\r\n\r\nshort") == b""


def test_streams_and_close() -> None:
    answer = converse(b"GET /stream HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in answer
    assert answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


def test_strangers_are_refused() -> None:
    assert converse(GET, refused="user 4711 is not in the group").startswith(b"HTTP/1.1 403 ")


def test_the_kernel_says_who_connected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(theirs) == SocketPeer(os.geteuid(), os.getegid(), os.getpid())


def first_lines(*words: str, number: int) -> str:
    """Return the first lines of a command that does not end by itself, as a pipe gets them."""
    command = [sys.executable, "-m", "agent.cli", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(number)]
        process.kill()
    return "".join(lines)


def test_the_command_line_from_submit_to_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--runtime-dir", str(tmp_path / "run")]

    def run(*words: str) -> str:
        assert main([*words, *place]) == 0
        return capsys.readouterr().out

    bundle = tmp_path / "Garden Birds.json"
    bundle.write_text(json.dumps(BUNDLE))
    with daemon(tmp_path):
        assert "Job 1 (garden-birds) is in line" in run("submit", str(bundle))
        log = run("logs", "-f", "1")  # ends when the job is over
        assert "worker starts" in log
        assert json.loads(run("job", "1", "--json"))["state"] == "finished"
        out = tmp_path / "weights"
        run("result", "garden-birds", "-o", str(out))
        assert json.loads(out.read_text())["step"] == BUNDLE["steps"]
        assert "finished" in run("jobs")
        assert "idle: no jobs" in run("status")
        assert first_lines("status", "--watch", *place, number=24).count("idle: no jobs") >= 2
        assert "Nothing is trained until `port-agent resume`" in run("pause")
        assert "Job 2 (held) is in line" in run("submit", str(bundle), "--name", "held", "--deadline", "8h")
        assert "waiting: paused by you" in run("status")
        assert "has priority 7" in run("priority", "held", "7")
        assert "no deadline" in run("deadline", "2", "none")
        assert "is paused" in run("pause", "held")
        assert "is queued" in run("resume", "held")
        assert "is cancelled" in run("cancel", "2")
        assert "Training goes on" in run("resume")
        assert str(tmp_path / "config.toml") in run("reload")
        assert json.loads(run("status", "--json"))["state"] == "idle"
        jobs = json.loads(run("jobs", "--all", "--json"))["jobs"]
        assert [job["state"] for job in jobs] == ["finished", "cancelled"]
        main(["doctor", "--no-flash", *place])
        assert "state directory" in capsys.readouterr().out
    assert main(["status", *place]) == 3
    assert "no agent is running" in capsys.readouterr().err


def test_feeding_a_job_that_waits_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--runtime-dir", str(tmp_path / "run")]
    bundle = tmp_path / "birds.json"
    bundle.write_text(json.dumps(BUNDLE))
    (tmp_path / "morning.txt").write_text("0.1 0.2 0.3")
    with daemon(tmp_path) as client:
        assert main(["submit", str(bundle), "--inbox", "--epochs", "1", *place]) == 0
        assert "inbox/birds" in capsys.readouterr().out
        assert main(["feed", "birds", str(tmp_path / "morning.txt"), *place]) == 0
        assert "1 files, 11 bytes" in capsys.readouterr().out
        end = time.monotonic() + 30.0
        while client.get("/v1/jobs/birds")["rounds"] < 1:
            assert time.monotonic() < end
        with pytest.raises(ControlError, match="no plain file name"):
            client.upload("/v1/inbox/birds/.hidden", tmp_path / "morning.txt")


def test_requests_that_are_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as client:
        for fields, words in (
            ({}, "needs a name"),
            ({"name": "x"}, "needs a bundle"),
            ({"name": "x", "upload": "../../etc/passwd"}, "no upload"),
            ({"name": "x", "bundle": "/nowhere.port"}, "cannot read the bundle"),
            ({"name": "x", "bundle": __file__, "epochs": "3"}, "expected int"),
            ({"name": "x", "bundle": __file__, "epochs": True}, "expected int"),
            ({"name": "x", "bundle": __file__, "colour": "red"}, "unknown settings of a job: colour"),
            ({"name": "x", "bundle": __file__, "kind": "cloud"}, "no job kind"),
            ({"name": "x", "bundle": __file__, "data": "/nowhere"}, "port-agent feed"),
            ({"name": "x", "bundle": __file__, "arguments": "word"}, "list of words"),
        ):
            with pytest.raises(ControlError, match=words):
                client.post("/v1/jobs", **fields)
        for path, status in (("/v1/jobs/77", 404), ("/v2/status", 404), ("/v1/jobs/77/result", 404)):
            with pytest.raises(ControlError) as caught:
                client.get(path)
            assert caught.value.status == status
        with pytest.raises(ControlError, match="not possible") as caught:
            client.post("/v1/status")
        assert caught.value.status == 405
        with pytest.raises(ControlError, match="for_s"):
            client.post("/v1/pause", for_s=-1)


def test_metrics_on_the_socket_and_on_localhost(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with daemon(tmp_path, CONFIG + f'[metrics]\nlisten = "127.0.0.1:{port}"\n') as client:
        text = client.text("/metrics")
        assert 'port_agent_state{state="idle"} 1.0' in text
        assert "port_agent_temperature_celsius" not in text  # unknown is absent, not zero
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert b"port_agent_uptime_seconds" in sock.makefile("rb").read()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST /v1/pause HTTP/1.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            assert sock.makefile("rb").read().startswith(b"HTTP/1.1 404")


def test_metrics_follow_the_text_format() -> None:
    status: dict[str, Any] = {
        "state": "training",
        "may_train": True,
        "uptime_s": 12.5,
        "facts": {
            "power": "battery",
            "battery_percent": 50.0,
            "temperature_c": 41.5,
            "free_disk_bytes": 1,
            "available_memory_bytes": None,
        },
        "flash_written_today_bytes": 7,
        "health": [{"severity": "error"}],
        "job": {
            "id": 3,
            "name": 'a"b\\c',
            "step": 5,
            "total_steps": None,
            "loss": 0.5,
            "step_s": None,
            "memory_limit_bytes": None,
        },
    }
    text = exposition(agent_families(status, []))
    assert 'port_agent_job_step{job="3",name="a\\"b\\\\c"} 5.0\n' in text
    assert "port_agent_external_power 0.0\n" in text
    assert "memory_available" not in text and "total_steps" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2


@pytest.mark.root
def test_another_user_may_not_use_the_socket() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as client:
        Path(name).chmod(0o755)  # pytest's own directories are closed to others
        client.path.chmod(0o666)  # even if the file's own mode lets everyone in, the daemon asks the kernel
        program = (
            "import os, sys; from pathlib import Path; from agent.control.client import *\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try: ControlClient(Path(sys.argv[1])).get('/v1/status')\n"
            "except ControlError as error: print(error.status, error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(client.path.parent)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.stdout.startswith("403 user 65534 is not in the group"), done.stdout + done.stderr


def test_a_file_that_is_no_socket(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="no agent is running"):
        ControlClient(tmp_path).get("/v1/status")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control.sock"))
    listener.close()
    with pytest.raises(ControlError, match="no agent listens"):
        ControlClient(tmp_path).get("/v1/status")


def test_completion_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        assert "submit" in capsys.readouterr().out


def test_a_configuration_that_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text("[when]\nidle_for = 'soon'\n")
    words = ["run", "--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r")]
    assert main([*words, "--config", str(tmp_path / "bad.toml")]) == 78
    assert "bad.toml:2: when.idle_for" in capsys.readouterr().err
    assert main([*words, "--config", str(tmp_path / "none.toml")]) == 2


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / ("x" * 120)
    assert main(["run", "--state-dir", str(tmp_path / "s"), "--runtime-dir", str(deep)]) == 1
    assert "another --runtime-dir" in capsys.readouterr().err


def test_a_metrics_port_that_is_taken_is_a_health_item(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with daemon(tmp_path, CONFIG + f'[metrics]\nlisten = "127.0.0.1:{port}"\n') as client:
            (item,) = [item for item in client.get("/v1/health")["health"] if item["code"] == "config"]
            assert f"127.0.0.1:{port}" in item["text"]


def test_boards_are_for_microcontroller_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "b.port"
    bundle.write_text("{}")
    assert main(["submit", str(bundle), "--simulate", "--runtime-dir", str(tmp_path)]) == 2
    assert "--kind mcu" in capsys.readouterr().err

"""The routes of the control socket, asked of a running agent: what is refused, metrics, strangers."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from port_agent.control.client import ControlError
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.supervisor.service import MAX_UPLOADS
from tests.agent.live_daemon import BUNDLE, CONFIG, LONG, ROOT, daemon

pytestmark = pytest.mark.process


def test_requests_that_are_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as client:
        for fields, words in (
            ({}, "missing required field `name`"),
            ({"name": "x"}, "needs a bundle"),
            ({"name": "x", "upload": "../../etc/passwd"}, "no upload"),
            ({"name": "x", "bundle": "/nowhere.port"}, "cannot read the bundle"),
            ({"name": "x", "bundle": __file__, "epochs": "3"}, r"got `str` - at `\$.epochs`"),
            ({"name": "x", "bundle": __file__, "epochs": True}, r"got `bool` - at `\$.epochs`"),
            ({"name": "x", "bundle": __file__, "colour": "red"}, "unknown settings of a job: colour"),
            ({"name": "x", "bundle": __file__, "kind": "cloud"}, "no job kind"),
            ({"name": "x", "bundle": __file__, "data": "/nowhere"}, "port-agent job feed"),
            ({"name": "x", "bundle": __file__, "arguments": "word"}, "Expected `array`"),
        ):
            with pytest.raises(ControlError, match=words):
                client.post("/v1/jobs", **fields)
        for path, status in (("/v1/jobs/77", 404), ("/v2/status", 404), ("/v1/jobs/77/result", 404)):
            with pytest.raises(ControlError) as caught:
                client.get(path)
            assert caught.value.status == status
        with pytest.raises(ControlError, match="not allowed") as caught:
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


@pytest.mark.root
def test_another_user_may_not_use_the_socket() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as client:
        Path(name).chmod(0o755)  # pytest's own directories are closed to others
        client.path.chmod(0o666)  # even if the file's own mode lets everyone in, the daemon asks the kernel
        program = (
            "import os, sys; from pathlib import Path; from port_agent.control.client import *\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try: ControlClient(Path(sys.argv[1])).get('/v1/status')\n"
            "except ControlError as error: print(error.status, error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(client.path.parent)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.stdout.startswith("403 user 65534 is not in the group"), done.stdout + done.stderr


def test_a_metrics_port_that_is_taken_is_a_health_item(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with daemon(tmp_path, CONFIG + f'[metrics]\nlisten = "127.0.0.1:{port}"\n') as client:
            (item,) = [item for item in client.get("/v1/health")["health"] if item["code"] == "config"]
            assert f"127.0.0.1:{port}" in item["text"]


def test_a_moment_that_is_none_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as client:
        assert [entry["text"] for entry in client.get("/v1/why?since=0")["entries"]][:1] == ["the agent started"]
        with pytest.raises(ControlError, match="is not a valid time"):
            client.get("/v1/why?since=yesterday")


def test_data_for_one_job_never_lands_in_another_place(tmp_path: Path) -> None:
    with daemon(tmp_path) as client:
        (tmp_path / "argparse.py").write_text("raise SystemExit")
        (tmp_path / "bundle").write_text(json.dumps(BUNDLE))
        job = client.post("/v1/jobs", name="evil", bundle=str(tmp_path / "bundle"), waits_for_data=True)
        inbox = Path(job["inbox"])
        inbox.rmdir()
        inbox.symlink_to("../jobs/1")
        with pytest.raises(ControlError, match="not followed"):
            client.upload("/v1/inbox/evil/argparse.py", tmp_path / "argparse.py")
        assert not (tmp_path / "state/jobs/1/argparse.py").exists()
        inbox.unlink()
        inbox.mkdir()
        (inbox / "argparse.py").symlink_to(tmp_path / "config.toml")
        client.upload("/v1/inbox/evil/argparse.py", tmp_path / "argparse.py")  # takes the link's place
        assert (inbox / "argparse.py").read_text() == "raise SystemExit" and not (inbox / "argparse.py").is_symlink()
        assert (tmp_path / "config.toml").read_text() == CONFIG
        assert [path.name for path in inbox.iterdir()] == ["argparse.py"]


def test_what_arrives_leaves_the_disk_its_rest(tmp_path: Path) -> None:
    config = CONFIG.replace("[storage]\nmin_free = 0", '[storage]\nmin_free = "1000T"')
    assert config != CONFIG
    (tmp_path / "bundle").write_bytes(b"x" * 100)
    with daemon(tmp_path, config) as client:
        with pytest.raises(ControlError, match=r"100 B do not fit: .* stay free") as caught:
            client.upload("/v1/uploads", tmp_path / "bundle")
        assert caught.value.status == 507
        assert list((tmp_path / "state/uploads").iterdir()) == []


def test_a_bundle_is_refused_before_it_is_sent_and_a_job_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text(json.dumps(LONG))
    with daemon(tmp_path) as client:
        job = client.submit(tmp_path / "bundle", name="birds")
        sent = job["spec"]["submission"]
        assert client.post("/v1/jobs", name="other", submission=sent)["id"] == job["id"]
        for fields, said, status in (
            ({"name": "birds", "bytes": 5}, "has this name", 409),
            ({"name": "12", "bytes": 5}, "is a number", 409),
            ({"name": "bees", "bytes": 1 << 60}, "do not fit", 507),
            ({"name": "bees", "bytes": "5"}, "not a valid file size", 400),
            ({"name": "bees", "bytes": 5, "submission": "x"}, "32 hexadecimal digits", 409),
        ):
            with pytest.raises(ControlError, match=said) as caught:
                client.post("/v1/submissions/check", **fields)
            assert caught.value.status == status
        assert len(client.get("/v1/jobs")["jobs"]) == 1 and not list((tmp_path / "state/uploads").iterdir())


def test_uploads_that_nobody_submits_are_counted(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(b"x")
    with daemon(tmp_path) as client:
        for _ in range(MAX_UPLOADS):
            client.upload("/v1/uploads", tmp_path / "bundle")
        with pytest.raises(ControlError, match="16 uploads wait"):
            client.upload("/v1/uploads", tmp_path / "bundle")


@pytest.mark.root
def test_a_fine_tuning_belongs_to_who_submitted_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    options = FinetuneOptions("/nowhere/model", ("/nowhere/data.jsonl",), "/nowhere/out")
    job = FinetuneJob(options=options, ram_bytes=1 << 40, threads=1, page_dir="/nowhere", weights={}, data_sha256="")
    other = (
        "import os, sys; from pathlib import Path; from port_agent.control.client import *\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "client = ControlClient(Path(sys.argv[1]))\n"
        "try: client.post('/v1/jobs/roots/cancel')\n"
        "except ControlError as error: print(error.status, error)\n"
        "upload = client.upload('/v1/uploads', Path(sys.argv[2]))['upload']\n"
        "print(client.post('/v1/jobs', name='nobodys', kind='finetune', upload=upload)['owner'])\n"
        "client.post('/v1/jobs/nobodys/pause')\n"
    )
    with (
        tempfile.TemporaryDirectory() as name,
        daemon(Path(name), CONFIG + '[control]\ngroup = "nogroup"\n') as client,
    ):
        Path(name).chmod(0o755)
        bundle = Path(name) / "job"
        bundle.write_bytes(job.encoded())
        upload = client.upload("/v1/uploads", bundle)["upload"]
        assert client.post("/v1/jobs", name="roots", kind="finetune", upload=upload)["owner"] == "root"
        words = [sys.executable, "-c", other, str(client.path.parent), str(bundle)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        refused, owner = done.stdout.splitlines()
        assert refused.startswith("403 job roots belongs to user 0; only that user") and owner == "nobody"
        assert client.get("/v1/jobs/nobodys")["state"] == "paused"

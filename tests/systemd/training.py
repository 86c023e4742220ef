"""A training job inside a system under test: submitting it, its conditions, its progress."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.systemd.host import Host, check
from tests.systemd.packages import CHECKOUT

SYSFS = "/srv/sysfs"
"""The agent reads batteries below this directory instead of /sys (`sensors.sysfs_root`)."""
CONFIG = f"""
[when]
idle_for = 0
min_pause = "1s"
[sensors]
sysfs_root = "{SYSFS}"
"""
COMMITTED = """
import msgpack, pathlib
steps = []
for path in pathlib.Path("/var/lib/port-agent").glob("jobs/*/state/commit.*"):
    data = path.read_bytes()
    if len(data) > 8:
        steps.append(msgpack.unpackb(data[:-8])["step"])
print(max(steps, default=-1))
"""
"""Prints the last committed step of the only job."""

ASK = """
import http.client, json, socket, sys, time

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/run/port-agent/control.sock")

def ask(path):
    connection = Connection("agent")
    connection.request("GET", path)
    return json.load(connection.getresponse())
"""
"""Talks to the agent's socket: the command line itself takes two seconds of an emulated processor for each call."""
WATCH = """
end = time.monotonic() + {timeout_s}
while time.monotonic() < end:
    try:
        job = ask("/v1/jobs/1")
    except (OSError, ValueError, http.client.HTTPException):
        job = {{}}  # the agent is being restarted
    value = job.get("{field}")
    if value is not None and value {test}:
        sys.exit(0)
    time.sleep(0.5)
print(json.dumps(job, indent=1))
sys.exit(1)
"""
"""Asks again and again until a field of the job passes a test."""


def make_bundle(directory: Path) -> Path:
    """Return a bundle of the tiny job, planned on this machine."""
    bundle = directory / "tiny.port"
    script = Path(__file__).with_name("tiny_job.py")
    plan = [sys.executable, "-m", "port_agent.cli", "plan", str(script), "--ram", "450M", "--strategy", "greedy"]
    plan += ["--page-dir", str(directory), "-o", str(bundle)]
    ran = subprocess.run(plan, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return bundle


def configure(host: Host) -> None:
    """Write the test's policy and a laptop's power supplies, plugged in."""
    check(host, "mkdir -p /etc/port-agent/config.d")
    check(host, f"cat > /etc/port-agent/config.d/50-test.toml <<'END'\n{CONFIG}\nEND")
    plug(host, inserted=True)


def plug(host: Host, *, inserted: bool) -> None:
    """Put the charger's plug in or pull it."""
    supplies: dict[str, dict[str, object]] = {
        "AC": {"TYPE": "Mains", "ONLINE": int(inserted)},
        "BAT0": {
            "TYPE": "Battery",
            "STATUS": "Charging" if inserted else "Discharging",
            "PRESENT": 1,
            "CAPACITY": 80,
            "SCOPE": "System",
        },
    }
    commands = []
    for name, values in supplies.items():
        folder = f"{SYSFS}/class/power_supply/{name}"
        uevent = "".join(f"POWER_SUPPLY_{key}={value}\\n" for key, value in {"NAME": name, **values}.items())
        files = {"uevent": uevent, "type": f"{values['TYPE']}\\n"}
        if "ONLINE" in values:
            files["online"] = f"{values['ONLINE']}\\n"
        commands.append(f"mkdir -p {folder} && cd {folder}")
        for file, text in files.items():  # renamed into place: a real attribute is never seen half written
            commands.append(f"printf '{text}' > .{file} && mv .{file} {file}")
    check(host, " && ".join(commands))


def submit(host: Host, bundle: str, *options: str) -> None:
    """Submit the job as a user of the command line does."""
    check(host, f"port-agent job submit {bundle} {' '.join(options)}")


def ask(host: Host, path: str) -> dict[str, Any]:
    """Return what the agent's socket answers below /v1."""
    program = f'{ASK}\nprint(json.dumps(ask("/v1/{path}")))'
    found: dict[str, Any] = json.loads(check(host, f"python3 - <<'END'\n{program}\nEND"))
    return found


def job(host: Host) -> dict[str, Any]:
    """Return everything about the only job."""
    return ask(host, "jobs/1")


def status(host: Host) -> dict[str, Any]:
    """Return what `port-agent status` shows."""
    return ask(host, "status")


def wait_for_job(host: Host, field: str, test: str, timeout_s: float = 300.0) -> None:
    """Return when a field of the job passes a test, such as `step`, `>= 20`."""
    program = ASK + WATCH.format(field=field, test=test, timeout_s=timeout_s)
    ran = host.run(f"python3 - <<'END'\n{program}\nEND", timeout_s + 60)
    if ran.rc != 0:
        log = host.run(
            "port-agent job logs 1; port-agent status; port-agent doctor --no-flash; port-agent job show 1"
        ).out
        journal = host.run("journalctl -u port-agent -n 30 --no-pager -o cat").out
        raise AssertionError(f"job: {field} {test} not within {timeout_s:.0f} s\n{ran.out}\n{log}\n{journal}")


def wait_for_new_step(host: Host, timeout_s: float) -> None:
    """Return when the job is further than it was when this was called: a worker trains now."""
    wait_for_job(host, "step", f"> {job(host)['step']}", timeout_s)


def committed_step(host: Host) -> int:
    """Return the step of the latest commit that is on the job's disk."""
    return int(check(host, f"/opt/port-agent/current/bin/python -c '{COMMITTED}'"))


def trained_weights(host: Host) -> str:
    """Return the checksum of the finished job's result."""
    check(host, "port-agent job result 1 --output /tmp/weights.safetensors")
    return check(host, "sha256sum /tmp/weights.safetensors").split()[0]

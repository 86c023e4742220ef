"""A Debian container with a real systemd as its first process: boots in two seconds, trains at native speed.

Memory limits and delegation work here only where the machine outside has a cgroup2 tree; the
emulated machine tests them.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.systemd.host import Ran

PLACE = ("--register=no", "--keep-unit", "--private-users=no", "--volatile=overlay")
"""Without machined, and everything written goes to a memory overlay: the cached tree stays pristine."""


class ContainerError(Exception):
    """The container did not come up; its console is in the message."""


def probe(tree: Path) -> str | None:
    """Return why no container can run here, or None."""
    if shutil.which("systemd-nspawn") is None:
        return "needs systemd-nspawn (apt-get install systemd-container)"
    ran = subprocess.run(
        ["systemd-nspawn", "-q", "-D", str(tree), *PLACE, "/bin/true"], capture_output=True, text=True, check=False
    )
    return None if ran.returncode == 0 else f"systemd-nspawn does not work here: {ran.stderr.strip()[-300:]}"


class Container:
    """One running container. Use as a context manager: it is killed at the end, whatever happens."""

    def __init__(self, tree: Path, read_only: Mapping[str, Path], *, network: bool = False) -> None:
        """Boot `tree` with directories of this machine mounted read-only; returns when systemd is up."""
        self._directory = Path(tempfile.mkdtemp(prefix="port-container-"))
        self._console = self._directory / "console.log"
        command = ["setpriv", "--pdeathsig", "KILL"]  # whatever ends us ends the container
        command += ["systemd-nspawn", "-q", "-D", str(tree), *PLACE, "--boot", "--console=pipe"]
        command += ["--resolv-conf=bind-host"] if network else []
        command += [f"--bind-ro={source}:{target}" for target, source in read_only.items()]
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            self._leader = self._wait_for_boot()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End the container at once."""
        for leader in self._children():
            subprocess.run(["kill", "-KILL", leader], check=False)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, command: str, timeout_s: float = 300.0) -> Ran:
        """Run a shell command inside and return its end; 124 when it took longer than the limit."""
        enter = ["nsenter", "-t", self._leader, "-a", "/bin/sh", "-c", command]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        try:
            ran = subprocess.run(
                enter,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return Ran(command, 124, (late.stdout or b"").decode(errors="replace"))
        return Ran(command, ran.returncode, ran.stdout.decode(errors="replace"))

    def _children(self) -> list[str]:
        found = subprocess.run(["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=False)
        return found.stdout.split()

    def _wait_for_boot(self) -> str:
        end = time.monotonic() + 90
        while time.monotonic() < end and self._process.poll() is None:
            for leader in self._children():
                self._leader = leader
                if self.run("systemctl is-system-running --wait", 60).out.strip() in ("running", "degraded"):
                    return leader
            time.sleep(0.2)
        raise ContainerError(self._console.read_text(errors="replace")[-2000:])

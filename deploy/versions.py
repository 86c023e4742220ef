#!/usr/bin/env python3
"""Install, switch and roll back versions of PORT agent under one directory (default /opt/port-agent).

    versions/0.2.0/    a virtual environment with the application only (2 MB)
    runtimes/<id>/     torch and the other dependencies (1 GB), shared by all versions with the same lock
    current, previous  symbolic links into versions/
    unconfirmed        names the version that was switched to and has not yet been seen working

Every step leaves a usable installation when the power fails: directories count only once their stamp is there, links
are replaced by renaming, and a version that never came up is rolled back at the next boot by
port-agent-rollback.service. Standard library only; run by the interpreter that is to run the agent (3.11 or later;
rolling back works with 3.10).
"""

import argparse
import compileall
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import plistlib
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

RUNTIME_BYTES = 1_500_000_000
"""What torch and the other dependencies take while pip unpacks them; measured 991 MiB installed on amd64."""
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WHEELHOUSE_HASHES = "wheelhouse.txt"
"""In a package that brings its wheels: their hashes, written when it was built."""
INDEX_HASHES = "hashes.txt"
"""In every package: the hashes of what the package index has of each version in requirements.txt but torch."""
CUDA_PARTS = re.compile(r"^(nvidia[-_]|cuda[-_]|triton)", re.IGNORECASE)
"""Distributions that a CUDA build of torch depends on: gigabytes, useless on a Pi."""


class SetupError(Exception):
    """A problem that a person must solve; the message says how."""


class ServiceError(SetupError):
    """The service did not come up, or did not stay up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The source of packages; `install.conf`, overridden by the environment."""

    torch_index: str
    """An index with CPU builds of torch only; empty: wherever pip looks."""
    wheelhouse: str
    """A directory of wheels to use instead of any index; empty: none."""
    allow_cuda: bool
    python: str
    """The interpreter to use; empty: found by `choose_python`."""
    settle_s: float
    """How long a started version must stay up, answering, before the switch counts."""
    hashes: str = ""
    """A file that `hashes` wrote, which every wheel must be in; empty: the package's own."""

    @classmethod
    def read(cls, file: Path, environment: Mapping[str, str]) -> "Settings":
        """Return the settings of a KEY=VALUE file, missing ones by default."""
        values = {"PORT_TORCH_INDEX": CPU_TORCH_INDEX, "PORT_WHEELHOUSE": "", "PORT_ALLOW_CUDA": "", "PORT_PYTHON": ""}
        values |= {"PORT_SETTLE_S": "5", "PORT_HASHES": ""}
        if file.exists():
            for line in file.read_text().splitlines():
                key, separator, value = line.partition("=")
                if separator and not line.lstrip().startswith("#"):
                    values[key.strip()] = value.strip().strip("\"'")
        values.update({key: value for key, value in environment.items() if key in values})
        return cls(
            torch_index=values["PORT_TORCH_INDEX"],
            wheelhouse=values["PORT_WHEELHOUSE"],
            hashes=values["PORT_HASHES"],
            allow_cuda=values["PORT_ALLOW_CUDA"] == "yes",
            python=values["PORT_PYTHON"],
            settle_s=float(values["PORT_SETTLE_S"]),
        )


class Service(Protocol):
    """The service manager, as far as a switch of versions needs it."""

    def wanted(self) -> bool:
        """Return whether the service is meant to run now."""

    def restart(self) -> None:
        """Start the current version and return when it is ready; raise `ServiceError` otherwise."""

    def alive(self) -> bool:
        """Return whether the service runs and has not restarted since `restart`."""

    def use(self, directory: Path) -> None:
        """Take the service definition that the version in `directory` was made for."""

    def runtime_dir(self) -> str | None:
        """Return where the service's control socket is; None where the command line finds it by itself."""


class Systemd:
    """`systemctl`; the unit says READY itself, so a successful restart is a working start."""

    unit = "port-agent.service"
    packaged = Path("/usr/lib/systemd/system/port-agent.service")
    override = Path("/etc/systemd/system/port-agent.service")
    mark = "# Written by port-agent-versions: the unit of the version that was rolled back to.\n"

    def wanted(self) -> bool:
        """Return whether systemd runs here and the unit is enabled or active."""
        if not Path("/run/systemd/system").is_dir():
            return False
        return any(self._systemctl(verb, "--quiet", self.unit).returncode == 0 for verb in ("is-active", "is-enabled"))

    def restart(self) -> None:
        """Restart the unit; a unit that gave up after too many failures is allowed to try again."""
        self._systemctl("daemon-reload")
        self._systemctl("reset-failed", self.unit)
        if self._systemctl("restart", self.unit).returncode != 0:
            journal = ["journalctl", "--unit", self.unit, "--lines=8", "--no-pager", "--output=cat"]
            last = subprocess.run(journal, capture_output=True, text=True, check=False).stdout
            raise ServiceError(f"the service did not start; last messages (journalctl -u port-agent):\n{last}")

    def alive(self) -> bool:
        """Return whether the unit is active and was not restarted by systemd since."""
        restarts = self._systemctl("show", "--property=NRestarts", "--value", self.unit).stdout.strip()
        return self._systemctl("is-active", "--quiet", self.unit).returncode == 0 and restarts in ("", "0")

    def use(self, directory: Path) -> None:
        """Put the version's own unit before the packaged one where they differ; an administrator's unit stays."""
        own = directory / self.unit
        if self.override.exists() and not self.override.read_text().startswith(self.mark):
            return
        if not own.exists() or not self.packaged.exists() or own.read_text() == self.packaged.read_text():
            self.override.unlink(missing_ok=True)
        else:
            self.override.write_text(self.mark + own.read_text())

    def runtime_dir(self) -> str | None:
        """Return None: the unit uses the default, /run/port-agent."""
        return None

    def _systemctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)


class Launchd:
    """`launchctl` on macOS; launchd has no readiness, so the control socket decides."""

    label = "system/org.port-agent.daemon"
    plist = "/Library/LaunchDaemons/org.port-agent.daemon.plist"

    def wanted(self) -> bool:
        """Return whether the property list is installed."""
        return Path(self.plist).exists()

    def restart(self) -> None:
        """Load the job if necessary, and restart it."""
        if self._launchctl("print", self.label).returncode != 0:
            self._launchctl("bootstrap", "system", self.plist)
        if self._launchctl("kickstart", "-k", self.label).returncode != 0:
            raise ServiceError("launchd did not start the agent (see Library/Logs/port-agent.log of its user)")

    def alive(self) -> bool:
        """Return whether launchd shows the job running."""
        return "state = running" in self._launchctl("print", self.label).stdout

    def use(self, directory: Path) -> None:
        """Do nothing: the property list names no version and stays the same."""

    def runtime_dir(self) -> str | None:
        """Return the directory that the property list passes on: macOS has no /run."""
        arguments: list[str] = plistlib.loads(Path(self.plist).read_bytes())["ProgramArguments"]
        return arguments[arguments.index("--runtime-dir") + 1]

    def _launchctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["launchctl", *arguments], capture_output=True, text=True, check=False)


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link somewhere else in one step."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_directory(link.parent)


def write_durably(file: Path, text: str) -> None:
    """Write a file so that a power cut leaves it whole, or as it was."""
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Return when the entries of a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Store:
    """The installed versions under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._unconfirmed = root / "unconfirmed"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other change: dpkg and the rollback unit may run at once."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def linked(self, name: str) -> str | None:
        """Return the version that `current` or `previous` names, if it is complete."""
        link = self.root / name
        if not link.is_symlink():
            return None
        version = link.readlink().name
        return version if (self.version(version) / "installed.json").exists() else None

    def version(self, version: str) -> Path:
        """Return the directory of a version."""
        return self.root / "versions" / version

    def unconfirmed(self) -> str | None:
        """Return the version that was switched to and has not been seen working.

        A file that is empty or damaged is what a crash left of a switch: then the current version is the one on trial.
        """
        if not self._unconfirmed.exists():
            return None
        return next(iter(self._trial()), None) or self.linked("current")

    def switch(self, version: str) -> None:
        """Make `version` current and on trial; `previous` is where the way back leads."""
        before = self.linked("current")
        older = self.linked("previous") or "-"
        if before is not None and before != version:
            replace_link(self.root / "previous", f"versions/{before}")
        write_durably(self._unconfirmed, 2 * sealed_line(version, older))
        replace_link(self.root / "current", f"versions/{version}")

    def back(self, version: str, older: str | None) -> None:
        """Make an earlier version current again, and `older` the one before it."""
        replace_link(self.root / "current", f"versions/{version}")
        if older is None or older == version:
            (self.root / "previous").unlink(missing_ok=True)
        else:
            replace_link(self.root / "previous", f"versions/{older}")
        self.confirm()

    def before_trial(self) -> str | None:
        """Return what `previous` was before the switch that is still on trial."""
        words = self._trial() if self._unconfirmed.exists() else ()
        return words[1] if len(words) > 1 and words[1] != "-" else None

    def _trial(self) -> tuple[str, ...]:
        """Return the version on trial and what `previous` was, nothing where both lines are damaged.

        An earlier version of this script wrote one line.
        """
        content = self._unconfirmed.read_bytes()
        half = len(content) // 2
        found = (unsealed_words(part, 2) for part in (content[:half], content[half:], content))
        return next(filter(None, found), ())

    def confirm(self) -> None:
        """End the trial of the current version."""
        self._unconfirmed.unlink(missing_ok=True)
        sync_directory(self.root)

    def prune(self) -> None:
        """Remove all versions but `current` and `previous`, and unused runtimes.

        If a stamp is damaged, no runtime can be attributed, and all of them stay.
        """
        kept = {self.linked("current"), self.linked("previous")} - {None}
        used = set()
        for directory in sorted((self.root / "versions").iterdir()):
            if directory.name in kept:
                used.add(runtime_of(directory))
            else:
                shutil.rmtree(directory)
        if None in used:
            return
        for directory in sorted((self.root / "runtimes").iterdir()):
            if directory.name not in used and os.access(directory, os.W_OK) and not directory.is_mount():
                shutil.rmtree(directory)


def checksum(text: str) -> str:
    """Return the CRC-32 of a text in hexadecimal."""
    return f"{zlib.crc32(text.encode()):08x}"


def sealed_line(*words: str) -> str:
    """Return a line of words and their checksum."""
    return f"{' '.join(words)} {checksum(' '.join(words))}\n"


def unsealed_words(content: bytes, count: int) -> tuple[str, ...]:
    """Return the words of a sealed line, or () if it is damaged."""
    words = content.decode("ascii", errors="replace").split()
    return tuple(words[:count]) if words[count:] == [checksum(" ".join(words[:count]))] else ()


def write_stamp(directory: Path, version: str, runtime: str) -> None:
    """Mark an installed version as complete, and record its runtime."""
    stamp = {"version": version, "runtime": runtime, "python": sys.executable}
    write_durably(directory / "installed.json", json.dumps({**stamp, "seal": checksum(json.dumps(stamp))}) + "\n")


def runtime_of(directory: Path) -> str | None:
    """Return the runtime that an installed version uses, or None if its stamp is damaged."""
    try:
        stamp = json.loads((directory / "installed.json").read_bytes())
        seal = stamp.pop("seal", None)
        runtime = stamp["runtime"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return runtime if seal in (None, checksum(json.dumps(stamp))) and isinstance(runtime, str) else None


@dataclass(frozen=True, slots=True)
class Payload:
    """What a package brings: the application, its lock, pip, its units, perhaps wheels."""

    directory: Path

    @property
    def application(self) -> Path:
        """The directory that goes into site-packages."""
        return self.directory / "app"

    @property
    def lock(self) -> Path:
        """The exact versions of all dependencies."""
        return self.directory / "requirements.txt"

    @property
    def version(self) -> str:
        """The version in the application's metadata."""
        (metadata,) = self.application.glob("port_agent-*.dist-info/METADATA")
        match = re.search(r"^Version: (\S+)$", metadata.read_text(), re.MULTILINE)
        if match is None:
            raise SetupError(f"{metadata} names no version; the package is damaged, install it again")
        return match[1]

    def runtime_id(self, settings: Settings) -> str:
        """Return the name of the runtime: lock, interpreter and machine decide it."""
        kind = f"cp{sys.version_info.major}{sys.version_info.minor}-{sys.platform}-{platform.machine()}"
        digest = hashlib.sha256(self.lock.read_bytes() + f"{kind} {settings.allow_cuda}".encode())
        return f"{kind}-{digest.hexdigest()[:12]}"


def install(store: Store, payload: Payload, settings: Settings) -> str:
    """Make the payload's version available, without switching to it, and return it."""
    version, runtime = payload.version, payload.runtime_id(settings)
    ensure_runtime(store.root / "runtimes" / runtime, payload, settings)
    directory = store.version(version)
    if version == store.linked("current"):  # the same version again: build it alongside, then take its place
        directory = store.version(f"{version}+{time.strftime('%Y%m%d%H%M%S')}")
    if directory.exists():
        shutil.rmtree(directory)
    venv.create(directory, symlinks=True, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    shutil.copytree(payload.application, site, dirs_exist_ok=True)
    (site / "port_runtime.pth").write_text(f"{store.root / 'runtimes' / runtime}\n")
    compileall.compile_dir(site, quiet=1)
    write_launcher(directory)
    for unit in payload.directory.glob("port-agent.service"):
        shutil.copy(unit, directory)
    smoke_test(directory)
    os.sync()
    write_stamp(directory, version, runtime)
    return directory.name


def write_launcher(directory: Path) -> None:
    """Write `bin/port-agent`; -I keeps the caller's PYTHONPATH and working directory out."""
    launcher = directory / "bin/port-agent"
    launcher.write_text(
        f"#!{directory}/bin/python -I\nimport sys\n\nfrom port_agent.cli import main\n\nsys.exit(main())\n"
    )
    launcher.chmod(0o755)


def smoke_test(directory: Path) -> None:
    """Run the new command line once; nothing has been switched yet if it fails."""
    ran = subprocess.run([directory / "bin/port-agent", "--help"], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SetupError(f"the new version does not run at all:\n{ran.stderr.strip()[-1000:]}")


def ensure_runtime(runtime: Path, payload: Payload, settings: Settings) -> None:
    """Install torch and the other dependencies into `runtime` unless they are there."""
    if (runtime / ".complete").exists():
        return
    free = shutil.disk_usage(next(p for p in runtime.parents if p.exists())).free
    if free < RUNTIME_BYTES:
        raise SetupError(
            f"{free // 10**6} MB free, but the dependencies need {RUNTIME_BYTES // 10**6} MB; free some space"
        )
    if runtime.exists():
        shutil.rmtree(runtime)
    bundled = payload.directory / "wheelhouse"
    wheelhouse = settings.wheelhouse or (str(bundled) if bundled.is_dir() else "")
    (pip,) = payload.directory.glob("pip-*.whl")
    common = [sys.executable, f"{pip}/pip", "install", "--no-input", "--disable-pip-version-check"]
    common += ["--root-user-action=ignore", "--only-binary=:all:", "--target", str(runtime), "--upgrade"]
    hashes = Path(settings.hashes) if settings.hashes else payload.directory / WHEELHOUSE_HASHES
    if settings.hashes or (wheelhouse == str(bundled) and hashes.exists()):
        common.append("--require-hashes")
        wanted = hashed_lock(payload.lock.read_text(), hashes)
    else:
        wanted = payload.lock.read_text()
    if wheelhouse:
        pip_requirements([*common, "--no-index", "--find-links", wheelhouse], wanted, runtime, settings)
    else:
        torch = "".join(re.findall(r"^torch==.*\n?", wanted, re.MULTILINE))
        index = ["--index-url", settings.torch_index] if settings.torch_index else []
        pip_requirements([*common, "--no-deps", *index], torch, runtime, settings)
        refuse_cuda(runtime, settings)
        rest, hashes = wanted.replace(torch, ""), payload.directory / INDEX_HASHES
        if not settings.hashes and hashes.exists():
            common.append("--require-hashes")
            rest = hashed_lock(rest, hashes)
        pip_requirements([*common, "--no-deps"], rest, runtime, settings)
    refuse_cuda(runtime, settings)
    os.sync()
    write_durably(runtime / ".complete", payload.lock.read_text())


def pip_requirements(command: list[str], wanted: str, runtime: Path, settings: Settings) -> None:
    """Run pip on the text of a requirements file."""
    file = runtime.parent / f".{runtime.name}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(wanted)
    run_pip([*command, "-r", str(file)], settings)
    file.unlink()


def wheel_hashes(directory: Path) -> str:
    """Return the requirements that the wheels in a directory meet, each with the SHA-256 of its wheels.

    Of any platform, and with or without a local part of the version (torch's +cpu).
    """
    digests: dict[str, list[str]] = {}
    for wheel in sorted(directory.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        digests.setdefault(f"{distribution(name)}=={version.partition('+')[0]}", []).append(f"--hash=sha256:{digest}")
    if not digests:
        raise SetupError(f"there is no wheel in {directory}; `pip download` fetches those of requirements.txt")
    return "".join(f"{wanted} {' '.join(found)}\n" for wanted, found in digests.items())


def hashed_lock(lock: str, hashes: Path) -> str:
    """Return a file of hashes, one line for each version; raise unless it has every version that the lock names."""
    try:
        text = hashes.read_text().replace("\\\n", "")
    except OSError as error:
        raise SetupError(f"PORT_HASHES: {hashes} cannot be read: {error.strerror}") from error
    have = set(re.findall(r"^(\S+==\S+) +--hash=", text, re.MULTILINE))
    lines = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    missing = sorted({f"{distribution(name)}=={version}" for name, version in lines} - have)
    if missing:
        raise SetupError(
            f"{hashes} has no hash for {', '.join(missing)}; write it again: port-agent-versions hashes DIRECTORY, "
            "where the wheels of requirements.txt lie"
        )
    return text


def distribution(name: str) -> str:
    """Return the name of a distribution as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run_pip(command: list[str], settings: Settings) -> None:
    """Run pip, its output going to ours."""
    if subprocess.run(command, check=False).returncode != 0:
        source = settings.wheelhouse or settings.torch_index or "the package index"
        raise SetupError(
            f"pip could not install the dependencies from {source}; without a network put the wheels of "
            "requirements.txt into a directory and set PORT_WHEELHOUSE in /etc/port-agent/install.conf; a wheel whose "
            "hash differs was damaged or exchanged"
        )


def refuse_cuda(runtime: Path, settings: Settings) -> None:
    """Remove the runtime and raise if torch is a CUDA build: the default arm64 wheel is one
    and asks for gigabytes more.
    """
    try:
        check_cpu_build(runtime, settings)
    except SetupError:
        shutil.rmtree(runtime)
        raise


def check_cpu_build(packages: Path, settings: Settings) -> None:
    """Raise if torch in a directory of packages is a CUDA build, and none is allowed."""
    if settings.allow_cuda:
        return
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    needs = re.findall(r"^Requires-Dist: ([A-Za-z0-9._-]+)", metadata.read_text(), re.MULTILINE)
    cuda = sorted({name for name in needs if CUDA_PARTS.match(name)})
    if cuda:
        raise SetupError(
            f"this torch is a CUDA build (it wants {', '.join(cuda[:4])}); set PORT_TORCH_INDEX to an index of CPU "
            "builds, or PORT_ALLOW_CUDA=yes if that is what you want, in /etc/port-agent/install.conf or the "
            "environment"
        )


def activate(store: Store, version: str, service: Service, settle_s: float) -> str:
    """Switch to `version`, and back if it does not come up; return what was done."""
    before, older = store.linked("current"), store.linked("previous")
    store.switch(version)
    service.use(store.version(version))
    if not service.wanted():
        return f"version {version} is installed; it is on trial at its first start"
    try:
        service.restart()
        stay_up(store, service, settle_s)
    except ServiceError as failure:
        if before is None or before == version:
            raise
        store.back(before, older)
        service.use(store.version(before))
        service.restart()
        store.prune()
        raise ServiceError(f"version {version} was rolled back, {before} runs again: {failure}") from failure
    store.confirm()
    store.prune()
    return f"version {version} runs"


def stay_up(store: Store, service: Service, settle_s: float) -> None:
    """Return when the service has stayed up for a while and answers on its socket."""
    end = time.monotonic() + settle_s
    while time.monotonic() < end:
        if not service.alive():
            raise ServiceError("the service stopped right after its start (journalctl -u port-agent says why)")
        time.sleep(0.5)
    command = [str(store.root / "current/bin/port-agent"), "status", "--json"]
    if (place := service.runtime_dir()) is not None:
        command += ["--runtime-dir", place]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise ServiceError(f"the service runs but does not answer: {asked.stderr.strip()[-300:]}")


def rollback(store: Store, service: Service, *, only_unconfirmed: bool) -> str:
    """Go back to the version before; the rollback unit asks only for versions on trial."""
    current, before = store.linked("current"), store.linked("previous")
    trial = store.unconfirmed()
    if only_unconfirmed and trial is None:
        return f"version {current} has worked before; nothing to roll back"
    if trial is not None and current is not None and (trial != current or before == current):
        # the power went before the switch
        store.back(current, store.before_trial())
        return f"the switch to {trial} was cut off; {current} stays"
    if before is None or before == current:
        raise SetupError("there is no earlier version to go back to")
    store.back(before, store.before_trial())
    service.use(store.version(before))
    if service.wanted():
        service.restart()
    return f"went back from {current} to {before}"


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of this script."""
    parser = argparse.ArgumentParser(prog="port-agent-versions", description="Install and switch versions.")
    parser.add_argument("--root", type=Path, default=Path("/opt/port-agent"))
    parser.add_argument("--payload", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--settings", type=Path, default=Path("/etc/port-agent/install.conf"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install the payload's version and switch to it, or roll back")
    runtime = commands.add_parser("runtime", help="install the dependencies only, into a directory")
    runtime.add_argument("directory", type=Path)
    back = commands.add_parser("rollback", help="go back to the version before")
    back.add_argument("--if-unconfirmed", action="store_true")
    commands.add_parser("list", help="show versions")
    commands.add_parser("cpu-build", help="refuse a CUDA build of torch in the environment that runs this")
    hashes = commands.add_parser("hashes", help="print requirements with the hash of every wheel in a directory")
    hashes.add_argument("directory", type=Path)
    return parser


def run(arguments: argparse.Namespace) -> str:
    """Execute the command line and return a message."""
    store, payload = Store(arguments.root), Payload(arguments.payload)
    settings = Settings.read(arguments.settings, os.environ)
    service: Service = Launchd() if sys.platform == "darwin" else Systemd()
    if arguments.command == "runtime":
        runtime = arguments.directory / payload.runtime_id(settings)
        ensure_runtime(runtime, payload, settings)
        return str(runtime)
    if arguments.command == "cpu-build":
        check_cpu_build(Path(sysconfig.get_path("platlib")), settings)
        return "torch is a CPU build, or CUDA is allowed"
    if arguments.command == "hashes":
        sys.stdout.write(wheel_hashes(arguments.directory))
        return f"hashed the wheels in {arguments.directory}"
    if arguments.command == "list":
        return f"current {store.linked('current')}, previous {store.linked('previous')}, trial {store.unconfirmed()}"
    with store.locked():
        if arguments.command == "rollback":
            return rollback(store, service, only_unconfirmed=arguments.if_unconfirmed)
        return activate(store, install(store, payload, settings), service, settings.settle_s)


def choose_python(settings: Settings) -> str:
    """Return the interpreter for the agent: CPython 3.11 or later."""
    names = [settings.python] if settings.python else ["python3", "python3.13", "python3.12", "python3.11"]
    probe = "import ctypes, sqlite3, ssl, sys, venv; sys.exit(sys.version_info < (3, 11))"
    for name in names:
        path = shutil.which(name)
        if path and subprocess.run([path, "-I", "-c", probe], capture_output=True, check=False).returncode == 0:
            return path
    raise SetupError(f"none of {', '.join(names)} is a complete Python 3.11 or later; install one or set PORT_PYTHON")


def continue_with_right_python(arguments: argparse.Namespace) -> None:
    """Replace this process by one under the chosen interpreter, once."""
    if arguments.command not in ("install", "runtime") or "PORT_VERSIONS_PYTHON" in os.environ:
        return
    python = choose_python(Settings.read(arguments.settings, os.environ))
    os.environ["PORT_VERSIONS_PYTHON"] = python
    os.execv(python, [python, "-I", *sys.argv])


def main() -> int:
    """Run one command; return 1 and print a message if a person must act."""
    arguments = build_parser().parse_args()
    try:
        continue_with_right_python(arguments)
        done = run(arguments)
        (sys.stderr if arguments.command == "hashes" else sys.stdout).write(f"port-agent: {done}\n")
    except SetupError as error:
        sys.stderr.write(f"port-agent: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

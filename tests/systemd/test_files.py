"""What ships beside the program: unit, property list, scripts."""

import plistlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.versions import hashed_lock
from tests.systemd.packages import CHECKOUT

SCRIPTS = sorted([*CHECKOUT.glob("deploy/*.sh"), *CHECKOUT.glob("deploy/*/*.sh"), *CHECKOUT.glob("deploy/debian/*")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_script_is_clean_and_executable(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", str(script)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.process
def test_unit_is_rated_at_most_2_1(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "port-agent.service"
    shutil.copy(CHECKOUT / "systemd/port-agent.service", unit)
    rate = ["systemd-analyze", "security", "--offline=true", "--threshold=21", "--no-pager", str(unit)]
    rated = subprocess.run(rate, capture_output=True, text=True, check=False)
    assert rated.returncode == 0, rated.stdout[-2000:] + rated.stderr


def test_unit_leaves_on_what_training_needs() -> None:
    unit = (CHECKOUT / "systemd/port-agent.service").read_text()
    for breaks in (
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "ProtectControlGroups",
        "ProcSubset",
        "DelegateSubgroup",
    ):
        assert not re.search(rf"^{breaks}=", unit, re.MULTILINE), breaks


def test_unit_and_user_reach_a_gpu() -> None:
    """A Jetson's GPU is nvhost, nvgpu and nvmap, and its memory comes through the last; a card's is /dev/nvidia*."""
    unit = (CHECKOUT / "systemd/port-agent.service").read_text()
    for device in ("char-nv*", "/dev/nvmap", "char-drm"):
        assert f"\nDeviceAllow={device} rw\n" in unit
    users = (CHECKOUT / "systemd/port-agent.sysusers").read_text()
    assert all(f"\nm port-agent {group}\n" in users for group in ("video", "render"))


def test_property_list_is_valid_and_runs_the_same_command() -> None:
    text = (CHECKOUT / "deploy/macos/org.port-agent.daemon.plist").read_text()
    job = plistlib.loads(text.replace("@USER@", "ann").replace("@HOME@", "/Users/ann").encode())
    unit = (CHECKOUT / "systemd/port-agent.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert command is not None
    options = [word for word in command[1].split() if word.startswith("--")]
    assert [word for word in job["ProgramArguments"] if word.startswith("--")] == options
    assert job["ProgramArguments"][0] == command[1].split()[0]
    assert job["ProgramArguments"][5].startswith("/Users/ann/"), "uninstall.sh reads the state directory there"
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["Umask"] == 0o027


def test_lock_satisfies_the_project() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    lock = (CHECKOUT / "deploy/requirements.txt").read_text()
    pinned = dict(re.findall(r"^([a-z0-9_.-]+)==([0-9][^\s]*)$", lock, re.MULTILINE))
    for requirement in project["dependencies"]:
        match = re.match(r"([a-z0-9-]+)>=([0-9.]+)", requirement)
        assert match is not None, requirement
        assert as_numbers(pinned[match[1]]) >= as_numbers(match[2]), requirement


def test_every_locked_version_has_its_hashes() -> None:
    """Of files of both Linux machines; torch comes from an index of its own."""
    lock = (CHECKOUT / "deploy/requirements.txt").read_text()
    rest = re.sub(r"^torch==.*\n", "", lock, flags=re.MULTILINE)
    hashed = hashed_lock(rest, CHECKOUT / "deploy/hashes.txt")
    lines = [line for line in hashed.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(re.findall(r"^\S+==", rest, re.MULTILINE))
    assert all(re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", line) for line in lines)


def as_numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


CLEAN_MACHINE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if not (top in sys.argv or top in sys.stdlib_module_names or top.startswith(("port_", "_"))):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
from port_agent import cli
cli.main(["manual"])
"""


@pytest.mark.process
def test_the_installer_fetches_what_the_manual_page_is_made_with() -> None:
    """On a clean machine nothing else is there when the package is built."""
    fetched = re.search(r'pip" install -q (.*) \|\|', (CHECKOUT / "deploy/install.sh").read_text())
    assert fetched is not None
    made = subprocess.run(
        [sys.executable, "-c", CLEAN_MACHINE, *fetched[1].split()], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0 and "run\\-now" in made.stdout, made.stderr

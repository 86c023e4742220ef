"""What a release publishes is whole: the wheel has all that the sources have, installs where
nothing of ours is, and trains.
"""

import hashlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from datetime import date
from pathlib import Path

import pytest
import torch

from deploy.changelog import ChangelogError, cut, section
from deploy.release import bill_of_materials, checksums
from port_agent.system import VERSION
from tests.systemd.packages import CHECKOUT

TEXT = "# Changelog\n\n## [Unreleased]\n\n### Added\n- new\n\n## [0.1.0] - 2026-01-02\n\n### Fixed\n- old\n"
TRAIN = "import torch\nfrom torch import nn\nm = nn.Linear(512, 512)\nfor _ in range(3): m(torch.ones(64, 512)).sum().backward()\nprint('trained')\n"


def test_a_version_is_cut_and_read() -> None:
    after = cut(TEXT, "0.2.0", date(2026, 11, 29))
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-11-29\n\n### Added\n- new" in after
    assert section(after, "0.2.0") == "### Added\n- new" and section(after, "0.1.0") == "### Fixed\n- old"
    assert section(after, "Unreleased") == ""


@pytest.mark.parametrize(("version", "reason"), [("0.1.0", "already"), ("next", "not a valid version")])
def test_a_version_that_cannot_be_cut(version: str, reason: str) -> None:
    with pytest.raises(ChangelogError, match=reason):
        cut(TEXT, version, date(2026, 11, 29))
    with pytest.raises(ChangelogError, match="no version 9"):
        section(TEXT, "9")


def test_the_bill_has_every_dependency_with_its_hashes() -> None:
    hashed, exact = ((CHECKOUT / "deploy" / name).read_text() for name in ("hashes.txt", "requirements.txt"))
    bill = bill_of_materials(hashed, exact, "1.2.3")
    hashes = {row["name"]: row["externalReferences"] for row in bill["components"]}
    pinned = [
        line
        for line in (CHECKOUT / "deploy/requirements.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    ]
    assert len(hashes) == len(pinned) and {name for name, found in hashes.items() if not found} == {"torch"}
    assert bill["metadata"]["component"]["version"] == "1.2.3"


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "SHA256SUMS").write_text("of before")
    assert checksums(tmp_path) == f"{hashlib.sha256(b'x').hexdigest()}  a\n"


@pytest.mark.long
@pytest.mark.process
def test_the_wheel_installs_where_nothing_of_ours_is_and_trains(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    subprocess.run([sys.executable, str(CHECKOUT / "deploy/release.py"), str(out)], check=True)
    (wheel,) = out.glob(f"port_agent-{VERSION}-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "agent", "planner"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    tracked = {path.partition("/")[2] for path in listed.stdout.split()}
    assert not [
        path for path in tracked if path.endswith((".py", ".toml", ".js", ".html", ".css")) and path not in names
    ]
    assert sum(name.endswith(".so") for name in names) == 2
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    (packages,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(
        f"{Path(torch.__file__).parents[1]}\n"
    )  # a path alone: no link to this checkout
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(tmp_path / "clean" / "bin" / "port-agent"), "exec", "--ram", "400M", "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    where = [str(python), "-c", "import port_agent; print(port_agent.__file__)"]
    assert subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, env=environment).stdout.startswith(
        str(packages)
    )
    assert json.loads(next(out.glob("*.cdx.json")).read_text())["specVersion"] == "1.6"

"""An installed wheel builds firmware and trains a simulated board, far from any checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.agent.mcu.simulated_board import require_board_tools

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("agent", "planner", "firmware", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as an installation lays them out."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run([*command, "-w", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def run(site: Path, folder: Path, *words: str) -> str:
    """Run the installed command in an empty directory, as a user would; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    code = "import port_agent, sys; from port_agent.cli import main; print(port_agent.__file__, file=sys.stderr); sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(site)), done.stderr  # not the checkout
    return done.stdout


@pytest.mark.long
def test_an_installed_wheel_compiles_builds_and_simulates(site: Path, tmp_path: Path) -> None:
    require_board_tools()
    shutil.copytree(ROOT / "examples" / "imu_gestures", tmp_path / "gestures")
    assert "arena" in run(site, tmp_path, "mcu", "compile", "gestures", "-o", "model")
    for board in ("qemu-m4f", "microbit", "nrf52840-dk", "feather-m0", "stm32f405"):
        assert "static" in run(site, tmp_path, "mcu", "build", "model", "--board", board)
    assert "training steps on posix" in run(site, tmp_path, "mcu", "simulate", "gestures", "--board", "posix")


def test_every_firmware_file_is_package_data() -> None:
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["port_agent"]
    firmware = ROOT / "firmware"
    shipped = {
        path
        for pattern in patterns
        for path in firmware.glob(pattern.removeprefix("firmware/"))
        if not path.name.startswith(".")
    }
    files = {path for path in firmware.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert {path for path in files if "__pycache__" not in path.parts} == shipped

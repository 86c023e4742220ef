"""The wheel carries the compiled parts, and is built without them where there is no compiler."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILED = ("port_agent/malloc/budget_malloc", "port_agent/packing/native")


def setuptools_version() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(setuptools_version() < 77, reason="needs setuptools 77 in this environment (offline build)"),
]


def wheel_names(directory: Path, **variables: str) -> list[str]:
    """Return the files of a wheel built from a copy of the sources."""
    sources = directory / "sources"
    for package in ("agent", "planner"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / package, sources / package, ignore=unwanted)
    for path in (*ROOT.glob("pyproject.toml"), *ROOT.glob("LICENSE"), *ROOT.glob("README.md")):
        shutil.copy(path, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(sources)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is built on Linux only")
def test_wheel_has_the_compiled_parts(tmp_path: Path) -> None:
    names = wheel_names(tmp_path)
    for part in COMPILED:
        assert any(name.startswith(part) and name.endswith(".so") for name in names), part


def test_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    names = wheel_names(tmp_path, CC="/bin/false")
    assert "port_agent/malloc/__init__.py" in names
    assert not any(name.endswith(".so") for name in names)
    others = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert others == {"port_agent", "port_planner"}

"""What the documents for people name is there."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from port_agent.system import VERSION

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("agent", "planner", "tests", "firmware", "deploy", "docs")


@pytest.mark.parametrize(
    "name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "benchmarks/README.md"]
)
def test_named_files_and_folders_exist(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    in_words = {ROOT / path for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", text)}
    named = in_words | {document.parent / path for path in re.findall(r"\]\(([\w./-]+)\)", text)}
    missing = {
        path for path in named if "NAME" not in path.name and not path.exists() and not Path(f"{path}.py").exists()
    }
    assert named and not missing, f"{name} names {sorted(map(str, missing))}, which do not exist"


def test_modules_that_the_architecture_names_by_their_last_folders_exist() -> None:
    files = [path.with_suffix("") for room in ("agent", "planner", "firmware") for path in (ROOT / room).rglob("*.*")]
    modules = {"/".join(path.parts[-depth:]) for path in files for depth in range(2, 7)}
    folders = {"/".join(path.parent.parts[-depth:]) for path in files for depth in range(2, 7)}
    named = set(re.findall(r"`([a-z]\w*(?:/\w+)+)`", (ROOT / "ARCHITECTURE.md").read_text()))
    missing = {name for name in named - modules - folders if not (ROOT / name).exists()}
    assert len(named) > 100 and not missing


def test_every_line_of_the_threat_model_names_a_test_that_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).is_file() or not re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M)
    ]
    assert not missing
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| |", "|---")):
            assert "::test_" in line, line


@pytest.mark.process
def test_what_readme_and_makefile_run_can_be_imported() -> None:
    """A module that moved must not break `make demo`, which takes minutes and is no test."""
    told = "".join((ROOT / name).read_text() for name in ("README.md", "benchmarks/README.md", "Makefile"))
    modules = sorted(set(re.findall(r"-m ((?:benchmarks|examples)[.\w]+)", told)))
    assert "examples.demo" in modules and len(modules) > 15
    imports = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", imports], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_distribution_takes_its_version_from_the_source() -> None:
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    module, _, name = dynamic.rpartition(".")
    assert getattr(importlib.import_module(module), name) == VERSION


def test_the_newest_version_of_the_changelog_is_that_of_the_source() -> None:
    released = re.findall(r"^## \[(\d[\d.]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == VERSION

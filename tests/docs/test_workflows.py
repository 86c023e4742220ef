"""The workflows of GitHub: their files are valid, what they name exists, and the steps of a release run
here as they are written.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent.system import VERSION
from tests.docs.pages import ROOT

yaml: Any = pytest.importorskip("yaml", reason="it comes with transformers")

WORKFLOWS = tuple(sorted((ROOT / ".github" / "workflows").glob("*.yml")))
FORMS = tuple(sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
ON_THE_RUNNER = {"sudo apt-get", "gh", "python -m pip", "rm"}
"""Programs of the runner, besides those that a test below replaces or runs."""


def read(path: Path) -> dict[str, Any]:
    """Return a workflow or form; YAML reads its key `on` as true."""
    found = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def steps() -> list[tuple[str, dict[str, Any]]]:
    """Return each step of each job, with the name of the job."""
    jobs = ((name, job) for path in WORKFLOWS for name, job in read(path)["jobs"].items())
    return [(name, step) for name, job in jobs for step in job["steps"]]


def lines(job: str) -> list[str]:
    """Return what the steps of a job type into a shell, without comments."""
    return [re.sub(r"\s+#.*", "", step["run"]) for name, step in steps() if name == job and "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_says_when_where_and_with_which_rights_it_runs(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"] and workflow["on"] and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        machines = job.get("strategy", {}).get("matrix", {}).get("machine", [job["runs-on"]])
        assert all(re.fullmatch(r"(ubuntu|macos)-[\d.]+(-arm)?", machine) for machine in machines)
        assert job["timeout-minutes"] > 0 if "make" in str(job["steps"]) else job["steps"]
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])


def test_each_step_is_an_action_of_a_fixed_version_or_a_command() -> None:
    for _, step in steps():
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", step["uses"])


def test_each_command_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in ("test", "docs", "release"):
        for command in (part.strip() for line in lines(job) for part in line.split("&&")):
            words = command.split()
            if words[0] == "make":
                assert words[1] in targets
            elif words[:2] == ["python", words[1]] and words[1].endswith(".py"):
                assert (ROOT / words[1]).is_file()
            else:
                assert any(command.startswith(program) for program in ON_THE_RUNNER), command


def test_wheels_are_built_for_the_pythons_that_the_package_supports() -> None:
    (build,) = (step for _, step in steps() if "cibuildwheel" in step.get("uses", ""))
    versions = re.findall(r"cp3(\d+)-", build["env"]["CIBW_BUILD"])
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and min(map(int, versions)) == int(oldest[1])


def fake(folder: Path, name: str, program: str) -> None:
    """Put a program of that name into a folder of programs."""
    (folder / name).write_text(f"#!{sys.executable}\n{program}")
    (folder / name).chmod(0o755)


@pytest.mark.process
def test_the_steps_of_a_release_run_as_they_are_written(tmp_path: Path) -> None:
    """Building is another test's; here `release.py dist` finds its files made, and `gh` says what it was given."""
    programs, dist = tmp_path / "bin", tmp_path / "dist"
    for folder in (programs, dist):
        folder.mkdir()
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (dist / f"port_agent-{VERSION}-cp311-cp311-manylinux_2_28_x86_64.whl").write_text("of cibuildwheel")
    made = f"dist/port_agent-{VERSION}-cp311-cp311-linux_x86_64.whl"
    fake(
        programs,
        "python",
        "import os, sys, pathlib\n"
        "if sys.argv[1:] == ['deploy/release.py', 'dist']:\n"
        f"    pathlib.Path({made!r}).write_text('of this machine')\n"
        f"elif sys.argv[1:3] != ['-m', 'pip']:\n    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n",
    )
    fake(programs, "gh", "import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_REF_NAME": f"v{VERSION}"}
    printed = ""
    for line in lines("release"):
        command = ["bash", "-e", "-o", "pipefail", "-c", line]  # as a runner does
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed = done.stdout
    given = json.loads(printed)
    assert given[:4] == ["release", "create", f"v{VERSION}", "--draft"]
    assert [name for name in given if name.endswith(".whl")] == [f"dist/{path.name}" for path in dist.glob("*.whl")]
    assert not (tmp_path / made).exists() and "dist/SHA256SUMS" in given
    assert "### Added" in (tmp_path / "notes.md").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_the_site_asks_of_one(path: Path) -> None:
    form = read(path)
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"]
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(part["type"] in kinds and part["attributes"] for part in form["body"])
    named = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(named)) == len(named) > 0


def test_each_line_of_codeowners_names_a_part_that_exists() -> None:
    rows = [line.split() for line in (ROOT / ".github" / "CODEOWNERS").read_text().splitlines() if line[:1] not in "# "]
    assert not rows or rows[0][0] == "*"
    assert all(name.startswith("@") for _, *owners in rows for name in owners)
    assert not [part for part, *_ in rows[1:] if not (ROOT / part.strip("/")).exists()]

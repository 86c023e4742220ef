"""The floors of the house: planner never imports agent, the supervisor never imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "numpy", "rich", "transformers", "zeroconf")
"""What the idle daemon must not carry: `import torch` alone is 218 MB; zeroconf comes only where discovery is on."""


def imported_modules(path: Path) -> set[str]:
    """Return every module that a source file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def test_planner_never_imports_agent() -> None:
    for path in sorted((ROOT / "planner").rglob("*.py")):
        offenders = {name for name in imported_modules(path) if name.split(".")[0] == "agent"}
        assert not offenders, f"{path.relative_to(ROOT)} imports {offenders}"


@pytest.mark.parametrize(
    "modules",
    [
        "agent.supervisor.daemon",
        "agent.cli",
        "agent.supervisor.http_api, agent.control.client, agent.control.http",
        "agent.facts, agent.facts.linux, agent.facts.macos, agent.facts.jetson",
        "agent.policy.decide, agent.policy.config, agent.jobs.model, agent.jobs.store, agent.supervisor.timers, agent.system.cgroup, agent.health.conditions",
        "planner.ir.bundle.bundle",
    ],
)
def test_the_supervisor_side_never_imports_torch(modules: str) -> None:
    program = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    allowed = {"numpy"} if modules == "planner.ir.bundle.bundle" else set()
    assert set(done.stdout.split()) <= allowed, f"{modules}: {done.stdout}"


def test_building_the_command_line_stays_light() -> None:
    program = "import sys, agent.cli; agent.cli.build_parser(); print('torch' in sys.modules or 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_the_daemon_does_without_tls(tmp_path: Path) -> None:
    words = [
        "run",
        "--state-dir",
        str(tmp_path),
        "--runtime-dir",
        str(tmp_path),
        "--config",
        str(tmp_path / "none.toml"),
    ]
    program = f"import sys; from agent.cli import main; print(main({words!r}), 'asyncio' in sys.modules, '_ssl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["2", "True", "False"]

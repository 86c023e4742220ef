"""Nothing of ours runs code that lies where it is started."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.system.python_process import (
    few_kernels_environment,
    module_command,
    module_environment,
    threads_environment,
)
from port_agent.worker.worker_options import BOARD_WORKER, TORCH_WORKER
from port_planner.base.source_roots import SOURCE_ROOTS

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
STANDARD = ("argparse", "json", "socket", "signal", "contextlib", "dataclasses", "subprocess", "tempfile")
OTHERS = ("msgpack", "msgspec", "numpy", "torch", "xxhash", "safetensors", "psutil", "rich", "zeroconf", "serial")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return a directory full of modules by the names of those that we import; each leaves its name when it runs."""
    for name in (*STANDARD, *OTHERS, "port_agent", "port_planner", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(
            f"import builtins; builtins.open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        (*TORCH_WORKER, "--help"),
        (*BOARD_WORKER, "--help"),
        (*module_command("port_agent.system.exec_with_limits"), "--", "true"),
        (*module_command("port_agent.prepare.measurement.measurement_process"), "1"),
        (*module_command("port_agent.cli"), "train", "job.port"),
        (*module_command("port_agent.cli"), "exec", "--tensors", "1M", "--", "elsewhere/program.py"),
    ],
    ids=lambda command: " ".join(command[3:6]),
)
def test_modules_in_the_working_directory_are_not_run(trap: Path, command: tuple[str, ...]) -> None:
    (trap / "elsewhere").mkdir()
    (trap / "elsewhere/program.py").write_text("import argparse, msgpack; print('it ran')")
    environment = {**module_environment(), "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}
    done = subprocess.run(command, cwd=trap, env=environment, capture_output=True, text=True, check=False)
    assert not (trap / "ran").exists(), (trap / "ran").read_text()
    assert "ModuleNotFoundError" not in done.stderr, done.stderr


def test_a_module_is_found_from_anywhere_and_no_relative_path_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "relative", "/absolute"]))
    environment = module_environment()
    assert environment["PYTHONPATH"] == os.pathsep.join([*map(str, SOURCE_ROOTS), "/absolute"])
    program = "import json, port_agent, sys; print(json.dumps([port_agent.__file__, sys.path]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, capture_output=True, check=True
    )
    found, path = json.loads(done.stdout)
    assert found == str(ROOT / "agent/port_agent/__init__.py") and "" not in path and str(tmp_path) not in path


def test_no_other_module_starts_python() -> None:
    """Code that names `sys.executable` prints it, isolates it, or runs the user's own program."""
    allowed = {
        "agent/port_agent/system/python_process.py",
        "agent/port_agent/malloc/environment.py",  # a trial with -I
        "agent/port_agent/malloc/restart.py",  # becomes the command that it was started as
        "agent/port_agent/cli/exec.py",  # tells it from another that the user wrote
        "agent/port_agent/health/doctor.py",  # names it
        "agent/port_agent/guard/guard_probe.py",  # a trial with the import path of this process
        "planner/port_planner/script_loading.py",  # lists what an interpreter has before it runs anything; imports nothing
        "agent/port_agent/intercept/exec/launch.py",  # becomes the user's program; its bootstrap drops the working directory
    }
    naming = set()
    for path in (file for room in ("agent", "planner") for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "executable":
                naming.add(str(path.relative_to(ROOT)))
    assert naming == allowed


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="libgomp's looks take a tenth of the time elsewhere")
def test_waiting_threads_sleep_soon_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    show = [sys.executable, "-c", "import torch; torch.ones(2) + 1"]
    environment = {**os.environ, **threads_environment(2), "OMP_DISPLAY_ENV": "VERBOSE"}
    told = subprocess.run(show, env=environment, check=True, capture_output=True, text=True).stderr
    assert "GOMP_SPINCOUNT = '30000'" in told
    for name in WAITING:
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert "GOMP_SPINCOUNT" not in threads_environment(2)


PRODUCTS = """
import torch
from port_planner.base.process_memory import resident_bytes

torch.set_num_threads(1)
weight = torch.ones(256, 256, dtype=torch.bfloat16)
for rows in range(1, 160):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ weight
    if rows == 33:
        before = resident_bytes()
print(resident_bytes() - before)
"""
"""Of so many shapes as the experts of a mixture meet."""


@pytest.mark.slow
def test_kernels_of_many_shapes_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in few_kernels_environment():
        monkeypatch.delenv(name, raising=False)
    command = [*module_command("x")[:2], "-c", PRODUCTS]

    def grown(added: dict[str, str]) -> int:
        return int(subprocess.check_output(command, env={**module_environment(), **added}))

    usual = grown({})
    if usual < 16 << 20:
        pytest.skip("this processor multiplies bfloat16 without kernels of its own")
    assert grown(few_kernels_environment()) < usual / 2
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert "LRU_CACHE_CAPACITY" not in few_kernels_environment()

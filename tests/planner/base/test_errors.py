"""Exit codes that scripts and service managers rely on, and errors that are refused as asked."""

import operator
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from port_planner.base.errors import CaptureError, ExitCode, PortError, program_line
from port_planner.base.source_roots import SOURCE_ROOTS


def test_the_numbers_never_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "IMPOSSIBLE": 2,
        "UNREACHABLE": 3,
        "DIVERGED": 4,
        "LEFT": 75,
        "CONFIG": 78,
        "INTERRUPTED": 130,
    }


def test_an_error_fails_and_one_that_can_never_work_says_so() -> None:
    assert PortError("disk full").exit_code == 1 and CaptureError("a branch").exit_code == 2


@pytest.mark.process
def test_what_pip_put_into_torchs_folder_is_not_the_programs_and_what_lies_beside_it_is(tmp_path: Path) -> None:
    """As in the package, whose dependencies are in a folder of their own, and after `pip install --target .`."""
    files = {
        "torch/__init__.py": "",
        "torch/random.py": "",
        "six.py": "",
        "bin/train.py": "",
        "torches/a.py": "",
        "train.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    record = tmp_path / "torch-2.13.0.dist-info/RECORD"
    record.parent.mkdir()
    record.write_text("torch/__init__.py,,\ntorch/random.py,sha256=x,0\nsix.py,,\nbin/torchrun,,\n")
    (record.parent / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    ask = "import sys; from port_planner.base.errors import of_the_program; print(*map(of_the_program, sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", ask, *(str(tmp_path / name) for name in files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *SOURCE_ROOTS)))},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "False", "False", "True", "True", "True"]


def test_the_line_of_a_module_is_named_where_no_code_of_the_program_runs() -> None:
    model = nn.Sequential()
    vars(model)["_modules"]["0"] = operator.methodcaller("line")
    asked = SimpleNamespace(line=program_line)
    with ThreadPoolExecutor() as threads:
        assert re.fullmatch(r"container\.py:\d+ in Sequential", threads.submit(model, asked).result())
        assert threads.submit(program_line).result() == ""

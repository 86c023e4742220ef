import importlib.util
import sys
from pathlib import Path

import pytest

from port_planner.script_loading import script_spec


def test_a_script_is_loaded_and_nothing_is_left_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    script = tmp_path / "train.py"
    script.write_text("answer = 42\nplace = __file__\n")
    spec = script_spec("train", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.answer, module.place, module.__name__) == (42, str(script), "train")
    assert [*tmp_path.iterdir()] == [script]


def test_another_file_is_no_script(tmp_path: Path) -> None:
    assert script_spec("train", tmp_path / "train.txt") is None

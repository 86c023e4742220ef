"""Scripts that say what to train, and scripts that do not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.job import JobError, ScriptError, load_job

GOOD = """
from planner.job import TrainingJob
import beside
def port_job():
    return TrainingJob(model=None, loss_fn=beside.loss, optimizer=None, data=[], batch_size=4{more})
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules and the path of the scripts."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = set(sys.modules)
    yield
    for name in sys.modules.keys() - names:
        del sys.modules[name]


def script(folder: Path, text: str, name: str = "my_training.py") -> Path:
    (folder / "beside.py").write_text("def loss(): pass\n")
    (folder / name).write_text(text)
    return folder / name


def test_a_script_imports_what_lies_beside_it_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, GOOD.format(more=""))
    monkeypatch.chdir(tmp_path)
    job = load_job(Path("my_training.py"))
    assert job.batch_size == 4 and job.loss_fn.__module__ == "beside"
    monkeypatch.chdir("/")
    assert str(tmp_path) in sys.path, "what it imports later is found from any directory"


@pytest.mark.parametrize(("more", "name"), [("", "my_training"), (', name="birds"', "birds")])
def test_a_job_without_a_name_is_called_as_its_script(tmp_path: Path, more: str, name: str) -> None:
    assert load_job(script(tmp_path, GOOD.format(more=more))).name == name


def test_classes_of_a_script_can_be_copied_and_pickled(tmp_path: Path) -> None:
    """A copy for the reference losses finds the class by its module's name."""
    job = load_job(script(tmp_path, GOOD.format(more="") + "class Model: pass\n"))
    assert sys.modules["my_training"].Model.__module__ == job.name == "my_training"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"my_training.py has no function port_job\(\); add one that returns planner.job.TrainingJob"),
        (
            "port_job = lambda: None",
            r"port_job\(\) in .*my_training.py returned NoneType; it must return a planner.job",
        ),
        ("def port_job(): return [1]", r"returned list"),
    ],
)
def test_a_script_that_does_not_say_what_to_train(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(script(tmp_path, text))


def test_a_path_that_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none.py does not exist; write a script with a function port_job\(\)"):
        load_job(tmp_path / "none.py")
    with pytest.raises(JobError, match="does not exist"):
        load_job(tmp_path)
    with pytest.raises(JobError, match=r"notes.txt is not a Python file; give a script that ends in .py"):
        load_job(script(tmp_path, "", "notes.txt"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("import no_such_thing", ["line 1, in <module>", "import no_such_thing", "ModuleNotFoundError"]),
        ("def port_job():\n    return 1 / zero()\ndef zero():\n    return {}['x']", ["line 2, in port_job", "line 4, in zero", "KeyError: 'x'"]),
        ("def port_job(:", ["line 1", "SyntaxError"]),
        ("import json\njson.loads('{')", ["json.loads('{')", "JSONDecodeError"]),
    ],
)  # fmt: skip
def test_what_the_script_itself_raises_is_shown_with_its_own_lines(tmp_path: Path, text: str, shown: list[str]) -> None:
    with pytest.raises(ScriptError) as caught:
        load_job(script(tmp_path, text))
    message = str(caught.value)
    assert caught.value.exit_code == 2 and all(words in message for words in shown), message
    assert "planner" not in message and "importlib" not in message and "decoder.py" not in message

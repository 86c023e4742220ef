"""Scripts of the kind people have, unchanged, through `port-agent exec`: what they print and
every file that they leave.

Tensors get half of what plain's take at their peak. Compared byte for byte; of JSON files and of what is printed, all
but what was measured with a clock.
"""

import json
import re
from pathlib import Path

import pytest

from tests.agent.intercept.programs import SCRIPTS, RunEnd, followed, plain, report_of

TIMED = re.compile(r"'(?:eval_|train_)?(?:runtime|samples_per_second|steps_per_second)': '?[\d.e+-]+'?,? ?")
TIMED_KEYS = ("runtime", "per_second")
UNORDERED = ("README.md",)
"""trl's model card lists its tags in the order of a set of its own."""

PEAK_TENSORS_MIB = {
    "amp_loop": 64,
    "gan": 49,
    "accelerate_loop": 34,
    "lightning_fit": 23,
    "diffusion": 147,
    "hf_trainer": 104,
    "trl_sft": 69,
}
"""Of each script with nothing moved: `exec --tensors 100G`, `peak_tensor_bytes`."""
FAST = ("gan",)
"""Looked at each time.

What `amp_loop` adds, autocast and a gradient scaler, `test_features` and `patches/test_dispatch_keys` look at.
"""


def files_of(folder: Path) -> dict[str, object]:
    """Return what a run left: bytes by path, JSON without measured times."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            found[str(path.relative_to(folder))] = untimed(json.loads(content)) if path.suffix == ".json" else content
    return {name: content for name, content in found.items() if Path(name).name not in UNORDERED}


def untimed(value: object) -> object:
    """Return a JSON value without the entries that hold measured times."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not any(word in k for word in TIMED_KEYS)}
    if isinstance(value, list):
        return [untimed(item) for item in value]
    return value


def said(ended: RunEnd) -> str:
    """Return what a script printed, without measured times."""
    return TIMED.sub("", ended.output)


@pytest.mark.process
@pytest.mark.parametrize(
    "script", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in PEAK_TENSORS_MIB]
)
def test_a_script_leaves_the_same_files(tmp_path: Path, script: str) -> None:
    here, pages, report = tmp_path / "here", tmp_path / "pages", tmp_path / "report.json"
    pages.mkdir()
    words = ("-W", "ignore", str(SCRIPTS / f"{script}.py"), "out")
    run_conditions = {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    here.mkdir()  # both run in a folder of this name, which ends up in some of the files
    (here / "out").mkdir()
    expected = plain(*words, folder=here, environment=run_conditions)
    assert expected.code == 0, expected.said
    here.rename(tmp_path / "plain")
    here.mkdir()
    (here / "out").mkdir()
    limit = PEAK_TENSORS_MIB[script] / 2
    bound = ("--tensors", f"{limit}M", "--page-dir", str(pages), "--report", str(report))
    done = followed(*words[2:], folder=here, bound=bound, environment=run_conditions)
    assert done.code == 0, done.said
    assert said(done) == said(expected)
    left, wanted = files_of(here / "out"), files_of(tmp_path / "plain/out")
    assert left.keys() == wanted.keys() and len(left) > 0
    assert [name for name, content in wanted.items() if left[name] != content] == []
    facts = report_of(report)
    assert facts["written_bytes"] > 0, "half of the tensors' peak cannot be held without moving anything"

"""`port-agent export` as a user types it."""

import json
import sys
from pathlib import Path

import pytest

from port_agent.cli import main
from tests.agent.finetuning.export.exported_models import make_exported


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_exported(tmp_path_factory.mktemp("export") / "model", "llama")


def test_it_says_what_it_wrote(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    out = tmp_path / "model.gguf"
    words = ("export", "--gguf", str(model), "--out", str(out))
    assert main((*words, "--type", "q8_0")) == 0
    output, errors = capsys.readouterr()
    assert output.startswith(f"{out}: ") and output.endswith(" KiB, 21 weights, matrices in q8_0\n") and errors == ""
    assert main(words) == 2
    said = f"port-agent: {out} exists already; give a new directory, or remove it\n"
    assert capsys.readouterr() == ("", said)
    assert main((*words[:-1], str(tmp_path / "other.gguf"), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["type"], told["nbytes"]) == (
        "finished",
        "bf16",
        (tmp_path / "other.gguf").stat().st_size,
    )


def test_without_the_package_it_names_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "port_agent.finetuning.export.gguf_file", raising=False)
    assert main(("export", "--gguf", str(model), "--out", str(tmp_path / "model.gguf"))) == 2
    said = "exporting to GGUF needs the package gguf (gguf is missing): pip install 'port-agent[gguf]'"
    assert capsys.readouterr() == ("", f"port-agent: {said}\n")
    assert not list(tmp_path.iterdir())

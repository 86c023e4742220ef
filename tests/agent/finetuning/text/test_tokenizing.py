"""A tokenizer in a process of its own gives what one in this process gives, and says what that one says."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text import tokenizing
from port_agent.finetuning.text.tokenizing import TokenizerHere, TokenizerProcess
from tests.agent.finetuning.tiny_model import make_data, make_model

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> FinetuneOptions:
    folder = tmp_path_factory.mktemp("tokenizing")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return FinetuneOptions(str(model), (str(data),), str(folder / "out"), sequence_tokens=32, sample="to be")


def test_its_own_process_finds_the_same_and_has_no_torch(
    command: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, apart = TokenizerHere(command), TokenizerProcess(command)
    found = here.tokenized()
    assert apart.tokenized() == found and apart.tokenized() is apart.tokenized()
    assert (found.records, found.broken) == (12, 2) and len(found.prompt) > 0
    assert here.process_bytes == 0 and apart.process_bytes > 1 << 20
    assert apart.decode(found.prompt) == here.decode(found.prompt) == "user\nto beassistant\n"
    here.save(str(tmp_path / "here"))
    monkeypatch.setattr(tokenizing, "_PROCESS", "none")  # no process is begun beside one that trains
    apart.save(str(tmp_path / "apart"))
    written = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "apart").iterdir()} and written


def test_the_sample_is_asked_as_the_data_is(command: FinetuneOptions, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("to be or not to be\n" * 9)
    plain = TokenizerHere(replace(command, data=(str(text),)))
    assert plain.decode(plain.tokenized().prompt) == "to be"


def test_what_is_left_away_is_noted(command: FinetuneOptions, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "to be", "label": 1, "id": 3}\n{"text": "or not"}\n[]\n')
    notes = TokenizerHere(replace(command, data=(str(data),))).tokenized().notes
    assert [note.partition(":")[0] for note in notes[1:]] == [
        "unused keys, with the number of their records",
        "1 records have a label, and this model learns the next token",
    ]
    assert "1 broken entries are left out, the first: line 3: not a JSON object" in notes[0]


def test_the_files_of_a_directory_are_named_by_how_they_are_read(command: FinetuneOptions, tmp_path: Path) -> None:
    """Beside its records a directory may have a description of them, which is a text like any other."""
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("to be or not to be")
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "or not"}\n')
    notes = TokenizerHere(replace(command, data=(str(tmp_path),))).tokenized().notes
    assert notes[:2] == (
        "1 files of directories are read as one text each: 'README.md'",
        "2 files of directories are read as records: 'data/test.jsonl', 'data/train.jsonl'",
    )


def test_what_is_wrong_is_said_by_name(
    command: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "' + "to be " * 99 + '", "completion": "x"}\n')
    with pytest.raises(FinetuneError, match="no sequence is left to train on"):
        TokenizerProcess(replace(command, data=(str(data),))).tokenized()
    monkeypatch.setattr(tokenizing, "_PROCESS", "port_agent.finetuning.text.records.none")
    with pytest.raises(FinetuneError, match=r"ended with 1 \(.*\); give another tokenizer or other data"):
        TokenizerProcess(command).tokenized()

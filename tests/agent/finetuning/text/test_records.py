"""The user's text: every kind of record, and lines that are none counted with the first named."""

from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text import records
from port_agent.finetuning.text.records import Records, parts_of
from port_agent.finetuning.text.shapes import Message, Record


def test_each_kind_of_record(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"text": "a", "more": 1}\n\n{"text": "b", "label": 3}\n{"prompt": "p", "completion": "c"}\n'
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}\n'
    )
    found = Records(path)
    talk = (Message("user", "u"), Message("assistant", "a"))
    assert tuple(found) == (
        Record(text="a"),
        Record(text="b", label="3"),
        Record(prompt="p", completion="c"),
        Record(messages=talk),
    )
    assert found.broken == 0 and found.labels == 1 and found.unread == {"more": 1}
    assert [record.place for record in found] == ["line 1", "line 3", "line 4", "line 5"]


def test_any_other_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text('{"text": 1}\nwords')
    (found,) = Records(path)
    assert list(parts_of(found)) == ['{"text": 1}\nwords']


def test_lines_end_where_json_has_them_end_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\r\n'.encode())
    assert tuple(Records(path)) == (Record(text="a\u2028b\u0085c"), Record(text="d"))
    assert Records(path).broken == 0
    (tmp_path / "notes.txt").write_bytes("\ufeffwords".encode())
    (found,) = Records(tmp_path / "notes.txt")
    assert list(parts_of(found)) == ["words"]


def test_an_empty_text_is_counted_and_not_learned(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n{"text": " "}\n')
    found = Records(path)
    assert tuple(found) == (Record(text="a"),) and found.broken == 2 and found.first_broken == "line 2: an empty text"


def test_what_follows_a_broken_entry_of_an_array_is_not_read_and_that_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"text": "a"}, {"text": b}, {"text": "c"}]')
    found = Records(path)
    assert tuple(found) == (Record(text="a"),) and found.broken == 1
    assert found.first_broken.endswith("; what follows it in the file is not read")


def test_broken_lines_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "p"}\n{broken\n[]\n{"messages": [{"role": "user", "content": "u"}]}\n')
    found = Records(path)
    assert tuple(found) == (Record(text="a"),) and found.broken == 4
    assert found.first_broken.startswith("line 2: not a known shape of record; its keys are 'prompt'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing to train on"),
        (b"{\n", "nothing to train on; 1 entries are broken, the first: line 1"),
        (b'{"messages": [{"role": "user"}]}', "a message has no role or no content"),
        (b"\xff\xfe", r"not valid UTF-8 \(byte 0\)"),
        (b'{"text": "a"}\n' * 99999 + b"\xc3", r"not valid UTF-8 \(byte 1399986\)"),
        (b'{"text": "a"}\n' * 99999 + b"\xc3(", r"not valid UTF-8 \(byte 1399986\)"),
    ],
)
def test_data_that_cannot_be_used(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(FinetuneError, match=message):
        Records(path)
    with pytest.raises(FinetuneError, match=r"No such file.*give a file of texts or records"):
        Records(tmp_path / "none.txt")


def test_a_long_text_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK_CHARACTERS", 41)
    text = "to be or not to be\n" * 5
    (tmp_path / "text.txt").write_text(text)
    (found,) = Records(tmp_path / "text.txt")
    for record in (found, Record(text=text)):
        parts = list(parts_of(record))
        assert "".join(parts) == text and [len(part) for part in parts] == [41, 41, 13]


def test_several_files_and_directories_are_read_together(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "deep" / "b.md").write_text("two")
    (folder / "c.png").write_bytes(b"\x89PNG\r\n")
    (folder / ".hidden").write_text("three")
    (tmp_path / "more.jsonl").write_text('{"text": "four"}\n[]\n')
    found = Records(folder, tmp_path / "more.jsonl")
    assert ["".join(parts_of(record)) for record in found] == ["one", "two", "four"]
    assert len(found.left) == 1 and "c.png is not valid UTF-8 (byte 0)" in found.left[0]
    assert found.first_broken == "more.jsonl line 2: not a JSON object"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FinetuneError, match="empty has no files"):
        Records(tmp_path / "empty")

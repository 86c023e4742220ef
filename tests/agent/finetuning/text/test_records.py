"""The user's text: every kind of record, and lines that are none counted with the first named."""

from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text import records
from port_agent.finetuning.text.records import Message, Record, Records


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
    assert found.broken == 0


def test_any_other_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text('{"text": 1}\nwords')
    (found,) = Records(path)
    assert list(found.pieces()) == ['{"text": 1}\nwords']


def test_lines_end_where_json_has_them_end_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\r\n'.encode())
    assert tuple(Records(path)) == (Record(text="a\u2028b\u0085c"), Record(text="d"))
    assert Records(path).broken == 0
    (tmp_path / "notes.txt").write_bytes("\ufeffwords".encode())
    (found,) = Records(tmp_path / "notes.txt")
    assert list(found.pieces()) == ["words"]


def test_broken_lines_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "p"}\n{broken\n[]\n{"messages": [{"role": "user", "content": "u"}]}\n')
    found = Records(path)
    assert tuple(found) == (Record(text="a"),) and found.broken == 4
    assert found.first_broken.startswith("line 2: neither text, nor prompt and completion, nor messages in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing to train on"),
        (b"{\n", "nothing to train on; 1 lines are broken, the first: line 1"),
        (b'{"messages": [{"role": "user"}]}', "a message without role and content"),
        (b"\xff\xfe", r"no UTF-8 text \(byte 0\)"),
        (b'{"text": "a"}\n' * 99999 + b"\xc3", r"no UTF-8 text \(byte 1399986\)"),
        (b'{"text": "a"}\n' * 99999 + b"\xc3(", r"no UTF-8 text \(byte 1399986\)"),
    ],
)
def test_data_that_cannot_be_used(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(FinetuneError, match=message):
        Records(path)
    with pytest.raises(FinetuneError, match=r"No such file.*give a \.jsonl or \.txt file"):
        Records(tmp_path / "none.txt")


def test_a_long_text_comes_in_pieces_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "to be or not to be\n"
    monkeypatch.setattr(records, "_CHUNK_CHARACTERS", 2 * len(line) + 3)
    assert list(Record(text=line * 5).pieces()) == [line * 2, line * 2, line]
    assert list(Record(text="x" * 3 * len(line)).pieces()) == ["x" * (2 * len(line) + 3), "x" * (len(line) - 3)]
    for text in (line * 5, "x" * 3 * len(line), line * 2 + "end", "word"):
        (tmp_path / "text.txt").write_text(text)
        (found,) = Records(tmp_path / "text.txt")
        assert list(found.pieces()) == list(Record(text=text).pieces())

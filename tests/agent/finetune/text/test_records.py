"""The user's text: every kind of record, and lines that are none counted with the first named."""

from pathlib import Path

import pytest

from agent.finetune.options import FinetuneError
from agent.finetune.text.records import Message, Record, read_records


def test_each_kind_of_record(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"text": "a", "more": 1}\n\n{"text": "b", "label": 3}\n{"prompt": "p", "completion": "c"}\n'
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}\n'
    )
    found = read_records(path)
    talk = (Message("user", "u"), Message("assistant", "a"))
    assert found.records == (
        Record(text="a"), Record(text="b", label="3"), Record(prompt="p", completion="c"), Record(messages=talk),
    )  # fmt: skip
    assert found.broken == 0


def test_any_other_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text('{"text": 1}\nwords')
    assert read_records(path).records == (Record(text='{"text": 1}\nwords'),)


def test_lines_end_where_json_has_them_end_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\r\n'.encode())
    found = read_records(path)
    assert found.records == (Record(text="a\u2028b\u0085c"), Record(text="d")) and found.broken == 0
    (tmp_path / "notes.txt").write_bytes("\ufeffwords".encode())
    assert read_records(tmp_path / "notes.txt").records == (Record(text="words"),)


def test_broken_lines_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "p"}\n{broken\n[]\n{"messages": [{"role": "user", "content": "u"}]}\n')
    found = read_records(path)
    assert found.records == (Record(text="a"),) and found.broken == 4
    assert found.first_broken.startswith("line 2: neither text, nor prompt and completion, nor messages in ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing to train on"),
        (b"{\n", "nothing to train on; 1 lines are broken, the first: line 1"),
        (b'{"messages": [{"role": "user"}]}', "a message without role and content"),
        (b"\xff\xfe", r"no UTF-8 text \(byte 0\)"),
    ],
)
def test_data_that_cannot_be_used(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(FinetuneError, match=message):
        read_records(path)
    with pytest.raises(FinetuneError, match=r"No such file.*give a \.jsonl or \.txt file"):
        read_records(tmp_path / "none.txt")

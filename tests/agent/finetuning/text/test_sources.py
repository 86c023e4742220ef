"""Files are told by what is in them, whatever they are called, and those that nobody reads are refused by name."""

import gzip
import json
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.sources import SourceKind, entries, files_of, source_kind

A, B = {"text": "a, and\nmore"}, {"text": "b"}
LINES = f"{json.dumps(A)}\n\n{json.dumps(B)}\n"


def read(path: Path) -> list[object]:
    return [entry for _, entry in entries(path, source_kind(path))]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", LINES, SourceKind.LINES),
        ("a.ndjson", LINES, SourceKind.LINES),
        ("a.txt", LINES, SourceKind.LINES),
        ("a.json", json.dumps([A, B]), SourceKind.OBJECTS),
        ("a.json", json.dumps([A, B], indent=2), SourceKind.OBJECTS),
        ("data", json.dumps([A, B], indent=2), SourceKind.OBJECTS),
        ("a.json", f"{json.dumps(A, indent=2)}\n{json.dumps(B, indent=2)}", SourceKind.OBJECTS),
        ("a.csv", 'text\n"a, and\nmore"\nb\n', SourceKind.TABLE),
        ("a.json", f"[\n{json.dumps(A)},\n{json.dumps(B)}\n]\n", SourceKind.OBJECTS),
        ("a.jsonl", "{broken\n" + LINES, SourceKind.LINES),
        ("a", "{broken\n" + LINES, SourceKind.LINES),
        ("a.jsonl", f'{{"text": {"[" * 70000}\n{LINES}', SourceKind.LINES),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_entries_of_each_kind(name: str, content: str, kind: SourceKind, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert source_kind(path) is kind
    assert [entry for entry in read(path) if not isinstance(entry, ValueError)] == [A, B]


TALK = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
BY_MESSAGE = '{"messages": [\n' + ",\n".join(map(json.dumps, TALK["messages"])) + "\n]\n}"


@pytest.mark.parametrize("content", [BY_MESSAGE, f"[{BY_MESSAGE},\n{BY_MESSAGE}]"])
def test_an_object_on_a_line_of_its_own_within_another_is_no_entry(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    found = read(tmp_path / "a.json")
    assert found and all(entry == TALK for entry in found)


def test_objects_of_unknown_shape_are_no_text_whatever_their_file_is_called(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"question": "q", "answer": "a"}\n' * 2)
    assert source_kind(tmp_path / "a") is SourceKind.LINES


@pytest.mark.parametrize("content", ['{"text": "a", "text": "b"}\n', '[{"text": "a", "text": "b"}]'])
def test_a_key_that_comes_twice_breaks_its_entry(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    (error,) = read(tmp_path / "a.jsonl")
    assert isinstance(error, ValueError) and "the key 'text' twice in one object" in str(error)


def test_a_cell_that_never_ends_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\na,b\nc,"d\ne,f\n')
    row, error = read(tmp_path / "a.csv")
    assert (
        row == {"prompt": "a", "completion": "b"} and isinstance(error, ValueError) and "does not end it" in str(error)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", '{"text": 1}\nwords'),
        ("a.txt", "[Verse 1]\nto be"),
        ("a.py", "{1: 2}\n"),
        ("a", "text, and more of it\nto be"),
        ("a.txt", ""),
        ("a.txt.gz", "to be"),
    ],
)
def test_all_else_is_a_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert source_kind(tmp_path / name) is SourceKind.TEXT


def test_a_table_is_told_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    for delimiter in ",;\t":
        path.write_text(
            delimiter.join(("prompt", "completion", "id")) + "\n" + delimiter.join(("p", "c", "1")) + "\n\nx\n"
        )
        found = read(path)
        assert found[0] == {"prompt": "p", "completion": "c", "id": "1"} and str(found[1]) == "1 cells for 3 columns"
    path.write_bytes(b'prompt,completion\r\nto,"be\r\nor"\r\nto,"be\ror"\r\n')
    assert [row["completion"] for row in read(path) if isinstance(row, dict)] == ["be\r\nor", "be\ror"]
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        FinetuneError,
        match=r"begins with 'a,b', but a table's first line must name its columns: text or prompt, completion",
    ):
        source_kind(tmp_path / "a.csv")


def test_parquet_is_read_where_pyarrow_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.bin"
    calls = ({"city": "Paris"}, {"day": 2, "of": ["May", None]})  # in the file, each has the other's keys as null
    rows = [{"messages": [{"role": "assistant", "calls": [{"arguments": given}]}]} for given in calls] * 35
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert source_kind(path) is SourceKind.PARQUET and read(path) == rows
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FinetuneError, match=r"a\.bin cannot be read"):
        read(path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(FinetuneError, match="which needs pyarrow: pip install pyarrow"):
        read(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"%PDF-1.7", "is a PDF; convert it to UTF-8 text"),
        (b"PK\x03\x04", "is an archive, or a document of an office program"),
        (b"\xff\xfea\0", r"not valid UTF-8 \(byte 0\)"),
        (b"a\0b", "is not text: it has bytes of 0"),
        (b"\x1f\x8b\x08\0\0\0", "give a file of texts or records"),
    ],
)
def test_what_is_read_by_nobody_is_refused_by_name(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FinetuneError, match=said):
        source_kind(tmp_path / "a")


def test_entries_that_cannot_be_read_are_broken_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d"}\n' + '{"a":' * 100_000 + "\n{}\nnull\n" + json.dumps(B))
    lone, deep, *others = read(path)
    assert (
        str(lone).startswith("half a character")
        and str(deep).startswith("nested too deeply")
        and others == [{}, None, B]
    )
    (tmp_path / "a.json").write_text('[{"text": "b"}, {"text": "c"')
    good, cut = read(tmp_path / "a.json")
    assert good == B and isinstance(cut, ValueError)


def test_the_header_of_a_table_is_no_row_where_tables_were_joined(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,1\ntext, label\nb,0\n")
    first, again, second = read(path)
    assert (first, second) == ({"text": "a", "label": "1"}, {"text": "b", "label": "0"})
    assert isinstance(again, ValueError) and "column names again" in str(again)


def test_hidden_files_of_a_directory_are_none(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/x", "b", "a"):
        (tmp_path / name).write_text("x")
    assert files_of(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_the_columns_of_a_table_with_tabs_are_divided_by_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\nfirst, and second\n"a\tb"\n')
    assert read(tmp_path / "a.tsv") == [{"text": "first, and second"}, {"text": "a\tb"}]


def test_a_table_that_names_a_column_twice_has_no_valid_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    (error,) = read(tmp_path / "a.csv")
    assert str(error) == "the column 'text' twice in one table"

"""What is printed from outside is shown and not obeyed."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from port_agent.cli import main
from port_agent.cli.terminal import draw, guarded, printable, terminal

ROOT = Path(__file__).resolve().parents[3]
EVIL = "\x1b]0;owned\x07\x1b[2J[bold red]a[/][link=file:///etc/passwd]b[/link]\u202etxt.exe\r:smile:\x9b31m"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[bold red]a[/][link=file:///etc/passwd]b[/link]\u202etxt.exe\r:smile:\x9b31m"


def test_what_a_terminal_would_obey_is_made_visible() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("\udcff") == r"\udcff"
    kept = "tabs\tand\nlines\r\nümläut 日本語 ✓ 🙂 e\u0301\n"
    assert printable(kept) == kept


def test_nothing_in_tables_and_texts_is_markup_or_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    out, evil, shown = io.StringIO(), *(re.sub(r"\r|\x07|\\r|\\x07", "", text) for text in (EVIL, SHOWN))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "300")
    with guarded():
        console = terminal()
        table = Table(evil, title=evil)
        table.add_row(evil)
        for renderable in (evil, Text(evil), table, Panel(Text(evil, "red"))):
            console.print(renderable)
        print(evil, evil)
        sys.stdout.writelines([evil])
    assert out.getvalue().count("[bold red]a[/]") == 9 and out.getvalue().count(shown) >= 5  # a title is wrapped
    assert out.getvalue().count(r"\x1b") == 18 and "\x1b" not in out.getvalue()
    assert sys.stdout is out


def test_colours_of_ours_stay() -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("TERM", "xterm-256color")
        with guarded():
            terminal().print(Text("good", "green"))
            draw("\x1b[32mcurve\x1b[0m")
    assert out.getvalue().count("\x1b[32m") == 2


def test_every_command_is_guarded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "\x1b[2J")
    assert main(["status", "--runtime-dir", path]) == 3
    with pytest.raises(SystemExit):
        main(["show", path])
    said = capsys.readouterr().err
    assert "\x1b" not in said and said.count(r"\x1b[2J") == 2
    assert main(["completion", "bash"]) == 0
    assert "\\x" not in capsys.readouterr().out


@pytest.mark.slow
def test_there_is_no_other_console() -> None:
    made = [
        str(path.relative_to(ROOT))
        for room in ("agent", "planner")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"(?<!Plain)Console\(|__stdout__", path.read_text())
    ]
    assert made == []


WORDS = "[float32] of [/dev/ttyACM0] is [bold red]not :warning: [Errno 28][/]"


def test_brackets_and_colons_are_text_in_lines_and_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    console.width = 200
    table = Table(title=WORDS)
    table.add_column(WORDS)
    table.add_row(WORDS)
    console.print(WORDS)
    console.print(table)
    assert capsys.readouterr().out.count(WORDS) == 4


def test_what_is_no_result_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    terminal(stderr=True).print("bad")
    assert capsys.readouterr() == ("", "bad\n")

"""The command line of a worker: what is written is read back."""

from pathlib import Path
from typing import Any

import pytest

from port_agent.worker.shard import Shard
from port_agent.worker.worker_options import BoardOptions, TorchOptions, WorkerOptions, page_words

PLACES: dict[str, Any] = {"bundle": Path("job.port"), "state_dir": Path("state")}


@pytest.mark.parametrize(
    "options",
    [
        WorkerOptions(**PLACES, control_fd=5, plan=0, epochs=2, out=Path("w")),
        TorchOptions(**PLACES, page_dir=Path("card"), scratch_dirs=(Path("a"), Path("b b"))),
        TorchOptions(**PLACES, steps=9, verify=5, digest=True, read_limit=4_000_000, page_dir=Path("card")),
        BoardOptions(**PLACES, round=2, board="posix", simulate=True, test=Path("held-out"), shard=Shard(2, 3)),
    ],
)
def test_words_are_read_back(options: WorkerOptions) -> None:
    assert type(options).parse(options.words(), program="worker") == options


def test_sizes_are_read_with_their_unit() -> None:
    words = [*WorkerOptions(**PLACES).words(), "--write-limit", "2M"]
    assert TorchOptions.parse(words, program="worker").write_limit == 2 << 20


def test_a_wrong_option_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        WorkerOptions.parse(["--bundle", "job.port"], program="worker")
    assert ended.value.code == 2 and "--state-dir" in capsys.readouterr().err


def test_where_pages_go_is_read_as_it_is_written() -> None:
    words = [*WorkerOptions(**PLACES).words(), *page_words(("card", "stick", "zram"))]
    told = TorchOptions.parse(words, program="worker")
    assert (told.page_dir, told.scratch_dirs) == (Path("card"), (Path("stick"), Path("zram")))
    assert page_words(()) == ()

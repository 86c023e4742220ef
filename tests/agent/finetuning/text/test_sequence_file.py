"""Sequences in a file: read as written, in any order, by another process too; what the medium does to them is said."""

import os
import pickle
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text import sequence_file
from port_agent.finetuning.text.sequence_file import (
    IGNORED,
    TOKEN,
    Lengths,
    SequenceFile,
    SequenceWriter,
    StoredSequences,
    TokenSequence,
)
from tests.agent.intercept.page_files import largest_file

_ADDS_TWO = """
import pickle, sys
from port_agent.finetuning.text.sequence_file import SequenceWriter
file, first, second = pickle.load(sys.stdin.buffer)
writer = SequenceWriter(file)
writer.add([first, second])
pickle.dump(writer.end(), sys.stdout.buffer)
"""


def sequence(*tokens: int) -> TokenSequence:
    numbers = array(TOKEN, tokens)
    return TokenSequence(numbers, numbers, label=len(tokens))


def stored(folder: Path, count: int) -> StoredSequences:
    writer = SequenceWriter(SequenceFile.beside(folder / "out"))
    writer.add(sequence(*range(i + 1)) for i in range(count))
    return writer.end()


def test_they_are_read_as_written_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_file, "_WRITTEN_BYTES", 300)
    found = stored(tmp_path, 9)
    assert list(found) == [sequence(*range(i + 1)) for i in range(9)] and len(found) == 9
    assert list(found.those([8, 0])) == [found[8], found[0]] == [*found[8:], *found[:1]]
    assert found[-1] == found[8] and found == stored(tmp_path, 9) != stored(tmp_path, 8)
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_lengths_are_counted_as_they_are_written(tmp_path: Path) -> None:
    writer = SequenceWriter(SequenceFile.beside(tmp_path / "out"))
    tokens, labels = array(TOKEN, [4, 7, 2]), array(TOKEN, [IGNORED, IGNORED, 2])
    writer.add([TokenSequence(tokens, labels, source=array(TOKEN, [9, 1])), sequence(5, 1)])
    assert writer.lengths == Lengths(tokens=5, learned=2, shortest=2, longest=3, longest_source=2, largest_token=9)


@pytest.mark.process
def test_a_process_writes_what_the_one_before_it_reads(tmp_path: Path) -> None:
    file = SequenceFile.beside(tmp_path / "none" / "none" / "out")
    done = subprocess.run(
        [sys.executable, "-c", _ADDS_TWO],
        input=pickle.dumps((file, sequence(1, 2), sequence(3))),
        stdout=subprocess.PIPE,
        pass_fds=(file.descriptor,),
        check=True,
    )
    found: StoredSequences = pickle.loads(done.stdout)
    del file
    assert list(found) == [sequence(1, 2), sequence(3)]


def test_a_flipped_bit_a_full_disk_and_a_closed_folder_are_said(tmp_path: Path) -> None:
    found = stored(tmp_path, 2)
    (byte,) = os.pread(found.file.descriptor, 1, found.begins[1] + 9)
    os.pwrite(found.file.descriptor, bytes((byte ^ 1,)), found.begins[1] + 9)
    assert found[0] == sequence(0)
    with pytest.raises(FinetuneError, match="no longer holds the bytes that were written"):
        found[1]
    with largest_file(20), pytest.raises(FinetuneError, match="File too large after 20 bytes"):
        stored(tmp_path, 2)
    with pytest.raises(FinetuneError, match="give an --out with enough free space"):
        SequenceFile.beside(Path("/proc/self/out"))

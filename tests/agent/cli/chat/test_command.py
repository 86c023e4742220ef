"""`port-agent chat` as a user types it: an answer for each line of the input, and refusals in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.finetuning.chat import Chat
from port_agent.finetuning.inputs.chat_options import ChatOptions
from tests.agent.finetuning.tiny_model import make_model


@pytest.mark.process
@pytest.mark.slow
def test_each_line_is_answered_within_the_budget(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    words = ["chat", "model", "--ram", "800M", "--greedy", "--tokens", "6", "--page-dir", str(tmp_path)]
    command = [sys.executable, "-P", "-m", "port_agent.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = ("to be or", "that is")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    chat = Chat(ChatOptions(str(tmp_path / "model"), most_tokens=6, greedy=True), lambda text: None)
    assert done.stdout == "".join(chat.answer(line, lambda text: None).text + "\n" for line in lines)
    assert done.stderr.count("tokens,") == 2 and "of 800.0 MiB" in done.stderr


@pytest.mark.process
def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "port_agent.cli", "chat", str(tmp_path), "--ram", "600M"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "config.json: No such file or directory" in done.stderr

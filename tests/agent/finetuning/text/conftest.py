"""The tokenizer of a tiny model."""

from typing import Any

import pytest

from port_agent.finetuning.text.tokenizing import load_tokenizer
from tests.agent.finetuning.tiny_model import make_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(make_model(tmp_path_factory.mktemp("model")))

"""Models larger than the budget are saved within it, with the bytes that plain PyTorch writes."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agent import budget
from tests.agent.follow.page_files import LAYER_BYTES, layers

LIMIT_BYTES = 4 * LAYER_BYTES
COUNT = 16


def by_pickle(model: torch.nn.Module, path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(model.state_dict(), file)


WAYS: dict[str, Callable[[torch.nn.Module, Path], None]] = {
    "torch.save": lambda model, path: torch.save(model.state_dict(), path),
    "the whole module": torch.save,
    "safetensors": lambda model, path: save_file(model.state_dict(), path),
    "pickle": by_pickle,
    "a deep copy": lambda model, path: torch.save(copy.deepcopy(model).state_dict(), path),
}


@pytest.mark.parametrize("way", WAYS)
def test_saved_within_the_budget(way: str, tmp_path: Path) -> None:
    model = layers(COUNT)
    WAYS[way](model, tmp_path / "plain")
    with budget(tensors=LIMIT_BYTES, page_dir=tmp_path) as b:
        with torch.no_grad():
            model(torch.ones(1, 256))
        (tmp_path / "plain").rename(tmp_path / "kept")
        WAYS[way](model, tmp_path / "plain")
        peak_bytes = b.report.peak_tensor_bytes
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "kept").read_bytes()
    assert peak_bytes <= LIMIT_BYTES + 2 * LAYER_BYTES, "the layers are four times the limit"

"""Models larger than the budget are saved within it, with the bytes that plain PyTorch writes, and loaded within it."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from port_agent import budget
from port_agent.intercept.residency.storages import allocated_bytes
from tests.agent.intercept.page_files import LAYER_BYTES, layers

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
    with budget(tensors=LIMIT_BYTES, page_dir=tmp_path).resizing() as b:
        with torch.no_grad():
            model(torch.ones(1, 256))
        (tmp_path / "plain").rename(tmp_path / "kept")
        WAYS[way](model, tmp_path / "plain")
        peak_bytes = b.report.peak_tensor_bytes
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "kept").read_bytes()
    assert peak_bytes <= LIMIT_BYTES, "the layers are four times the limit"


def test_storages_larger_than_half_of_the_budget_are_saved_one_after_the_other(tmp_path: Path) -> None:
    """As of AdamW's moments of an embedding."""
    model = layers(3)
    limit_bytes = LAYER_BYTES * 3 // 2
    torch.save(model.state_dict(), tmp_path / "plain")
    with budget(tensors=limit_bytes, page_dir=tmp_path).resizing() as b:
        for layer in model:
            with torch.no_grad():
                layer(torch.ones(1, 256))
        before = b.report
        (tmp_path / "plain").rename(tmp_path / "kept")
        torch.save(model.state_dict(), tmp_path / "plain")
        after = b.report
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "kept").read_bytes()
    assert after.peak_tensor_bytes == before.peak_tensor_bytes
    assert after.read_bytes - before.read_bytes <= 3 * LAYER_BYTES, "each is read once"


LOADED: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "a file": torch.load,
    "a stream": lambda path: torch.load(io.BytesIO(path.read_bytes())),
    "a file of the old format": lambda path: torch.load(path.with_suffix(".old")),
}


@pytest.mark.parametrize("way", LOADED)
def test_loaded_within_the_budget(way: str, tmp_path: Path) -> None:
    """Memory that torch.load allocates for a checkpoint could otherwise never be evicted."""
    path = tmp_path / "plain"
    model = layers(COUNT)
    torch.save(model.state_dict(), path)
    torch.save(model.state_dict(), path.with_suffix(".old"), _use_new_zipfile_serialization=False)
    with budget(tensors=LIMIT_BYTES, page_dir=tmp_path).resizing():
        found = LOADED[way](path)
        assert sum(allocated_bytes(tensor.untyped_storage()) for tensor in found.values()) <= LIMIT_BYTES
        assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


def test_a_damaged_file_is_the_error_that_it_is_without(tmp_path: Path) -> None:
    torch.save(layers(1).state_dict(), tmp_path / "plain")
    content = (tmp_path / "plain").read_bytes()
    (tmp_path / "plain").write_bytes(content[: len(content) // 2])
    with pytest.raises(RuntimeError) as without:
        torch.load(tmp_path / "plain")
    with budget(tensors=LIMIT_BYTES, page_dir=tmp_path).resizing(), pytest.raises(RuntimeError) as within:
        torch.load(tmp_path / "plain")
    assert str(within.value) == str(without.value)


@pytest.mark.slow
def test_what_left_since_its_size_was_asked_is_written(tmp_path: Path) -> None:
    """As where another thread trains or saves in between."""
    model = layers(2)
    with budget(tensors=LAYER_BYTES * 3 // 2, page_dir=tmp_path).resizing():
        for layer in model:
            with torch.no_grad():
                layer(torch.ones(1, 256))
        first = model.get_parameter("0.weight").untyped_storage()
        nbytes = first.nbytes()
        torch.save(model.get_parameter("1.weight"), tmp_path / "other")
        assert allocated_bytes(first) == 0 < nbytes
        writer: Any = torch._C.PyTorchFileWriter(str(tmp_path / "one"))
        writer.write_record("data/0", first, nbytes)
        writer.write_end_of_file()
    assert torch._C.PyTorchFileReader(str(tmp_path / "one")).get_record("data/0") == bytes(first)

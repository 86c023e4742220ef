"""A checkpoint of lightning goes to its file as it is made, with lightning's bytes, whole or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from port_agent import budget
from tests.agent.intercept.page_files import LAYER_BYTES, layers

torch_io = pytest.importorskip("lightning.fabric.plugins.io.torch_io")


class Unwritable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("no")


def test_a_checkpoint_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = layers(8), torch_io._atomic_save
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files, path = torch_io.TorchCheckpointIO(), tmp_path / "last.ckpt"
    with budget(tensors=2 * LAYER_BYTES, page_dir=tmp_path).resizing():
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        with monkeypatch.context() as within:
            within.setitem(own.__globals__, "io", None)
            files.save_checkpoint({"state": model.state_dict()}, path)
            with pytest.raises(RuntimeError, match="no"):
                files.save_checkpoint({"state": model.state_dict(), "more": Unwritable()}, path)
    followed = path.read_bytes()
    assert torch_io._atomic_save is own
    files.save_checkpoint({"state": model.state_dict()}, path)
    assert path.read_bytes() == followed

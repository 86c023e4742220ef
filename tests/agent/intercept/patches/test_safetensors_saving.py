"""Files that `save_file` writes under a budget: the library's bytes, whatever the tensors, and
its other ways untouched.
"""

from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._torch import get_torch_storage_id
from safetensors.torch import load_file, load_model, save, save_file, save_model

from port_agent import budget
from port_agent.intercept.patches import safetensors_saving
from port_agent.intercept.residency.refusals import UnsupportedError

ELEMENTS = 16 << 10


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(4, ELEMENTS)
    return {
        'größe "1"': base[1],
        "bf16": torch.randn(2, ELEMENTS).to(torch.bfloat16),
        "bools": torch.rand(ELEMENTS) > 0.5,
        "integers": torch.arange(ELEMENTS),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


METADATA = {"format": "pt"}


def press() -> None:
    """Run something that needs all the room there is."""
    torch.ones(8, ELEMENTS).mul(2)


def test_the_same_bytes(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "plain", METADATA)
    with budget(tensors="64K", page_dir=tmp_path).resizing():
        kept = tensors()
        press()
        save_file(kept, tmp_path / "followed", METADATA)
        press()
        save_file(kept, str(tmp_path / "again"), metadata=METADATA)
        bytes_only = save(kept, METADATA)
    plain = (tmp_path / "plain").read_bytes()
    assert plain == (tmp_path / "followed").read_bytes() == (tmp_path / "again").read_bytes() == bytes_only
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "followed", "plain"]
    assert (tmp_path / "plain").stat().st_mode == (tmp_path / "followed").stat().st_mode


def test_weights_that_are_mapped_from_the_same_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "plain")
    with budget(tensors="64K", page_dir=tmp_path).resizing():
        save_file(load_file(tmp_path / "plain"), tmp_path / "copy")
        save_file(load_file(tmp_path / "plain"), tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "copy").read_bytes()


class Tied(torch.nn.Module):
    """Layers that share a weight, and a buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
        self.last.weight = self.first.weight
        both = torch.randn(2, ELEMENTS)
        self.register_buffer("both", both)
        self.register_buffer("second", both[1])


def test_a_model_whose_layers_share_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    save_model(Tied(), str(tmp_path / "plain"))
    with budget(tensors="64K", page_dir=tmp_path).resizing():
        model = Tied()
        press()
        save_model(model, str(tmp_path / "followed"))
        for parameter in model.parameters():
            parameter.data.zero_()
        press()
        assert load_model(model, tmp_path / "plain") == (set(), [])
    written, expected = (load_file(tmp_path / name) for name in ("followed", "plain"))
    assert written.keys() == expected.keys()  # the library writes its notes on shared ones in any order
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    for name, value in Tied().state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_the_hubs_ways_to_put_tensors_into_files_need_none_of_them(tmp_path: Path) -> None:
    with budget(tensors="64K", page_dir=tmp_path).resizing() as held:
        kept = tensors()
        press()
        read_bytes = held.report.read_bytes
        found = split_torch_state_dict_into_shards(kept, max_shard_size=4 * ELEMENTS)
        ids = {name: get_torch_storage_id(tensor) for name, tensor in kept.items()}
        assert held.report.read_bytes == read_bytes, "all had left"
        assert len(set(ids.values())) == len(kept) and ids["bools"] == get_torch_storage_id(kept["bools"][:2])
    assert (
        found.filename_to_tensors
        == split_torch_state_dict_into_shards(tensors(), max_shard_size=4 * ELEMENTS).filename_to_tensors
    )


def test_what_the_library_refuses_leaves_nothing(tmp_path: Path) -> None:
    with budget(tensors="64K", page_dir=tmp_path).resizing():
        kept = tensors()
        with pytest.raises(ValueError, match="non contiguous"):
            save_file({**kept, "zzz": torch.randn(64, 64).t()}, tmp_path / "refused")
        save_file(kept, tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_an_unknown_header_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_saving, "_padded", lambda _: b"{}")
    with budget(tensors="64K", page_dir=tmp_path).resizing():
        kept = tensors()
        with pytest.raises(UnsupportedError, match="header"):
            save_file(kept, tmp_path / "refused")
    assert not list(tmp_path.iterdir())


def test_the_writer_is_put_back(tmp_path: Path) -> None:
    import safetensors
    from safetensors import torch as library

    with budget(tensors="64K", page_dir=tmp_path).resizing():
        assert library.serialize_file is not safetensors.serialize_file
    assert library.serialize_file is safetensors.serialize_file

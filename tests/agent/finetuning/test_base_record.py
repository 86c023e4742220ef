"""What an adapter was trained over is told again by its files, and another is named."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import make_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_it_is_read_as_it_was_written(base: Path, tmp_path: Path) -> None:
    record = BaseRecord.of(FinetuneOptions(str(base), ("",), "", base=Quantization.INT8))
    assert BaseRecord.read(tmp_path) is None
    record.write(tmp_path)
    assert BaseRecord.read(tmp_path) == record
    assert (record.model, record.grid, list(record.files)) == (str(base), Quantization.INT8, ["model.safetensors"])
    record.check(base)
    (tmp_path / "port_agent.json").write_bytes(b'{"model": 3}')
    with pytest.raises(FinetuneError, match=r"port_agent\.json, which records the base .* is damaged"):
        BaseRecord.read(tmp_path)


def test_weights_of_the_same_shapes_are_told_apart(base: Path) -> None:
    record, path = BaseRecord.of(FinetuneOptions(str(base), ("",), "")), base / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name in weights:
        save_file({**weights, name: weights[name] * 1.5 + 1}, path, {"format": "pt"})
        with pytest.raises(
            FinetuneError, match=r"model\.safetensors has changed since the fine-tuning of .*model began"
        ):
            record.check(base)
    save_file(weights, path, {"format": "pt"})
    record.check(base)


def test_files_that_come_and_go_are_named(base: Path) -> None:
    record = BaseRecord.of(FinetuneOptions(str(base), ("",), ""))
    (base / "more.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    record.check(base)  # without an index only the one is loaded
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"one": "first.safetensors", "other": "more.safetensors"}}))
    record.check(base)  # one file comes before an index
    (base / "model.safetensors").rename(base / "first.safetensors")
    with pytest.raises(FinetuneError, match=r"first\.safetensors was added"):
        record.check(base)
    index.write_text(json.dumps({"weight_map": {"other": "more.safetensors"}}))
    with pytest.raises(FinetuneError, match=r"model\.safetensors is missing"):
        record.check(base)

"""A model directory that lacks something is refused by its files alone, with the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent.finetuning.inputs.model_files import check_model_files, check_stored_as, weight_files
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def shards(folder: Path) -> None:
    """Turn the weights into two files of which one is missing."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def noisy_index(folder: Path) -> None:
    shards(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


def of_8_bits(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in stored.items()}, folder / "model.safetensors")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (shards, "lacks 1 of 2 weight files, 'model-2.safetensors' first"),
    "cut short": (cut, "the download was cut short; repeat it"),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "pickles": (only_pickles, r"has no model.safetensors and no .*; pytorch_model\.bin is not one of these"),
    "codes": (quantised, "says that its weights are quantized .*; decode them first: port-agent decode"),
    "wrong dtype": (of_8_bits, r"holds lm_head.weight as F8_E4M3, and training needs weights of BF16, F16, F32, F64"),
    "adapter inside": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"also has an adapter \(adapter_config\.json\), which transformers would add",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "No such file.*hf download NAME"),
    "config is not valid JSON": (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
    "config of nothing": (lambda folder: (folder / "config.json").write_text("[]"), "names no model_type"),
    "weights are noise": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "is damaged"),
    "index is noise": (
        noisy_index,
        "does not say which file has which",
    ),
}


def test_one_file_is_taken_before_an_index_as_transformers_does(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-9.safetensors"}}))
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_a_whole_directory_passes(model: Path) -> None:
    check_model_files(model)


def test_other_weights_beside_those_that_are_loaded_are_left_alone(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "consolidated.safetensors").write_bytes(b"of another program")
    check_model_files(folder)
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_weights_are_stored_as_is_said_or_named(model: Path) -> None:
    check_stored_as(model, "BF16")
    with pytest.raises(
        FinetuneError, match=r"--base f16 is for weights stored in that type, and lm_head.weight in .* is BF16"
    ):
        check_stored_as(model, "F16")


@pytest.mark.parametrize("what", WRONG)
def test_what_is_missing_is_named(what: str, model: Path, tmp_path: Path) -> None:
    change, message = WRONG[what]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    with pytest.raises(FinetuneError, match=message):
        check_model_files(folder)

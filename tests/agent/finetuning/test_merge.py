"""A merged model is the base's directory with the weights that peft's own merge gives, byte for
byte, whole or not there.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.merge import MergeOutcome, merge_adapter
from port_agent.finetuning.quantized.file import quantize_model
from port_agent.finetuning.quantized.linear import QuantizedConv1D, QuantizedLinear
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import make_model

SHAPE: dict[str, Any] = {"vocab_size": 66, "bos_token_id": 0, "eos_token_id": 1}
CONFIGS: dict[str, tuple[Any, torch.dtype, str]] = {
    "llama": (transformers.LlamaConfig(
        **SHAPE, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    ), torch.bfloat16, "q_proj,v_proj,down_proj,lm_head"),
    "qwen2": (transformers.Qwen2Config(
        **SHAPE, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True,
    ), torch.float16, "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"),
    "gpt2": (transformers.GPT2Config(**SHAPE, n_embd=128, n_layer=2, n_head=2), torch.float32, "c_attn,c_proj,c_fc"),
}  # fmt: skip


def make_base(folder: Path, kind: str, shard_size: str = "100MB") -> Path:
    """Write a model with random weights, tokenizer and some files that models come with."""
    make_model(folder, hidden_size=32)
    (folder / "model.safetensors").unlink()
    config, dtype, _ = CONFIGS[kind]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "LICENSE").write_text("as you like\n")
    (folder / "pytorch_model.bin").write_bytes(b"of another kind")
    return folder


def make_adapter(
    folder: Path,
    base: Path,
    kind: str,
    *,
    targets: tuple[str, ...] = (),
    grid: Quantization | None = None,
    dora: bool = False,
) -> Path:
    """Write an adapter whose matrices are all random."""
    targets = targets or tuple(CONFIGS[kind][2].split(","))
    options = FinetuneOptions(str(base), ("",), str(folder), targets=targets, lora_rank=4, base=grid, dora=dora)
    model = load_model(options, Task(TaskKind.CAUSAL_LM), lambda text: None)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    BaseRecord.of(options).write(folder)
    return folder


def merge(adapter: Path, out: Path, base: Path | None = None) -> tuple[MergeOutcome, list[str]]:
    notes: list[str] = []
    shares: list[float] = []
    outcome = merge_adapter(adapter, out, base, shares.append, notes.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    return outcome, notes


def contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the data type and bytes of every stored tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            found[name] = str(tensor.dtype), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def by_peft(base: Any, adapter: Path, out: Path) -> dict[str, tuple[str, bytes]]:
    peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(out)
    return contents(out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_trained_magnitudes_are_merged_as_peft_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_agent.finetuning.merge.ENCODED_ITEMS", 1 << 12)  # weights in several blocks
    base = make_base(tmp_path / "base", kind)
    adapter = make_adapter(tmp_path / "adapter", base, kind, dora=True)
    assert any(name.endswith(".lora_magnitude_vector") for name in load_file(adapter / "adapter_model.safetensors"))
    merge(adapter, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert contents(tmp_path / "out") == by_peft(loaded, adapter, tmp_path / "peft")


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", ["100MB", "200KB"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_has_the_bytes_of_pefts_own_merge(kind: str, shard_size: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", kind, shard_size)
    adapter = make_adapter(tmp_path / "adapter", base, kind)
    outcome, notes = merge(adapter, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    before, mine = contents(base), contents(tmp_path / "out")
    assert mine == by_peft(loaded, adapter, tmp_path / "peft")
    changed = [name for name in mine if mine[name] != before[name]]
    assert len(changed) == outcome.merged > 0 and notes == []
    assert {n: d for n, (d, _) in mine.items()} == {n: d for n, (d, _) in before.items()}
    names = {path.name for path in base.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (1 if shard_size == "100MB" else len(names) - 7)
    for path in base.glob("*.safetensors"):
        with safe_open(path, "pt") as one, safe_open(tmp_path / "out" / path.name, "pt") as other:
            assert one.metadata() == other.metadata() and set(one.keys()) == set(other.keys())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_an_index_of_other_files_than_those_that_are_loaded_does_not_go_along(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", "100MB")
    (base / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}'
    )
    merge(make_adapter(tmp_path / "adapter", base, "llama"), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grid", "merged", "layers"),
    [("llama", Quantization.NF4, 7, 15), ("llama", Quantization.INT8, 7, 15), ("gpt2", Quantization.NF4, 8, 8)],
)
def test_over_a_grid_it_is_the_grids_weights_with_the_adapter(
    kind: str, grid: Quantization, merged: int, layers: int, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", kind)
    adapter = make_adapter(tmp_path / "adapter", base, kind, grid=grid)
    shutil.rmtree(base / ".port-agent")  # the codes are computed again
    outcome, notes = merge(adapter, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    quantize_model(loaded, base, grid, lambda text: None)
    for name, layer in [(n, m) for n, m in loaded.named_modules() if isinstance(m, QuantizedLinear | QuantizedConv1D)]:
        plain: Any = (
            Conv1D(layer.nf, layer.nx)
            if isinstance(layer, QuantizedConv1D)
            else torch.nn.Linear(layer.in_features, layer.out_features)
        )
        plain.weight, plain.bias = torch.nn.Parameter(layer.decoded()), layer.bias
        loaded.set_submodule(name, plain)
    assert contents(tmp_path / "out") == by_peft(loaded, adapter, tmp_path / "peft")
    assert outcome.grid is grid and outcome.merged == merged
    assert notes == [
        f"the adapter was trained on {grid.value}-quantized weights: {layers} layers are written as quantized and "
        "decoded, in the data type of base"
    ]


@pytest.mark.slow
def test_a_directory_that_names_weights_without_the_models_prefix(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "gpt2")
    weights = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", base, "gpt2")
    merge(adapter, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    wanted = {n.removeprefix("transformer."): v for n, v in by_peft(loaded, adapter, tmp_path / "peft").items()}
    assert contents(tmp_path / "out") == wanted


@pytest.mark.slow
def test_a_base_that_has_moved_is_named(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, "llama")
    base.rename(tmp_path / "moved")
    with pytest.raises(FinetuneError, match=r"the base .*/base does not exist; give its directory: --model DIR"):
        merge(adapter, tmp_path / "out")
    outcome, _ = merge(adapter, tmp_path / "out", tmp_path / "moved")
    assert outcome.base == str(tmp_path / "moved")


@pytest.mark.slow
def test_an_adapter_that_does_not_say_what_it_is_of_is_merged_at_its_word(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, "llama", targets=("q_proj", "up_proj"))
    (adapter / "port_agent.json").unlink()
    _, notes = merge(adapter, tmp_path / "out")
    assert len(notes) == 1 and "does not record which weights it was trained on" in notes[0]


def other_weights(base: Path, adapter: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(base / "model.safetensors").items()}
    weights["model.norm.weight"][64] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})


def settings(**changed: object) -> Callable[[Path, Path], None]:
    def change(base: Path, adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def foreign_tensor(base: Path, adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file(
        weights | {"base_model.model.lm_head.lora_magnitude_vector": torch.ones(1)},
        adapter / "adapter_model.safetensors",
    )


def foreign_layer(base: Path, adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({n.replace("q_proj", "w_q"): t for n, t in weights.items()}, adapter / "adapter_model.safetensors")


REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "other weights": (other_weights, r"base/model\.safetensors has changed since the fine-tuning of .*/base began"),
    "missing weights": (lambda base, _: (base / "model.safetensors").unlink(), "has no model.safetensors and no"),
    "no adapter": (lambda _, adapter: (adapter / "adapter_config.json").unlink(), "is not an adapter: it has no adapter_config"),
    "no matrices": (lambda _, adapter: (adapter / "adapter_model.safetensors").unlink(), "is missing or damaged"),
    "damaged record": (lambda _, adapter: (adapter / "port_agent.json").write_text("{"), "port_agent.json.* is damaged"),
    "Q-A-LoRA": (settings(use_qalora=True), "asks for use_qalora = 'True', which adapters of `finetune` do not have"),
    "a later setting": (settings(use_new=3), "asks for use_new = '3'"),
    "another kind": (settings(peft_type="IA3"), "asks for peft_type = 'IA3'"),
    "no rank": (settings(r=0), "does not describe an adapter"),
    "no mapping": (lambda _, adapter: (adapter / "adapter_config.json").write_text("[]"), "does not describe an adapter"),
    "foreign tensor": (foreign_tensor, "lora_magni.* does not belong to an adapter's two matrices"),
    "foreign layer": (foreign_layer, r"trains model\.layers\.0\.self_attn\.w_q, which is not a linear layer of"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_merged_to_the_bit_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, message = REFUSED[what]
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, "llama")
    change(base, adapter)
    with pytest.raises(FinetuneError, match=message):
        merge(adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.slow
def test_a_head_that_shares_its_weight_with_the_embeddings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    monkeypatch.setattr(
        "port_agent.finetuning.trained_model._check_head", lambda model, targets: None
    )  # as peft has it
    adapter = make_adapter(tmp_path / "adapter", base, "qwen2", targets=("lm_head",))
    with pytest.raises(FinetuneError, match=r"trains lm_head, whose weight .* shares with the embeddings"):
        merge(adapter, tmp_path / "out")


@pytest.mark.slow
def test_nothing_is_overwritten_and_the_room_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, "llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(FinetuneError, match="out exists already"):
        merge(adapter, tmp_path / "out")
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=1000))
    with pytest.raises(FinetuneError, match=r"takes .* KiB, and .* has 1000 B free; free some space"):
        merge(adapter, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.process
def test_killed_at_any_share_it_leaves_no_directory_that_looks_finished(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", "200KB")
    adapter = make_adapter(tmp_path / "adapter", base, "llama")
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom port_agent.finetuning.merge import merge_adapter\n"
        "for share in map(float, sys.argv[3:]):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        merge_adapter(Path(sys.argv[1]), Path(sys.argv[2]), None, lambda done: done >= share and os._exit(9), print)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9\n"
        "    assert not Path(sys.argv[2]).exists()\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = (str(adapter), str(tmp_path / "out"), "0.0", "0.1", "0.5", "0.9", "1.0")
    subprocess.run([sys.executable, "-c", program, *words], check=True, env=environment)
    assert (tmp_path / ".out.new").is_dir()
    merge(adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.slow
def test_weights_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, "llama")

    def cut(share: float) -> None:
        os.truncate(base / "model.safetensors", 3000)

    with pytest.raises(FinetuneError, match="became shorter while it was read"):
        merge_adapter(adapter, tmp_path / "out", None, cut, lambda text: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.slow
def test_a_model_that_is_loaded_in_another_data_type_and_lay_on_a_grid_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}))
    adapter = make_adapter(tmp_path / "adapter", base, "llama", grid=Quantization.NF4)
    with pytest.raises(FinetuneError, match=r"stored as BF16 and was quantized to nf4 as torch\.float32"):
        merge(adapter, tmp_path / "out")

"""What gguf's reader and transformers read from a file is the model that was written, tensor by tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.merge import merge_adapter
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from tests.agent.finetuning.export.exported_models import make_exported

gguf: Any = pytest.importorskip("gguf")

from port_agent.finetuning.export import gguf_file  # noqa: E402  # needs the package
from port_agent.finetuning.export.gguf_file import ExportOutcome, GgufType, export_gguf  # noqa: E402
from port_agent.finetuning.export.shape import shape_of  # noqa: E402

KINDS = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
"""Kinds of models, and the splitting of their tokenizers."""


def export(folder: Path, out: Path, kind: GgufType | None = None, adapter: Path | None = None) -> ExportOutcome:
    shares: list[float] = []
    outcome = export_gguf(folder, out, kind, adapter, shares.append, lambda text: None)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return outcome


def tensors(path: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the type and the numbers of each tensor of a file, as gguf's reader has them."""
    return {
        one.name: (one.tensor_type.name, torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()))
        for one in gguf.GGUFReader(path).tensors
    }


def rotated_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight of a Llama's queries or keys as transformers has it, from llama.cpp's."""
    return weight.view(heads, len(weight) // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", GgufType)
@pytest.mark.parametrize("model", KINDS)
def test_every_tensor_is_that_of_the_model(
    model: str, kind: GgufType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK_ITEMS", 1000)  # weights in several parts
    folder, out = make_exported(tmp_path / "model", model, KINDS[model]), tmp_path / "model.gguf"
    outcome = export(folder, out, kind)
    given, found, names = load_file(folder / "model.safetensors"), tensors(out), shape_of(folder).names()
    assert outcome.weights == len(found) == len(names) == len(given) and outcome.nbytes == out.stat().st_size
    for name, there in names.items():
        mine, expected = found[there][1], given[name].float()
        if model == "llama" and ("q_proj" in name or "k_proj" in name):
            mine = rotated_apart(mine, 4 if "q_proj" in name else 2)
        if expected.ndim == 1:
            assert found[there][0] == "F32" and torch.equal(mine, expected), name
        elif kind is GgufType.Q8_0:
            scales = expected.view(-1, 32).abs().amax(1, keepdim=True) / 127
            error = (mine - expected).view(-1, 32).abs()
            assert found[there][0] == "Q8_0" and (error <= 0.6 * scales).all(), name
        else:
            wanted = expected.half().float() if kind is GgufType.F16 else expected
            assert found[there][0] == kind.upper() and torch.equal(mine, wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("model", KINDS)
def test_transformers_reads_the_model_and_its_tokenizer_back(model: str, tmp_path: Path) -> None:
    given = {"head_dim": 128} if model == "qwen3" else {}  # transformers reads no other of Qwen3
    folder = make_exported(tmp_path / "model", model, KINDS[model], **given)
    assert export(folder, tmp_path / "made.gguf").type is GgufType.BF16
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="made.gguf", dtype=torch.float32)
    mine, theirs = dict(back.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    words = AutoTokenizer.from_pretrained(folder)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="made.gguf")
    assert read.chat_template == words.chat_template and read.eos_token_id == words.eos_token_id
    text = "to be or not 2 be, that is the question\n"
    assert read(text)["input_ids"] == words(text)["input_ids"]


@pytest.mark.slow
def test_an_adapter_is_merged_into_it(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama")
    options = FinetuneOptions(str(folder), ("",), str(tmp_path / "adapter"), targets=("q_proj", "down_proj"))
    trained = load_model(options, Task(TaskKind.CAUSAL_LM), lambda text: None)
    for parameter in (p for p in trained.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.3)
    trained.save_pretrained(options.out)
    BaseRecord.of(options).write(Path(options.out))
    merge_adapter(Path(options.out), tmp_path / "merged", folder, lambda share: None, lambda text: None)
    export(folder, tmp_path / "plain.gguf")
    export(folder, tmp_path / "adapted.gguf", adapter=Path(options.out))
    (tmp_path / "apart").mkdir()
    export(tmp_path / "merged", tmp_path / "apart" / "adapted.gguf")
    assert (tmp_path / "adapted.gguf").read_bytes() == (tmp_path / "apart" / "adapted.gguf").read_bytes()
    assert (tmp_path / "adapted.gguf").read_bytes() != (tmp_path / "plain.gguf").read_bytes()


def test_factors_of_frequencies_are_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    folder = make_exported(tmp_path / "model", "llama", "llama-bpe", rope_parameters=rope)
    export(folder, tmp_path / "model.gguf")
    factors = shape_of(folder).rope_factors()
    assert factors is not None and torch.equal(tensors(tmp_path / "model.gguf")["rope_freqs.weight"][1], factors)


def test_numbers_that_a_type_cannot_hold_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(
        FinetuneError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 70144, more than f16 can hold"
    ):
        export(folder, tmp_path / "model.gguf", GgufType.F16)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    export(folder, tmp_path / "model.gguf")
    with pytest.raises(FinetuneError, match=r"model\.gguf exists already"):
        export(folder, tmp_path / "model.gguf")


def test_rows_of_no_whole_blocks_are_written_as_16_bits(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama", intermediate_size=80)
    export(folder, tmp_path / "model.gguf", GgufType.Q8_0)
    found = tensors(tmp_path / "model.gguf")
    assert (found["blk.0.ffn_down.weight"][0], found["blk.0.ffn_up.weight"][0]) == ("F16", "Q8_0")


@pytest.mark.parametrize("model", KINDS)
def test_llama_cpp_reads_the_tokens_and_computes_the_logits_of_the_model(model: str, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    given = {"head_dim": 64} if model == "qwen3" else {}
    folder = make_exported(tmp_path / "model", model, KINDS[model], **given)
    export(folder, tmp_path / "model.gguf", GgufType.F32)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    plain, words = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    text = "to be or not 2 be, that's  the question\n\n 123 nobler"
    tokens = words(text)["input_ids"]
    assert theirs.tokenize(text.encode(), add_bos=False, special=True) == tokens
    theirs.eval(tokens)
    mine = plain(torch.tensor([tokens])).logits[0]
    found = torch.from_numpy(theirs.scores[: len(tokens)].copy())
    assert (found - mine).abs().max() < 1e-2 * mine.std()  # its cache has 16 bits

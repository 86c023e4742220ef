"""What is read from a GGUF file is the model that was written to it, or what gguf's own decoder
reads; else it is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from port_agent.finetuning.decoding.directory import DecodedType, decode_model
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.export.exported_models import make_exported

gguf: Any = pytest.importorskip("gguf")

from port_agent.finetuning.decoding.gguf_model import read_gguf  # noqa: E402  # needs the package
from port_agent.finetuning.export.gguf_file import GgufType, export_gguf  # noqa: E402

KINDS = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def exported(folder: Path, kind: GgufType | None = None) -> Path:
    out = folder.with_suffix(".gguf")
    export_gguf(folder, out, kind, None, lambda share: None, lambda text: None)
    return out


def decode(path: Path, out: Path, tokenizer: Path | None = None) -> Path:
    decode_model(path, out, DecodedType.F32, tokenizer, lambda share: None)
    return out


def changed(path: Path, out: Path, settings: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    """Write a file with other settings and without some tensors."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in settings:
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for name, value in settings.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_exported_comes_back(kind: str, tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", kind, KINDS[kind])
    out = decode(exported(folder), tmp_path / "out")
    plain, back = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, out))
    theirs, mine = dict(plain.named_parameters()), dict(back.named_parameters())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    tokens = torch.arange(12)[None]
    assert torch.equal(plain(tokens).logits, back(tokens).logits)
    words, read = (AutoTokenizer.from_pretrained(path) for path in (folder, out))
    text = "to be or not 2 be, that is the question\n"
    assert read(text)["input_ids"] == words(text)["input_ids"] and read.chat_template == words.chat_template
    assert back.generation_config.eos_token_id == words.eos_token_id


def test_stretched_positions_come_back(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama", "llama-bpe", rope_parameters=LLAMA3)
    path = exported(folder)
    assert read_gguf(path, None).config.rope_parameters == LLAMA3
    folder = make_exported(tmp_path / "other", "llama", "llama-bpe", rope_parameters={**LLAMA3, "factor": 9.0})
    with pytest.raises(FinetuneError, match=r"rope_freqs\.weight is not that of Llama 3\.1 or 3\.2"):
        read_gguf(exported(folder), None)
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    folder = make_exported(tmp_path / "linear", "llama", rope_parameters=linear)
    assert read_gguf(exported(folder), None).config.rope_parameters == linear


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_each_type_has_the_numbers_of_its_codes(name: str, tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama", hidden_size=256, intermediate_size=256)
    path, kind = exported(folder, GgufType.F32), gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    torch.manual_seed(5)
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "coded.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    wanted = {}
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        codes = torch.randint(
            0, 60, (tensor.data.shape[0], tensor.data.shape[1] // block * size), dtype=torch.uint8
        ).numpy()
        writer.add_tensor(tensor.name, codes, raw_dtype=kind)
        wanted[tensor.name] = torch.from_numpy(gguf.quants.dequantize(codes, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = load_file(decode(tmp_path / "coded.gguf", tmp_path / "out") / "model.safetensors")
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], wanted["blk.1.ffn_down.weight"])
    queries = wanted["blk.0.attn_q.weight"].view(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], queries)
    assert torch.equal(found["model.embed_tokens.weight"], wanted["token_embd.weight"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"llama.expert_count": 8}, r"has 'llama\.expert_count' = '8', which decode does not read"),
        ({"llama.rope.scaling.type": "yarn"}, r"has 'llama\.rope\.scaling\.type' = 'yarn'"),
        ({"llama.rope.dimension_count": 8}, r"has 'llama\.rope\.dimension_count' = '8'"),
        ({"split.count": 3}, "is one of 3 parts; make one file of them"),
        ({"tokenizer.ggml.model": "llama"}, "the file's tokenizer is 'llama' with the splitting 'gpt-2'"),
    ],
)
def test_settings_without_a_place_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = exported(make_exported(tmp_path / "model", "llama"))
    with pytest.raises(FinetuneError, match=said):
        read_gguf(changed(path, tmp_path / "changed.gguf", settings), None)


def test_other_kinds_missing_weights_and_damage_are_refused(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama")
    path = exported(folder)
    with pytest.raises(FinetuneError, match=r"lacks 1 of \d+ weights, blk\.1\.ffn_up\.weight first"):
        read_gguf(changed(path, tmp_path / "less.gguf", {}, ("blk.1.ffn_up.weight",)), None)
    whole = path.read_bytes()
    for name, damaged in (("short", whole[:-2000]), ("other", b"GGML" + whole[4:]), ("empty", b"")):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(FinetuneError, match="is not a GGUF file or is damaged"):
            read_gguf(tmp_path / name, None)
    (tmp_path / "kind").write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    with pytest.raises(FinetuneError, match="is a 'gemma', and decode reads llama, qwen2, qwen3"):
        read_gguf(tmp_path / "kind", None)


def test_a_tokenizer_may_be_given(tmp_path: Path) -> None:
    folder = make_exported(tmp_path / "model", "llama", "smollm")
    path = changed(exported(folder), tmp_path / "sentencepiece.gguf", {"tokenizer.ggml.model": "llama"})
    out = decode(path, tmp_path / "out", folder)
    assert (
        AutoTokenizer.from_pretrained(out)("to be")["input_ids"]
        == AutoTokenizer.from_pretrained(folder)("to be")["input_ids"]
    )

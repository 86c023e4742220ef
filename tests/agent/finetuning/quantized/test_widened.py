"""Steps in 32 bits over weights that stay in 16 have the bits of the model that was loaded in float32."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from port_agent.finetuning.inputs.libraries import Conv1D
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.quantized import linear
from port_agent.finetuning.quantized.linear import product_in_blocks
from port_agent.finetuning.quantized.widened import WidenedConv1D, WidenedEmbedding, WidenedLinear, widen
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model, multiplied_bytes
from port_agent.intercept.tiles.products import STORED
from tests.agent.finetuning.left_alone import WEIGHTS, trained_alone
from tests.agent.finetuning.tiny_model import make_data, make_model

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt2")


@pytest.fixture(autouse=True)
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared yet, and small weights are several blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(linear, "BLOCK_BYTES", 64 << 10)


def in_float32(model: Path) -> Path:
    """Return a copy of a model whose files have its numbers in 32 bits."""
    copied = model.with_name(f"{model.name}-float32")
    shutil.copytree(model, copied)
    for path in copied.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return copied


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_has_the_bits_of_the_model_loaded_in_float32(kind: str, tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model", 128, kind), make_data(tmp_path / "data.jsonl")
    asked = FinetuneOptions(
        str(model), (str(data),), str(tmp_path / "widened"), sequence_tokens=32, updates=3, accumulate=2
    )
    told = trained_alone(replace(asked, compute=Compute.FLOAT32))
    plain = trained_alone(replace(asked, model=str(in_float32(model)), out=str(tmp_path / "plain")))
    assert [json.loads(line).get("loss") for line in told] == [json.loads(line).get("loss") for line in plain]
    assert (tmp_path / "widened" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_weights_stay_in_16_bits(tmp_path: Path) -> None:
    model, notes = make_model(tmp_path / "model", 128), list[str]()
    options = FinetuneOptions(str(model), ("",), "")
    stored = load_model(options, Task(TaskKind.CAUSAL_LM), notes.append)
    widened = load_model(replace(options, compute=Compute.FLOAT32), Task(TaskKind.CAUSAL_LM), notes.append)
    tables = {t.data_ptr(): t.nbytes for m in widened.modules() if (t := getattr(m, "table", None)) is not None}
    assert sum(tables.values()) == sum(p.nbytes for p in stored.parameters() if not p.requires_grad and p.dim() == 2)
    adapters = [sum(p.nbytes for p in m.parameters() if p.requires_grad) for m in (stored, widened)]
    assert adapters[0] == adapters[1]
    assert multiplied_bytes(widened) < 1.05 * multiplied_bytes(stored)
    assert "of weights stay in 16 bits" in notes[-1]


@pytest.mark.parametrize("shape", [(640, 512), (130, 65)])
@pytest.mark.parametrize("drawn_bytes", [64 << 20, 0])
def test_a_layer_is_a_plain_one_in_float32(
    shape: tuple[int, int], drawn_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large weight is compared by numbers in some places: the answer is the same."""
    monkeypatch.setattr(linear, "_MAX_DRAWN_BYTES", drawn_bytes)
    for biased in (False, True):
        plain = nn.Linear(shape[1], shape[0], bias=biased).bfloat16().requires_grad_(False)
        given = torch.randn(3, 7, shape[1])
        mine = WidenedLinear(plain, plain.weight)
        plain = plain.float()
        one, other = given.clone().requires_grad_(), given.clone().requires_grad_()
        made, expected = mine(one), plain(other)
        assert torch.equal(made, expected)
        gradient = torch.randn_like(made)
        made.backward(gradient)
        expected.backward(gradient)
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        assert torch.equal(mine.input_gradient(gradient[0]), torch.mm(gradient[0], plain.weight))


def test_a_layer_of_gpt_2s_kind_and_a_table_are_plain_ones_in_float32() -> None:
    layer = Conv1D(384, 128).bfloat16().requires_grad_(False)
    given, mine = torch.randn(5, 128), WidenedConv1D(layer, layer.weight)
    assert torch.equal(mine(given), layer.float()(given))
    table = nn.Embedding(40, 16, padding_idx=0).bfloat16().requires_grad_(False)
    tokens, whole = torch.tensor([[0, 7, 7], [39, 1, 0]]), table.weight.float()
    assert torch.equal(WidenedEmbedding(table, table.weight)(tokens), whole[tokens])


def test_a_weight_that_is_only_shown_is_never_computed_with() -> None:
    head = nn.Linear(8, 300, bias=False).bfloat16().requires_grad_(False)
    shown = WidenedLinear(head, head.weight).weight
    assert shown.shape == (300, 8) and shown.dtype == torch.float32
    for compute in (
        lambda: torch.mm(
            torch.ones(2, 300), shown
        ),  # of a tensor without memory torch would make numbers without a word
        lambda: nn.functional.linear(torch.ones(2, 8), shown),
        lambda: shown[0],
        lambda: shown + 1,
    ):
        with pytest.raises(RuntimeError, match="stays in 16 bits in its file; call its layer"):
            compute()


def test_other_layers_are_refused_by_name_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.ones(4, 8, 8, dtype=torch.bfloat16))
            self.config = type("Config", (), {"model_type": "mixture"})

        def get_output_embeddings(self) -> None:
            """There is no head."""

    model = Model()
    monkeypatch.setattr("port_agent.finetuning.quantized.widened._MAX_COPIED_BYTES", 512)
    with pytest.raises(
        FinetuneError, match=r"other layers of this mixture take 1\.0 KiB in 32 bits \(experts \[4, 8, 8\] first\)"
    ):
        widen(model, Model())
    monkeypatch.undo()
    widen(model, Model())
    assert model.experts.dtype is torch.float32


def test_a_product_by_blocks_is_that_with_the_whole_decoded() -> None:
    weight = torch.randn(300, 64).bfloat16()
    made = product_in_blocks("grid_linear", torch.ones(2, 64), weight, torch.empty(0), None, STORED, torch.float32)
    assert torch.equal(made, nn.functional.linear(torch.ones(2, 64), weight.float()))

"""`port-agent decode` as a user types it."""

import json
from pathlib import Path

import pytest

from port_agent.cli import main
from tests.agent.finetuning.decoding.coded_models import GROUP, gptq_layer, make_coded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    return make_coded(tmp_path_factory.mktemp("decode") / "model", gptq_layer, settings)[0]


def test_it_says_what_it_wrote(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(("decode", str(model), "--out", str(out))) == 0
    output, errors = capsys.readouterr()
    assert output.startswith(f"{out}: ") and errors == ""
    assert output.endswith(" KiB, 8 of 21 weights decoded, in f32, every number exact\n")
    assert main(("decode", str(model), "--out", str(out))) == 2
    assert capsys.readouterr().err == f"port-agent: {out} exists already; give a new directory, or remove it\n"
    assert main(("decode", str(model), "--out", str(tmp_path / "short"), "--type", "bf16", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["type"], told["decoded"]) == ("finished", "bf16", 8) and told["rounded"] > 0


def test_a_training_names_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "a.txt").write_text("to be or not to be")
    for given in (model, tmp_path / "a.gguf", tmp_path):
        words = (
            "finetune",
            str(given),
            "--data",
            str(tmp_path / "a.txt"),
            "--ram",
            "600M",
            "--out",
            str(tmp_path / "o"),
        )
        if given is tmp_path:
            (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        assert main(words) == 2
        assert "port-agent decode " in capsys.readouterr().err, given


def test_a_tokenizer_is_for_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("decode", str(model), "--tokenizer", str(model), "--out", str(tmp_path / "out"))) == 2
    assert "--tokenizer is only for a GGUF file" in capsys.readouterr().err

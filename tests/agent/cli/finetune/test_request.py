"""What arguments ask for, and which are refused together."""

import argparse
import json
import re
from pathlib import Path

import pytest

from port_agent.cli.arguments import UsageError
from port_agent.cli.finetune.command import add_commands
from port_agent.cli.finetune.request import check_finetune_arguments, options_of
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.inputs.run_date import keep_for_resuming, state_folder
from port_agent.finetuning.inputs.schedule import RateSchedule


def parsed(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 768, "n_layer": 12, "n_positions": 1024}))
    return parser.parse_args(
        ["finetune", str(tmp_path), "--data", "a", "--out", str(tmp_path / "out"), "--ram", "600M", *words]
    )


def asked(tmp_path: Path, *words: str) -> FinetuneOptions:
    return options_of(parsed(tmp_path, *words))


def test_defaults_are_those_of_the_options(tmp_path: Path) -> None:
    plain = asked(tmp_path)
    default = FinetuneOptions(plain.model, plain.data, plain.out, date=plain.date, answer_tokens=1024)
    assert plain == default
    assert asked(tmp_path, "--batch", "4").answer_tokens == asked(tmp_path, "--ram", "150M").answer_tokens < 1024
    for words in (("--seq-len", "64"), ("--dpo",), ("--orpo",)):
        assert asked(tmp_path, *words).answer_tokens == 0
    assert asked(tmp_path, "--seq-len", "64").sequence_tokens == 64
    assert (asked(tmp_path, "--orpo").orpo, asked(tmp_path, "--full", "--orpo", "0.5").orpo) == (0.1, 0.5)
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--dpo", "--orpo")
    assert asked(tmp_path, "--full").learning_rate == 2e-5 and asked(tmp_path, "--full").lora_rank is None


def test_a_resumed_run_keeps_its_length_with_another_budget(tmp_path: Path) -> None:
    state_folder(tmp_path / "out").mkdir()
    keep_for_resuming(tmp_path / "out", "2025-03-09", 480)
    assert asked(tmp_path, "--ram", "8G").answer_tokens == 480 and asked(tmp_path, "--seq-len", "64").answer_tokens == 0


def test_settings_are_taken_over(tmp_path: Path) -> None:
    words = (
        "--data",
        "b",
        "--valid",
        "c",
        "--alpha",
        "8",
        "--rslora",
        "--dropout",
        "0.1",
        "--targets",
        "q_proj,v_proj",
        "--date",
        "2025-03-09",
    )
    options = asked(
        tmp_path,
        *words,
        "--schedule",
        "cosine",
        "--warm-up",
        "0.1",
        "--weight-decay",
        "0.01",
        "--eval-every",
        "5",
        "--patience",
        "2",
    )
    assert [Path(path).name for path in (*options.data, *options.valid)] == ["a", "b", "c"]
    assert (options.alpha, options.rslora, options.dropout, options.targets) == (8.0, True, 0.1, ("q_proj", "v_proj"))
    assert (options.schedule, options.warm_up, options.weight_decay) == (RateSchedule.COSINE, 0.1, 0.01)
    assert (options.evaluate_every, options.patience, options.date) == (5, 2, "2025-03-09")


def test_an_earlier_adapter_is_trained_as_it_is(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["v_proj"], "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    options = asked(tmp_path, "--from", str(tmp_path))
    assert (options.begin_from, options.lora_rank, options.alpha) == (str(tmp_path), 4, 32.0)
    assert options.rslora and options.targets == ("v_proj",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--full", "--alpha", "8"), "--alpha is for adapters, and --full has none"),
        (("--from", ".", "--rslora"), "--from trains an adapter as it is; leave out --rslora"),
        (("--patience", "2"), "--patience counts what --eval-every measures"),
        (("--eval-every", "2", "--held-out", "0"), "--eval-every measures held-out data, and --held-out is 0"),
        (("--float32",), "--float32 is for the result of --full"),
        (("--federated", "--submit", "--from", "."), "--federated begins with an adapter of its own"),
        (
            ("--proximal-mu", "0.1"),
            "--proximal-mu holds adapters near those that a round begins with; give --submit and",
        ),
        (("--dpo", "--dropout", "0.1"), "--dpo compares answers with those of the model without its adapters"),
        (("--orpo", "--head-rows", "16"), "--orpo compares answers on all rows at once and without dropout"),
        (("--show-data", "3", "--submit"), "--show-data trains nothing"),
    ],
)
def test_what_does_not_go_together_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        check_finetune_arguments(parsed(tmp_path, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu-ram", "4G"), "--gpu-ram bounds the memory of a GPU, and this trains on the CPU; give --device cuda"),
        (("--device", "mps"), "cannot resize storages of MPS"),
        (("--device", "abacus"), "--device abacus is not a valid device; give cpu or cuda"),
        (
            ("--device", "cuda", "--base", "nf4"),
            "--base nf4 decodes weights on the CPU; leave it out with --device cuda",
        ),
        (("--device", "cuda", "--compute", "float32"), "--compute float32 widens weights on the CPU"),
        (("--device", "cuda", "--accumulate-by", "layers"), "--accumulate-by layers runs on the CPU"),
        (("--device", "cuda", "--submit"), "--submit is for a fine-tuning on the CPU; leave out --device cuda"),
        (("--device", "cuda", "--explain"), "--explain is for a fine-tuning on the CPU"),
    ],
)
def test_what_does_not_go_on_a_device_is_refused_by_name(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_finetune_arguments(parsed(tmp_path, *words))


def test_a_device_is_one_of_the_options_and_its_memory_bounds_the_length_of_answers(tmp_path: Path) -> None:
    check_finetune_arguments(parsed(tmp_path, "--device", "cuda", "--gpu-ram", "4G", "--base", "bf16"))
    on_device = asked(tmp_path, "--device", "cuda", "--gpu-ram", "150M")
    assert on_device.device == "cuda" and on_device.answer_tokens == asked(tmp_path, "--ram", "150M").answer_tokens

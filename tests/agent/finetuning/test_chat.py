"""A conversation is answered as transformers and peft answer it, streamed, and ends where
the template ends an answer.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.chat import Chat, answer_ends
from port_agent.finetuning.inputs.chat_options import ChatOptions
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from tests.agent.finetuning.tiny_model import make_model

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat")
    options = FinetuneOptions(
        str(make_model(made / "model")), (), str(made / "adapter"), lora_rank=4, targets=("q_proj", "down_proj")
    )
    model = load_model(options, Task(TaskKind.CAUSAL_LM), lambda text: None)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(made / "adapter")
    BaseRecord.of(options).write(made / "adapter")
    return made


def options(folder: Path, **changes: Any) -> ChatOptions:
    return replace(ChatOptions(str(folder / "model"), most_tokens=TOKENS, greedy=True), **changes)


def quiet(text: str) -> None:
    """Take note of nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_each_answer_is_the_one_of_transformers_and_peft(adapted: bool, folder: Path) -> None:
    asked = options(folder, adapter=str(folder / "adapter") if adapted else None, system="in the mind")
    chat, streamed = Chat(asked, quiet), list[str]()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    if adapted:
        model = peft.PeftModel.from_pretrained(model, folder / "adapter")
    turns = [{"role": "system", "content": "in the mind"}]
    for said in ("to be or", "that is"):
        turns.append({"role": "user", "content": said})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        written = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=TOKENS, do_sample=False
        )
        expected = tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True)
        streamed.clear()
        answer = chat.answer(said, streamed.append)
        assert answer.text == expected == "".join(streamed) and 0 < answer.tokens <= TOKENS
        turns.append({"role": "assistant", "content": expected})


def test_an_answer_ends_with_what_the_template_writes_behind_it(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "model", tmp_path / "model")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("</s>", "<s>\n"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    model = load_model(FinetuneOptions(str(other), (), ""), Task(TaskKind.CAUSAL_LM), quiet)
    end = tokenizer.convert_tokens_to_ids("<s>")
    assert end in answer_ends(model, tokenizer)
    assert end not in answer_ends(model, transformers.AutoTokenizer.from_pretrained(folder / "model"))


@pytest.mark.slow
def test_what_cannot_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="does not generate text by itself"):
        Chat(options(folder, model=str(make_model(tmp_path / "bert", kind="bert"))), quiet)
    other = make_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(FinetuneError, match=r"model.safetensors has changed since the fine-tuning"):
        Chat(options(folder, model=str(other), adapter=str(folder / "adapter")), quiet)
    hollow = shutil.copytree(folder / "adapter", tmp_path / "hollow")
    (hollow / "adapter_model.safetensors").unlink()
    with pytest.raises(FinetuneError, match=r"adapter_model.safetensors: No such file or directory"):
        Chat(options(folder, adapter=str(hollow)), quiet)
    with pytest.raises(FinetuneError, match="the model takes at most 128; start a new one"):
        Chat(options(folder), quiet).answer("to be " * 128, quiet)

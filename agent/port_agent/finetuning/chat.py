"""Chat with a model from a directory, with or without an adapter, in its own chat template; answers are shown as they
are written.

The whole conversation is read for each answer. Weights stay in their files and are read as the budget allows.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.federated import give_adapter_of
from port_agent.finetuning.inputs.chat_options import ChatOptions
from port_agent.finetuning.inputs.earlier_adapter import adapter_settings
from port_agent.finetuning.inputs.libraries import transformers
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.task import TaskKind, task_of
from port_agent.finetuning.text.tokenizing import load_tokenizer
from port_agent.finetuning.trained_model import load_model

_ASKED, _ANSWER = "ask", "answer"
"""A test conversation that shows what a template writes after an answer."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer, its number of tokens, and the seconds that it took."""

    text: str
    tokens: int
    seconds: float


class Chat:
    """A conversation."""

    def __init__(self, options: ChatOptions, note: Callable[[str], None]) -> None:
        """Load model and tokenizer. Raises FinetuneError for a model that cannot be loaded or writes no text."""
        folder = Path(options.model)
        self._options, self._tokenizer = options, load_tokenizer(folder)
        self._model = _model_of(options, note)
        self._turns: list[Mapping[str, str]] = []
        if options.system:
            self._turns.append({"role": "system", "content": options.system})
        self._ends = answer_ends(self._model, self._tokenizer)
        if not self._tokenizer.chat_template:
            note("the tokenizer has no chat template: each text is continued by itself")
        torch.manual_seed(options.seed)

    def answer(self, question: str, write: Callable[[str], object]) -> ChatAnswer:
        """Return the answer to a text; `write` receives it as it is generated.

        Raises FinetuneError if the conversation is too long.
        """
        begin = time.monotonic()
        asked = [*self._turns, {"role": "user", "content": question}]
        tokens = self._tokens(asked)
        places = getattr(self._model.config, "max_position_embeddings", None)
        most = self._options.most_tokens if places is None else min(self._options.most_tokens, places - tokens.shape[1])
        if most < 1:
            raise FinetuneError(
                f"the conversation has {tokens.shape[1]} tokens, but the model takes at most {places}; start a new one"
            )
        sampling = (
            {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} if self._options.greedy else {}
        )
        with torch.no_grad():
            written = self._model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=most,
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else None,
                streamer=_Streamer(self._tokenizer, write),
                **sampling,
            )
        mine = written[0, tokens.shape[1] :].tolist()
        text: str = self._tokenizer.decode(mine, skip_special_tokens=True)
        self._turns = [*asked, {"role": "assistant", "content": text}]
        return ChatAnswer(text, len(mine), time.monotonic() - begin)

    def _tokens(self, turns: list[Mapping[str, str]]) -> torch.Tensor:
        """Return a conversation's tokens, [1, length], or those of its last text if there is no template.

        Raises FinetuneError.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            return torch.tensor([self._tokenizer(turns[-1]["content"])["input_ids"]])
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            raise FinetuneError(f"the chat template rejects this conversation ({error}); leave out --system") from error
        return torch.tensor([self._tokenizer(text, add_special_tokens=False)["input_ids"]])


class _Streamer(transformers.TextStreamer):
    """Passes on the generated text one word at a time."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def _model_of(options: ChatOptions, note: Callable[[str], None]) -> Any:
    """Return the model, with the adapter if one is given.

    Raises FinetuneError for an adapter that is damaged or belongs to another model, and OSError.
    """
    folder = Path(options.model)
    task = task_of(folder)
    if task.kind is not TaskKind.CAUSAL_LM:
        raise FinetuneError(f"{folder} does not generate text by itself; give a model that continues text")
    if options.adapter is None:
        return load_model(FinetuneOptions(options.model, (), "", lora_rank=1), task, note).unload().eval()
    adapter = Path(options.adapter)
    settings, record = adapter_settings(adapter), BaseRecord.read(adapter)
    if record is not None:
        record.check(folder)
    asked = FinetuneOptions(
        options.model,
        (),
        "",
        lora_rank=settings.rank,
        base=None if record is None else record.grid,
        targets=settings.targets,
        alpha=settings.alpha,
        rslora=settings.rslora,
        dora=settings.dora,
    )
    model = load_model(asked, task, note)
    give_adapter_of(model, adapter)
    return model.eval()


def answer_ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: those named by the model and its tokenizer, and the one that the template
    writes after an answer.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER}]
        behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_ANSWER)[2]
        first = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"][:1]
        ends += [token for token in first if token in tokenizer.added_tokens_decoder]
    return list(dict.fromkeys(end for end in ends if end is not None))

"""Data as tokens, by the model's own tokenizer, either in this process or in a separate one whose memory ends with it.

A vocabulary of 150,000 takes 60 MiB in a process, and 230 more while it is loaded, which is more than the trained
state. So before training, another process without torch tokenizes the data, and only the tokens are kept.
"""

import pickle
import shutil
import signal
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.conversations import ConversationWriter, UnwrittenError
from port_agent.finetuning.text.examples import Example, examples_of
from port_agent.finetuning.text.records import Records
from port_agent.finetuning.text.sequence_file import TOKEN, SequenceFile
from port_agent.finetuning.text.sequences import Split, Vocabulary, split_sequences
from port_agent.finetuning.text.task import Task, read_config, task_of
from port_agent.finetuning.text.text_encoder import LearnedText, TextEncoder
from port_agent.system.helper_process import HelperCommand, HelperError, run_helper
from port_agent.system.python_process import one_thread_environment
from port_planner.base.process_memory import peak_of_children_bytes
from port_planner.base.units import shown

_PROCESS = "port_agent.finetuning.text.tokenizer_process"
_QUIET = {"TRANSFORMERS_VERBOSITY": "error"}
"""Variables that keep transformers from warning that torch is missing."""

_NAMED_FILES = 6
"""Largest number of files of directories that a note names."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that the kernel killed for its memory use."""


@dataclass(frozen=True, slots=True)
class TokenizedData:
    """The data of a fine-tuning.

    `records`, `broken`: lines of its file, and those left out, the first of them `first_broken`.
    """

    task: Task
    split: Split
    records: int
    broken: int
    first_broken: str
    vocabulary: Vocabulary
    prompt: "array[int]"
    """The sample's tokens."""
    notes: tuple[str, ...] = ()
    """Notes for people on data that is not learned as it is, in numbers."""
    examples: tuple[Example, ...] = ()


class TokenizerProtocol(Protocol):
    """What a fine-tuning needs of a tokenizer; all methods raise FinetuneError."""

    def tokenized(self) -> TokenizedData:
        """Return the data as tokens."""

    @property
    def process_bytes(self) -> int:
        """The memory of another process that `decode` starts, 0 if there is none."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def save(self, folder: str) -> None:
        """Write the tokenizer to a directory."""


class TokenizerHere:
    """A model's tokenizer in this process."""

    process_bytes = 0

    def __init__(self, options: FinetuneOptions) -> None:
        self._options = options
        self._tokenizer: Any = None

    def tokenized(self, file: SequenceFile | None = None, saved_in: str | None = None) -> TokenizedData:
        """Return the data as tokens, kept in `file` or a new one; write the tokenizer to a directory if one is given.

        Raises FinetuneError and OSError.
        """
        options = self._options
        read_config(Path(options.model))  # before the tokenizer is loaded
        tokenizer = self._loaded()
        if saved_in is not None:
            self.save(saved_in)
        data = Records(*map(Path, options.data))
        valid = Records(*map(Path, options.valid)) if options.valid else ()
        task = task_of(Path(options.model), data)
        file = file or SequenceFile.beside(Path(options.out))
        split = split_sequences(data, tokenizer, options, task, file, valid)
        prompt = array(TOKEN, _prompt(tokenizer, options, task, as_chat=data.conversations > 0))
        vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_token_id)
        notes = (*_notes(data, split, options, task), *split.notes)
        examples = examples_of(split.train, tokenizer, task.labels, options.show_data)
        return TokenizedData(
            task, split, len(data), data.broken, data.first_broken, vocabulary, prompt, notes, examples
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises FinetuneError."""
        text: str = self._loaded().decode(list(tokens), skip_special_tokens=True)
        return text

    def save(self, folder: str) -> None:
        """Write the tokenizer to a directory. Raises FinetuneError, OSError."""
        self._loaded().save_pretrained(folder)

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._options.model))
        return self._tokenizer


def _prompt(tokenizer: Any, options: FinetuneOptions, task: Task, *, as_chat: bool) -> list[int]:
    """Return the tokens that a model continues for the sample: a question in the chat template if the data has
    conversations.
    """
    if options.sample is None:
        return []
    if task.decoder_start is not None:
        tokens: list[int] = tokenizer(options.sample)["input_ids"]
        return tokens
    as_chat = as_chat and bool(tokenizer.chat_template)
    try:
        text = ConversationWriter.of(tokenizer, options).question(options.sample) if as_chat else options.sample
    except UnwrittenError as error:
        raise FinetuneError(
            f"the chat template does not write --sample as a question ({error}); leave it out"
        ) from error
    return TextEncoder(tokenizer).encode(LearnedText(text, (), begun=not as_chat, ended=False)).tokens


def _notes(data: Records, split: Split, options: FinetuneOptions, task: Task) -> Iterator[str]:
    """Yield notes on data that is left out."""
    if data.broken:
        yield f"{', '.join(options.data)}: {data.broken} broken entries are left out, the first: {data.first_broken}"
    for what, wanted in (("one text each", True), ("records", False)):
        names = [name for name, is_text in data.from_directories if is_text is wanted]
        if names:
            more = ", ..." if len(names) > _NAMED_FILES else ""
            named = ", ".join(map(shown, names[:_NAMED_FILES]))
            yield f"{len(names):,} files of directories are read as {what}: {named}{more}"
    if data.left:
        yield f"{len(data.left)} files are left out, the first: {data.left[0]}"
    if data.unread:
        keys = ", ".join(f"{key} ({count:,})" for key, count in sorted(data.unread.items()))
        yield f"unused keys, with the number of their records: {keys}"
    if data.labels and not task.labels:
        yield f"{data.labels:,} records have a label, and this model learns {task.kind.value}: the labels are not used"
    if split.unwritten:
        yield (
            f"{split.unwritten} conversations are left out because the tokenizer's chat template does not write them "
            f"as they are, the first: {split.first_unwritten}"
        )


class TokenizerProcess:
    """A model's tokenizer in a separate process for each request.

    The first process, before training, also writes what `save` copies.
    """

    def __init__(self, options: FinetuneOptions) -> None:
        self._options = options
        self._tokenized: TokenizedData | None = None
        self.process_bytes = 0
        self._folder = tempfile.TemporaryDirectory(prefix="port-agent-tokenizer-")
        self._saved = str(Path(self._folder.name) / "tokenizer")

    def tokenized(self) -> TokenizedData:
        """Return the data as tokens, computed once. Raises FinetuneError."""
        if self._tokenized is None:
            file = SequenceFile.beside(Path(self._options.out))
            self._tokenized = self._run("tokenized", file, self._saved, inherited=(file.descriptor,))
            self.process_bytes = peak_of_children_bytes()  # before this process, which a child counts, has grown
        return self._tokenized

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises FinetuneError."""
        return str(self._run("decode", list(tokens)))

    def save(self, folder: str) -> None:
        """Write the tokenizer to a directory: another process during training would exceed the budget.

        Raises FinetuneError, OSError.
        """
        self.tokenized()
        shutil.copytree(self._saved, folder, dirs_exist_ok=True)

    def _run(self, what: str, *arguments: Any, inherited: tuple[int, ...] = ()) -> Any:
        words, environment = (msgspec.json.encode(self._options).decode(), what), {**one_thread_environment(), **_QUIET}
        command = HelperCommand(_PROCESS, words, environment, directory=None)
        try:
            output = run_helper(command, pickle.dumps(arguments), inherited=inherited)
        except HelperError as error:
            memory = error.code in _KILLED or "MemoryError" in error.last_line
            remedy = "give more --ram" if memory else "give another tokenizer or other data, or report it"
            raise FinetuneError(
                f"the process that reads the tokenizer of {self._options.model} ended with {error.code} "
                f"({error.last_line}); {remedy}"
            ) from error
        answer = pickle.loads(output)  # written by our own process
        if isinstance(answer, FinetuneError):
            raise answer
        return answer


def load_tokenizer(folder: Path) -> Any:
    """Return the directory's tokenizer. Raises FinetuneError if its files are damaged."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:  # transformers names the package in the first lines of a long text
        reason = " ".join(str(error).split())
        raise FinetuneError(f"the tokenizer of {folder} needs a package that is not installed: {reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FinetuneError(f"the tokenizer of {folder} cannot be read ({error}); download it again") from error

"""The task that a model learns: to continue text, to answer, to find masked words, or to choose a label.

transformers is loaded only when it is needed, so that a process without torch can use this module
(`port_agent.finetuning.text.tokenizer_process`). A process that trains imports it from
`port_agent.finetuning.inputs.libraries`.
"""

import enum
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from port_agent.finetuning.inputs.model_files import CONFIG, has_own_code
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.shapes import Record
from port_planner.base.units import shown


class TaskKind(enum.StrEnum):
    """The kinds of task; the value names it to the user."""

    CAUSAL_LM = "the next token"
    SEQ2SEQ_LM = "the answer to a prompt"
    MASKED_LM = "masked tokens"
    CLASSIFICATION = "labels"


@dataclass(frozen=True, slots=True)
class Task:
    """What a model learns.

    `decoder_start`: the token that a decoder begins with; `labels`: those to choose from, in order.
    """

    kind: TaskKind
    decoder_start: int | None = None
    labels: tuple[str, ...] = ()

    @property
    def encoder_alone(self) -> bool:
        """Whether the model reads a text as a whole and writes none."""
        return self.kind in (TaskKind.MASKED_LM, TaskKind.CLASSIFICATION)


def read_config(folder: Path) -> Any:
    """Return a directory's configuration without running its code.

    Raises FinetuneError for a kind that transformers does not know.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = json.loads((folder / CONFIG).read_bytes())["model_type"]
    if kind not in CONFIG_MAPPING:
        own = ", and code of its own (auto_map) is not run" if has_own_code(folder) else ""
        raise FinetuneError(
            f"{folder} is a {shown(kind)}, which transformers {transformers.__version__} does not know{own}; use a "
            "model that it knows, a newer transformers, or run your own script with `port-agent exec`"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise FinetuneError(
            f"{folder / CONFIG} is not a valid configuration of a {kind} ({reason}); download it again"
        ) from error


def task_of(folder: Path, records: Collection[Record] = ()) -> Task:
    """Return the task that a directory's model learns from records; an encoder without records finds masked tokens.

    Raises FinetuneError if this kind of model has nothing to predict, and if only some records have labels.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    config = read_config(folder)
    kind = config.model_type
    if config.is_encoder_decoder and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        if config.decoder_start_token_id is None:
            raise FinetuneError(
                f"{folder / CONFIG} does not say what the decoder of this {kind} begins with (decoder_start_token_id); "
                "add the number of the token that it was trained with"
            )
        return Task(TaskKind.SEQ2SEQ_LM, int(config.decoder_start_token_id))
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        labels = _labels(folder, kind, records)
        return Task(TaskKind.CLASSIFICATION, labels=labels) if labels else Task(TaskKind.MASKED_LM)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise FinetuneError(
            f"{folder} is a {kind}, for which transformers has no causal language model; run your own script "
            "with `port-agent exec`"
        )
    return Task(TaskKind.CAUSAL_LM)


def _labels(folder: Path, kind: str, records: Collection[Record]) -> tuple[str, ...]:
    other, labelled, found = 0, 0, set[str]()
    for record in records:
        other += not record.is_text
        if record.label is not None:
            labelled += 1
            found.add(record.label)
    if other:
        raise FinetuneError(
            f"{folder} is a {kind}, an encoder: it writes no text, and {other} of {len(records)} records have prompts or messages; give "
            'records with "text", and "label" if it is to choose one'
        )
    if labelled and labelled < len(records):
        raise FinetuneError(
            f"{labelled} of {len(records)} records have a label; give all of them one, or none to learn masked words"
        )
    labels = tuple(sorted(found))
    if len(labels) == 1:
        raise FinetuneError(f"all {len(records)} records have the label {labels[0]}; there is nothing to choose")
    return labels


def head_settings(task: Task) -> dict[str, Any]:
    """Return the configuration settings for a task's labels; none if it has no labels."""
    names = dict(enumerate(task.labels))
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}} if names else {}

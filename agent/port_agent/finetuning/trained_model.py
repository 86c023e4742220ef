"""The model of a directory, and which of its weights are trained."""

import copy
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from port_agent.finetuning.inputs.libraries import Conv1D, init_empty_weights, peft, transformers
from port_agent.finetuning.inputs.model_files import CONFIG, FLOAT_NAMES, tensor_entries, weight_files
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.quantized.file import quantize_model, returns_product
from port_agent.finetuning.quantized.widened import stored_weight, widen
from port_agent.finetuning.text.task import Task, TaskKind, head_settings, read_config
from port_agent.intercept.residency.storages import SMALLEST_MAPPING_BYTES
from port_planner.base.code_pages import release_data_pages
from port_planner.base.units import format_bytes

FLOATS = dict(zip(FLOAT_NAMES, (torch.bfloat16, torch.float16, torch.float32, torch.float64), strict=True))
"""Floating-point types, by their names in safetensors."""

_PEFTS_TASKS = {
    TaskKind.CAUSAL_LM: "CAUSAL_LM",
    TaskKind.SEQ2SEQ_LM: "SEQ_2_SEQ_LM",
    TaskKind.MASKED_LM: None,
    TaskKind.CLASSIFICATION: "SEQ_CLS",
}
_POSITIONS = re.compile(r"position|\bwpe$")
"""Names of tables with a row for each position of a sequence."""

_ALL_LINEAR = "all-linear"
"""Value of --targets, as in peft, for all linear layers except the head."""

_REFUSING_KINDS = frozenset(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"))
_REFUSED_TARGETS = {"out_proj", "conv1d"}
"""Layers to which peft adds no adapters in such models, because their kernels bypass the
layers and read the weights.
"""

_PEFTS_HEADS = ("classifier", "score")
"""Names of heads for labels that peft trains and saves itself."""

_transformers_logging: Any = transformers.utils.logging
_transformers_logging.disable_progress_bar()
_transformers_logging.set_verbosity_error()
warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|peft")
warnings.filterwarnings(
    "ignore", message="fan_in_fan_out is set to False"
)  # peft adjusts this setting for GPT-2's layers itself


def load_model(
    options: FinetuneOptions,
    task: Task,
    note: Callable[[str], None],
    check: Callable[[Any], object] = lambda model: None,
) -> Any:
    """Return the model in training mode: frozen under adapters of 32 bits, or all of it in 32 bits.

    Frozen weights stay in their files. A head for labels is initialized by the seed and trained; with it the whole
    model is in 32 bits. `note` is called for a quantized base and a new head. `check` gets the model before anything is
    changed. Raises FinetuneError for files of a different model than config.json describes, and for layers that it does
    not have, and whatever `check` raises.
    """
    folder = Path(options.model)
    torch.manual_seed(options.seed)
    whole = options.lora_rank is None or task.kind is TaskKind.CLASSIFICATION
    model, found = model_class(task).from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        dtype=torch.float32 if whole else "auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **head_settings(task),
    )
    _check_found(model, found, folder, task)
    check(model)
    new = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if new:
        note(f"{', '.join(new)} are in no file of {folder} and start from random numbers")
    unused = sorted(found["unexpected_keys"])
    if unused:
        note(
            f"{len(unused)} weights in the files belong to no layer that {CONFIG} describes and are not used, "
            f"{unused[0]} first"
        )
    if options.lora_rank is None:
        return model.train()
    if options.base is not None:
        if task.kind is TaskKind.CLASSIFICATION:
            raise FinetuneError(
                "--base is for models that predict tokens, and labels need a head in 32 bits; leave it out"
            )
        quantize_model(model, folder, options.base, note)
    if options.compute is Compute.FLOAT32:
        short_bytes = widen(model, _without_weights(model))
        note(f"steps compute in float32; {format_bytes(short_bytes)} of weights stay in 16 bits")
    _take_small_out_of_files(model)
    return with_adapters(model, options, task, new)


class _EmptyOnMeta(TorchFunctionMode):
    """Gives no memory to tensors that are created without contents; tensors made by other
    functions have their memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _without_weights(model: Any) -> Any:
    """Return the same model created in float32, with parameters that take no memory; torch's generator is unchanged."""

    def made() -> Any:
        return type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)

    with torch.random.fork_rng(devices=()), init_empty_weights(include_buffers=False):
        with _EmptyOnMeta():  # without it a parameter has memory until its layer registers it; a head's may not fit
            empty = made()
        return made() if any(buffer.is_meta for buffer in empty.buffers()) else empty


def _check_found(model: Any, found: dict[str, Any], folder: Path, task: Task) -> None:
    """Raise FinetuneError, naming the weight, if the files lack weights or their shapes differ from the model's."""
    if found["mismatched_keys"] and task.kind is not TaskKind.CLASSIFICATION:
        name, stored, described = min(found["mismatched_keys"])
        raise FinetuneError(
            f"{name} is {list(stored)} in the files of {folder} and {list(described)} as {CONFIG} describes it: they "
            "do not belong to the same model; download it again"
        )
    missing = [key for key in found["missing_keys"] if _is_needed(key, model.base_model_prefix, task)]
    if missing:
        raise FinetuneError(
            f"{folder} lacks {len(missing)} weights of the model that {CONFIG} describes, {min(missing)} first; "
            "download it again"
        )


def _is_needed(key: str, prefix: str, task: Task) -> bool:
    """Return whether a weight must be in the files: all weights of a model that writes, and in an encoder those
    below its head and pooler.
    """
    if not task.encoder_alone:
        return True
    return key.startswith(f"{prefix}.") and "pooler" not in key.split(".")


def check_takes(model: Any, longest: int, largest_token: int) -> None:
    """Raise FinetuneError if sequences have more tokens than the model has positions, or tokens that it does not know.

    It is raised, too, if the model asks for a loss beside that of its tokens.
    """
    if getattr(model.config, "output_router_logits", False):
        raise FinetuneError(
            "this model's config.json asks for the auxiliary loss of its router, which finetune does not add; set "
            "output_router_logits to false there, or train it with transformers"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if largest_token >= rows:
        raise FinetuneError(
            f"the tokenizer made token {largest_token} from the text, but the model knows tokens 0 to {rows - 1}: "
            "they do not belong together; use the tokenizer that came with it"
        )
    places = getattr(model.config, "max_position_embeddings", None)
    tables = [name for name, m in model.named_modules() if isinstance(m, nn.Embedding) and _POSITIONS.search(name)]
    if places is not None and tables and longest > places:
        raise FinetuneError(f"--seq-len {longest} is more than the {places} tokens that this model takes; lower it")


def _take_small_out_of_files(model: Any) -> None:
    """Copy weights that a budget never moves out of their files, because each use would load up to 2 MiB
    of the surrounding pages.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.nbytes < SMALLEST_MAPPING_BYTES and not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    release_data_pages()


def with_adapters(model: Any, options: FinetuneOptions, task: Task, new: Sequence[str] = ()) -> Any:
    """Return a model with its adapters of 32 bits, in training mode, everything else frozen except layers whose weights
    are in `new`.

    Raises FinetuneError for layers that it does not have.
    """
    rank = options.lora_rank or 0
    beside = sorted({name.rpartition(".")[0] for name in new if name.partition(".")[0] not in _PEFTS_HEADS})
    adapters = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if options.alpha is None else options.alpha,  # type: ignore[arg-type]  # a number is
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.dora,
        target_modules=_targets(model, options.targets),
        task_type=_PEFTS_TASKS[task.kind],
        modules_to_save=beside or None,
    )
    try:
        return peft.get_peft_model(model, adapters).train()
    except ValueError as error:
        raise FinetuneError(f"peft rejects these layers: {error}; give other --targets") from error


def model_class(task: Task) -> Any:
    """Return the transformers class that creates models for a task."""
    return {
        TaskKind.CAUSAL_LM: transformers.AutoModelForCausalLM,
        TaskKind.SEQ2SEQ_LM: transformers.AutoModelForSeq2SeqLM,
        TaskKind.MASKED_LM: transformers.AutoModelForMaskedLM,
        TaskKind.CLASSIFICATION: transformers.AutoModelForSequenceClassification,
    }[task.kind]


def multiplied_bytes(model: Any) -> int:
    """Return the bytes of the weights that a step multiplies by: all but a table of embeddings that is not also the
    head.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    table = stored_weight(embeddings)
    return int(total if head is not None and stored_weight(head) is table else total - table.nbytes)


def outline(folder: Path, task: Task) -> Any:
    """Return a directory's model without its weights, on the meta device: layers, shapes, and the data types in which
    they are loaded.

    Raises FinetuneError if no file has floats.
    """
    config = read_config(folder)
    for name, value in head_settings(task).items():
        setattr(config, name, value)
    dtype = torch.float32 if task.kind is TaskKind.CLASSIFICATION else config.dtype or stored_dtype(folder)
    with torch.device("meta"):
        return model_class(task).from_config(config, dtype=dtype)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the data type of a directory's first floats, which counts if its configuration names none.

    Raises FinetuneError.
    """
    for path in weight_files(folder):
        for entry in tensor_entries(path)[1].values():
            if entry.dtype in FLOATS:
                return FLOATS[entry.dtype]
    raise FinetuneError(
        f"{folder} has no weights of {', '.join(FLOATS)}, so it cannot be trained; use a model in one of these types"
    )


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stores its weight as [in, out], as GPT-2's do."""
    return isinstance(layer, Conv1D)


def _check_head(model: Any, targets: Collection[str]) -> None:
    """Raise FinetuneError if adapters would be added to a head that shares its weight with the embeddings, because
    they could not be merged.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return
    name = next(name for name, module in model.named_modules() if module is head)
    named = next((target for target in targets if _ends_with(name, target)), None)
    if named is not None:
        raise FinetuneError(
            f"--targets names {named}, which shares its weight with the embeddings in this model, so its adapter "
            "cannot be merged; leave it out"
        )


def _ends_with(layer: str, name: str) -> bool:
    """Return whether a layer has a name, or ends with it as peft compares them; peft stores whole names in small models."""
    return f".{layer}".endswith(f".{name}")


def _targets(model: Any, wanted: tuple[str, ...]) -> list[str] | str:
    """Return the layers that get adapters: the requested ones, otherwise those of attention in this kind of model."""
    kinds = (nn.Linear, Conv1D)
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    here = sorted({name.rpartition(".")[2] for name in layers})
    every = wanted == (_ALL_LINEAR,)
    unknown = [name for name in wanted if not every and not any(_ends_with(layer, name) for layer in layers)]
    if unknown:
        raise FinetuneError(f"the model has no layer {', '.join(unknown)}; it has {', '.join(here)}")
    _check_head(model, wanted)
    if wanted and not every:
        return list(wanted)
    own = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, kinds) and not returns_product(m)}
    refused = own | (_REFUSED_TARGETS if model.config.model_type in _REFUSING_KINDS else set())
    mapping = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    usual = [name for name in mapping.get(model.config.model_type, ()) if name in here and name not in refused]
    if usual and not every:
        return usual
    head = model.get_output_embeddings()
    plain = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, kinds) and m is not head}
    return sorted(plain - refused) if refused & plain else _ALL_LINEAR

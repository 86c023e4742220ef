"""What a fine-tuning will do, computed from the files, the model's shapes and this process before any weight is read.

The model is created without memory and run forward once on the meta device, which shows the bytes that autograd keeps for the backward
pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from port_agent.finetuning.accumulation.choice import accumulation_of
from port_agent.finetuning.accumulation.head_loss import LearnedLoss, forward_pass, model_inputs
from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.budget_check import MOMENTS, WORKING_BYTES, rows_that_fit
from port_agent.finetuning.checkpoint import Checkpoint
from port_agent.finetuning.compute import choose_compute
from port_agent.finetuning.inputs.model_files import tensor_entries, weight_files
from port_agent.finetuning.inputs.options import Compute, FinetuneOptions
from port_agent.finetuning.quantized.file import FOLDER, quantized_layers
from port_agent.finetuning.steering import CHECKPOINT_S
from port_agent.finetuning.text.task import Task
from port_agent.finetuning.text.tokenizing import TokenizerHere, TokenizerProtocol
from port_agent.finetuning.trained_model import multiplied_bytes, outline, with_adapters
from port_agent.finetuning.training import count_updates
from port_agent.intercept.residency.storages import SMALLEST_BYTES
from port_agent.packing.quantized import Quantization
from port_planner.base.code_pages import release_code_pages
from port_planner.base.process_memory import resident_bytes
from port_planner.base.units import format_bytes
from port_planner.ir.device_kinds import CPU
from port_planner.torch_compat.modes import OperatorMode
from port_planner.torch_compat.tensors import FakeTensorMode

_HOW = (
    "operator by operator as PyTorch calls them, within the budget from the first update on; not as a bundle: planning one takes minutes, and "
    "its steps took 1.3 times plain PyTorch's time where these took 1.1 to 1.2 (1.1 billion weights)"
)
"""Hint about the two ways. Measured: a bundle of TinyLlama's shape took 4.6 s per step in 600 MiB and 5.0 in 365, plain PyTorch 3.6;
planning it took three and a half minutes.
"""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The figures of a planned fine-tuning: bytes, and counts of numbers, sequences and tokens.

    What is kept for the backward pass, the logits and the frozen weights are for one batch. `read_bytes` and
    `written_bytes` are for one update, by sizes alone. Frozen weights that do not fit are read at most once in each
    direction; tensors of the forward pass that do not fit are written and read again at least once.
    """

    model: str
    kind: str
    learns: str
    """Description of what the model learns."""
    how: str
    """Description of how the steps run, and why."""
    parameters: int
    loaded_as: str
    files: tuple[str, ...]
    files_bytes: int
    merged_bytes: int
    """Bytes of weights that loading merges from several in the files, such as a mixture's experts; they are in memory
    and the page file.
    """
    trained_parameters: int
    trained_layers: tuple[str, ...]
    grid: str | None
    quantized_layers: int
    quantized_bytes: int
    is_quantized: bool
    records: int
    broken: int
    skipped: int
    unwritten: int
    """Conversations that the tokenizer's chat template rejects."""
    sequences: int
    held_out: int
    tokens: int
    learned_tokens: int
    shortest: int
    longest: int
    batch: int
    accumulate: int
    by_layers: bool
    """Whether the batches of an update run together, layer by layer."""
    accumulation_why: str
    updates: int
    done: bool
    """Whether there is a checkpoint to resume from."""
    ram_bytes: int
    process_bytes: int
    """Bytes of Python, the libraries and the sequences, as measured in this process."""
    working_bytes: int
    """Bytes by which the process grows once kernels run."""
    trained_bytes: int
    """Bytes of trained weights, their gradients and the optimizer's moments."""
    saved_bytes: int
    """Bytes kept for the backward pass of a batch. Layer by layer: the inputs of each layer for all batches, and the tensors of one
    layer of a batch.
    """
    logits_bytes: int
    """Bytes of the logits of the rows on which the head runs at a time."""
    head_rows: int
    head_why: str
    frozen_bytes: int
    """Bytes of frozen weights that a step multiplies by: all except the table of embeddings, of which only rows are read."""
    resident_frozen_bytes: int
    read_bytes: int
    written_bytes: int
    checkpoint_s: float
    checkpoint_bytes: int
    checkpoint: str
    out: str


def explain(options: FinetuneOptions, ram_bytes: int, tokenizer: TokenizerProtocol | None = None) -> Explanation:
    """Return what `finetune` would do within a budget. Raises FinetuneError as `finetune` would, and OSError."""
    folder = Path(options.model)
    data = (tokenizer or TokenizerHere(options)).tokenized()
    task, split = data.task, data.split
    options, why = choose_compute(options, task)
    lengths = split.lengths
    longest = lengths.longest
    files = weight_files(folder)
    model = outline(folder, task)
    if options.lora_rank is None:
        model = model.float().train()
    loaded_as = str(model.dtype).removeprefix("torch.")
    kind, parameters = model.config.model_type, sum(p.numel() for p in model.parameters())
    frozen = multiplied_bytes(model)
    layers = {} if options.base is None else quantized_layers(model, options.base)
    quantized_bytes = 0 if options.base is None else _quantized_bytes(layers.values(), options.base)
    frozen += quantized_bytes - sum(layer.weight.nbytes for layer in layers.values())
    merged_bytes = 0 if options.lora_rank is None else _merged_bytes(model, files)
    if options.compute is Compute.FLOAT32:
        loaded_as += f", computed in float32 ({why})"
        model = model.float()
    outlined = model
    if options.lora_rank is not None:
        with torch.device("meta"):
            model = with_adapters(model, options, task)
    release_code_pages()  # as before the first update: what kernels load again is counted with them
    process_bytes = resident_bytes()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    numbers = sum(p.numel() for p in trained.values())
    state_bytes = numbers * torch.float32.itemsize
    trained_bytes = state_bytes * (2 + MOMENTS)
    saved, logits = _one_forward(model, options, task, longest, lengths.longest_source)
    small = sum((1 + MOMENTS) * p.nbytes for p in trained.values() if p.nbytes < SMALLEST_BYTES)
    head = _head(model, options, task, longest, process_bytes + WORKING_BYTES + small, ram_bytes)
    logits = logits * head.rows // (options.sequences_at_once * longest)
    weights_bytes = (frozen if options.lora_rank is not None else 0) + trained_bytes
    beside = ram_bytes - process_bytes - WORKING_BYTES
    accumulation = accumulation_of(outlined, options, task, weights_bytes, beside)
    if accumulation.by_layers:
        saved = _saved_by_layers(outlined, options, longest, saved)
    made = saved + 2 * logits  # plus the 32-bit values that logits are computed from, some rows at a time
    frozen, head_bytes = (0, 0) if options.lora_rank is None else (frozen, _head_bytes(outlined))
    traffic = _traffic(frozen, beside - trained_bytes - made, head_bytes, options.accumulate, accumulation.by_layers)
    quantized_path = folder / FOLDER / f"{options.base}.safetensors"
    checkpoint = Checkpoint(options, split.train, BaseRecord(options.model, options.base, {})).path
    return Explanation(
        model=str(folder), kind=kind, learns=_learns(options, task), how=_HOW, parameters=parameters, loaded_as=loaded_as, files=tuple(path.name for path in files),
        files_bytes=sum(path.stat().st_size for path in files), merged_bytes=merged_bytes, trained_parameters=numbers, trained_layers=_ends(trained),
        grid=options.base, quantized_layers=len(layers), quantized_bytes=quantized_bytes, is_quantized=quantized_path.is_file(),
        records=data.records, broken=data.broken, skipped=split.skipped, unwritten=split.unwritten, sequences=len(split.train), held_out=len(split.held_out),
        tokens=lengths.tokens, learned_tokens=lengths.learned, shortest=lengths.shortest, longest=longest, batch=options.batch,
        accumulate=options.accumulate, by_layers=accumulation.by_layers, accumulation_why=accumulation.why, updates=count_updates(options, len(split.train)), done=checkpoint.is_file(), ram_bytes=ram_bytes,
        process_bytes=process_bytes, working_bytes=WORKING_BYTES, trained_bytes=trained_bytes, saved_bytes=saved, logits_bytes=logits, head_rows=head.rows, head_why=head.why, frozen_bytes=frozen,
        resident_frozen_bytes=traffic.resident_bytes, read_bytes=traffic.read_bytes,
        written_bytes=traffic.written_bytes, checkpoint_s=CHECKPOINT_S, checkpoint_bytes=(1 + MOMENTS) * state_bytes,
        checkpoint=str(checkpoint), out=options.out,
    )  # fmt: skip


def _learns(options: FinetuneOptions, task: Task) -> str:
    if not options.learns_pairs:
        return task.kind.value
    return f"the preferred of two answers ({'ORPO' if options.dpo is None else 'DPO'})"


@dataclass(frozen=True, slots=True)
class _Head:
    """The number of rows on which the head runs at a time, and why."""

    rows: int
    why: str


def _head(model: Any, options: FinetuneOptions, task: Task, length: int, beside_bytes: int, ram_bytes: int) -> _Head:
    """Return the number of rows on which the head will run at a time; `beside_bytes`: other memory of the process at that time."""
    rows = options.sequences_at_once * length
    if task.labels:
        return _Head(0, "a text has only as many logits as there are labels")
    loss = LearnedLoss(model, options.head_rows, task.kind, autocast=options.autocast)
    if options.head_rows is not None:
        return _Head(loss.rows_at_once(rows), "as asked for, even if bits differ")
    if options.learns_pairs:
        return _Head(rows, "comparing pairs of answers needs all")
    at_once = rows_that_fit(loss, rows, beside_bytes, ram_bytes)
    if at_once is None:
        return _Head(rows, "they fit")
    if task.encoder_alone or task.decoder_start is not None or not loss.separable:
        return _Head(
            rows,
            "it is trained, under --autocast, or not a separate module after the other layers, and cannot run on fewer",
        )
    return _Head(
        loss.rows_at_once(rows, at_once),
        f"the {format_bytes(loss.bytes_at_once(rows))} of all {rows} do not fit into the budget; compared before the "
        "first update, and reduced further if only that gives the same bits on this device",
    )


def _quantized_bytes(layers: Iterable[Any], base: Quantization) -> int:
    """Return the bytes of layers' codes and scales."""
    items: int = sum(layer.weight.numel() for layer in layers)
    return items * base.code_bits // 8 + items // base.block * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Traffic of an update by sizes alone: frozen weights that stay, and bytes that are read and written."""

    resident_bytes: int
    read_bytes: int
    written_bytes: int


def _traffic(frozen_bytes: int, free_bytes: int, head_bytes: int, batches: int, by_layers: bool) -> _Traffic:
    """Return the traffic of an update of `batches` batches. A negative number of free bytes for frozen weights is the amount that must
    be paged.
    """
    resident = max(0, min(frozen_bytes, free_bytes))
    paged, passes = max(0, -free_bytes), 1 if by_layers else batches
    weights = passes * (frozen_bytes - resident)
    if by_layers and 2 * head_bytes > free_bytes:  # it is not kept resident, but read for each batch
        weights += (batches - 1) * head_bytes
    return _Traffic(resident, 2 * weights + passes * paged, passes * paged)


def _merged_bytes(model: Any, files: Iterable[Path]) -> int:
    """Return the bytes of those weights of a model whose shapes no tensor in its files has."""
    shapes = {tuple(entry.shape) for path in files for entry in tensor_entries(path)[1].values()}
    return sum(p.nbytes for p in model.parameters() if tuple(p.shape) not in shapes)


def _head_bytes(model: Any) -> int:
    head = model.get_output_embeddings()
    return 0 if head is None else int(head.weight.nbytes)


def _saved_by_layers(model: Any, options: FinetuneOptions, length: int, saved_bytes: int) -> int:
    """Return what is kept when running layer by layer, given `saved_bytes` of a whole pass of one batch."""
    layers: int = model.config.num_hidden_layers
    rows_bytes: int = options.batch * length * model.get_input_embeddings().weight[0].nbytes
    return options.accumulate * (layers + 1) * rows_bytes + saved_bytes // layers


class _GroupedProducts(OperatorMode):
    """Products of a mixture's experts on this processor, for any float type; the shapes that torch computes are only for bfloat16."""

    def __init__(self) -> None:
        initialise: Any = super().__init__
        initialise()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            rows, weights = args[:2]
            return rows.new_empty((*rows.shape[:-1], weights.shape[-1]))
        return func(*args, **(kwargs or {}))


def _one_forward(model: Any, options: FinetuneOptions, task: Task, length: int, source: int) -> tuple[int, int]:
    """Return the bytes that autograd keeps of a forward pass, without the weights, and the bytes of all logits."""
    weights: set[int] = set()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights:
            kept[id(storage)] = storage.nbytes()
            alive.append(tensor)  # otherwise its storage's address would be reused
        return tensor

    alive: list[torch.Tensor] = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _GroupedProducts(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model = model.to_empty(device="cpu")
        weights = {id(p.untyped_storage()) for p in model.parameters()}
        tokens = torch.zeros((options.sequences_at_once, length), dtype=torch.long)
        read = torch.ones((options.batch, source or length), dtype=torch.long)
        inputs = model_inputs(tokens, (tokens, read) if task.encoder_alone else (read, read) if source else None)
        with forward_pass(CPU, autocast=options.autocast):
            logits = model(**inputs, **({} if task.encoder_alone else {"use_cache": False})).logits
    return sum(kept.values()), 0 if task.labels else logits.nbytes


def _ends(trained: dict[str, Any]) -> tuple[str, ...]:
    """Return the ends of the names of the layers that get adapters; () if everything is trained."""
    return tuple(sorted({name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name}))

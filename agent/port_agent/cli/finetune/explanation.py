"""The figures that `finetune --explain` shows."""

from typing import TYPE_CHECKING

from rich.table import Table

from port_planner.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from port_agent.finetuning.explain import Explanation
    from port_agent.finetuning.inputs.options import FinetuneOptions


def explanation_table(found: "Explanation", options: "FinetuneOptions") -> Table:
    """Return the figures of a planned fine-tuning, each with its meaning."""
    table = Table(show_header=False)
    many = f"{len(found.files)} files" if len(found.files) > 1 else found.files[0]
    table.add_row(
        "model", f"{found.kind}, {found.parameters / 1e6:,.1f} million weights as {found.loaded_as}: {found.model}"
    )
    table.add_row("learns", found.learns)
    table.add_row("runs", found.how)
    table.add_row("trained", _trained(found, options))
    table.add_row("weights", _weights(found, many))
    if found.grid is not None:
        there = "exists" if found.is_quantized else "is written once, before the first update"
        table.add_row(
            "grid",
            f"{found.quantized_layers} linear layers as {found.grid}, {format_bytes(found.quantized_bytes)}, in "
            f"MODEL/.port-agent, which {there}; this quantized model is the one that is trained",
        )
    table.add_row("data", f"{found.records:,} records{_left_out(found)}")
    table.add_row(
        "sequences",
        f"{found.sequences:,} to train on, {found.held_out:,} held out, of {found.shortest} to {found.longest} "
        f"tokens; {found.tokens:,} tokens in all, {found.learned_tokens:,} learned",
    )
    goes_on = "; continues from its checkpoint" if found.done else ""
    table.add_row("updates", f"{found.updates:,} of {found.accumulate} x {found.batch} sequences{goes_on}")
    if found.accumulate > 1 or found.by_layers:
        table.add_row(
            "batches", f"{'layer by layer' if found.by_layers else 'one at a time'}: {found.accumulation_why}"
        )
    _add_memory(table, found)
    if found.head_rows:
        table.add_row("head", f"on {found.head_rows} rows of the longest batch at a time: {found.head_why}")
    table.add_row("budget", _verdict(found))
    table.add_row(
        "an update",
        f"reads up to {format_bytes(found.read_bytes)} again and writes {format_bytes(found.written_bytes)} or more, "
        "by sizes alone",
    )
    table.add_row(
        "checkpoint",
        f"{format_bytes(found.checkpoint_bytes)} every {format_seconds(found.checkpoint_s)}, at Ctrl-C and when the "
        f"agent ends it: {found.checkpoint}",
    )
    table.add_row(
        "result", f"{'a model' if options.lora_rank is None else 'an adapter'} and the tokenizer: {found.out}"
    )
    return table


def _add_memory(table: Table, found: "Explanation") -> None:
    kept = (
        "the inputs of each layer for all batches, and the tensors of one layer for one batch"
        if found.by_layers
        else "of the longest batch"
    )
    for name, nbytes, what in (
        ("process", found.process_bytes, "Python, torch, transformers and the data, as measured in this process"),
        ("kernels", found.working_bytes, "approximate growth once kernels run: their code and workspaces"),
        ("trained state", found.trained_bytes, "weights, gradients and two moments of AdamW"),
        ("activations", found.saved_bytes, f"kept for the backward pass: {kept}"),
        ("logits", 2 * found.logits_bytes, "and their gradient, for the rows that the head runs on at a time"),
        (
            "frozen weights",
            found.resident_frozen_bytes,
            f"of {format_bytes(found.frozen_bytes)} that a step multiplies by, stay in memory",
        ),
    ):
        table.add_row(name, f"{format_bytes(nbytes)}: {what}")


def _left_out(found: "Explanation") -> str:
    counts = (
        (found.broken, "broken lines"),
        (found.skipped, "prompts that are too long"),
        (found.unwritten, "conversations that the chat template rejects"),
    )
    left = [f"{count} {what}" for count, what in counts if count]
    return f", without {' and '.join(left)}" if left else ""


def _trained(found: "Explanation", options: "FinetuneOptions") -> str:
    numbers = f"{found.trained_parameters / 1e6:,.2f} million numbers in float32"
    if options.lora_rank is None:
        return f"all: {numbers}"
    return f"LoRA of rank {options.lora_rank} on {', '.join(found.trained_layers)}: {numbers}; all else is frozen"


def _weights(found: "Explanation", many: str) -> str:
    size = f"{format_bytes(found.files_bytes)} in {many}"
    if found.frozen_bytes and found.merged_bytes:
        return f"{size}; loading merges {format_bytes(found.merged_bytes)} of them, which are kept in memory and in the page file; the others are read in place"
    if found.frozen_bytes:
        return f"{size}, mapped and read in place, never copied or written; of embeddings, only the rows that occur are read"
    return f"{size}, read once; trained weights are kept in memory and in the page file"


def _verdict(found: "Explanation") -> str:
    budget = format_bytes(found.ram_bytes)
    if found.written_bytes:
        missing = found.written_bytes // (1 if found.by_layers else found.accumulate)
        return f"{budget}: {format_bytes(missing)} of a step's tensors do not fit and are paged out meanwhile"
    if found.read_bytes:
        return (
            f"{budget}: all of a step's tensors fit; frozen weights that do not fit are read again in the forward and "
            "the backward pass"
        )
    return f"{budget}: everything fits"

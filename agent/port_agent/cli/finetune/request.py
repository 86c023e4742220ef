"""The options that the arguments of `finetune` request, and which arguments exclude each other."""

import argparse
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from port_agent.cli.arguments import UsageError
from port_agent.finetuning.inputs.answer_length import PACKED_TOKENS, longest_answer
from port_agent.finetuning.inputs.earlier_adapter import AdapterSettings, adapter_settings
from port_agent.finetuning.inputs.options import Compute, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.inputs.run_date import date_of_run, length_of_run
from port_agent.packing.quantized import Quantization
from port_planner.ir.device_kinds import BACKEND_GROUP, CPU, CUDA, MPS

AS_STORED = "bf16"
"""Value of --base that keeps the weights as they are stored, and requires bfloat16."""

_RANK = 8
_ADAPTERS_RATE, _FULL_RATE = 2e-4, 2e-5
"""Default learning rates: adapters start from zero, whole models from trained weights."""


def check_finetune_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for arguments that exclude each other."""
    a = arguments
    of_adapters = next(
        (n for n in ("targets", "alpha", "rslora", "dora", "dropout", "begin_from") if getattr(a, n)), None
    )
    alone = next((name for name in ("federated", "name") if getattr(a, name)), None)
    only = next((name for name in ("explain", "show_data") if getattr(a, name)), None)
    of_earlier = next((name for name in ("targets", "alpha", "rslora", "dora") if getattr(a, name)), None)
    wrong = (
        (a.full and of_adapters, f"{_word(of_adapters)} is for adapters, and --full has none; give one of them"),
        (a.full and a.base, "--full trains all weights, and --base freezes them; give one of them"),
        (a.begin_from and of_earlier, f"--from trains an adapter as it is; leave out {_word(of_earlier)}"),
        (a.patience and not a.eval_every, "--patience counts what --eval-every measures; give both"),
        (
            a.eval_every and not a.held_out and not a.valid,
            "--eval-every measures held-out data, and --held-out is 0; give a share or --valid",
        ),
        (
            a.float32 and not a.full,
            "--float32 is for the result of --full; adapters are always float32; leave it out",
        ),
        (
            a.autocast and a.base in tuple(Quantization),
            "--autocast casts weights, and quantized weights are decoded to the model's own type; give one of them",
        ),
        (
            a.proximal_mu is not None and not a.federated,
            "--proximal-mu holds adapters near those that a round begins with; give --submit and --federated, or leave "
            "it out",
        ),
        (a.federated and a.full, "--federated exchanges adapters, and --full has none; leave out --full"),
        (a.federated and a.begin_from, "--federated begins with an adapter of its own; leave out --from"),
        (
            a.federated and a.dora,
            "--federated initializes its adapter without the weights, and --dora needs them; leave out --dora",
        ),
        (
            a.dpo and (a.full or a.head_rows or a.dropout),
            "--dpo compares answers with those of the model without its adapters, on all rows at once and without "
            "dropout; leave out --full, --head-rows and --dropout",
        ),
        (
            a.orpo and (a.head_rows or a.dropout),
            "--orpo compares answers on all rows at once and without dropout; leave out --head-rows and --dropout",
        ),
        *_wrong_on_device(a),
        (alone and not a.submit, f"{_word(alone)} is for a job of the agent; add --submit"),
        (
            only and (a.submit or a.opportunistic),
            f"{_word(only)} trains nothing; leave out --submit and --opportunistic",
        ),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise UsageError(message)


def _wrong_on_device(a: argparse.Namespace) -> tuple[tuple[object, str], ...]:
    """Return what would be wrong about `--device` and `--gpu-ram`, and whether it is."""
    known = (CPU, CUDA, *sorted(entry_points(group=BACKEND_GROUP).names))
    if a.device == CPU:
        return ((a.gpu_ram, "--gpu-ram bounds the memory of a GPU, and this trains on the CPU; give --device cuda"),)
    there = f"--device {a.device}"
    only = next((name for name in ("submit", "explain") if getattr(a, name)), None)
    return (
        (
            a.device == MPS,
            f"{there}: torch 2.13 cannot resize storages of MPS, and training on it was never tried; use --device {CPU}",
        ),
        (a.device not in known, f"{there} is not a valid device; give {' or '.join(known)}"),
        (
            a.base in tuple(Quantization),
            f"--base {a.base} decodes weights on the CPU; leave it out with {there}, where weights that do not fit into --gpu-ram "
            "move to the host's memory",
        ),
        (a.compute is Compute.FLOAT32, f"--compute float32 widens weights on the CPU; leave it out with {there}"),
        (
            a.accumulate_by is MicroBatchOrder.LAYERS,
            f"--accumulate-by layers runs on the CPU; leave it out with {there}",
        ),
        (only, f"{_word(only)} is for a fine-tuning on the CPU; leave out {there}"),
    )


def options_of(arguments: argparse.Namespace) -> FinetuneOptions:
    """Return the options that the arguments ask for.

    Raises FinetuneError if an adapter or a stored date cannot be read.
    """
    a = arguments
    targets = tuple(name for name in a.targets.split(",") if name)
    adapter = AdapterSettings(a.lora or _RANK, a.alpha, a.rslora, targets, a.dora)
    if a.begin_from is not None:
        adapter = adapter_settings(a.begin_from)
    answer_tokens = 0  # pairs of answers are compared on all rows of logits at once, an encoder has its own length
    if a.seq_len is None and not (a.dpo or a.orpo):
        kept = length_of_run(a.out)
        memory_bytes = a.gpu_ram or a.ram
        answer_tokens = longest_answer(a.model, memory_bytes // a.batch, with_head=a.full) if kept is None else kept
    return FinetuneOptions(
        model=str(a.model.absolute()), data=_absolute(a.data), valid=_absolute(a.valid), out=str(a.out.absolute()),
        lora_rank=None if a.full else adapter.rank, base=None if a.base in (None, AS_STORED) else Quantization(a.base),
        begin_from=None if a.begin_from is None else str(a.begin_from.absolute()), targets=adapter.targets, alpha=adapter.alpha, rslora=adapter.rslora,
        dora=adapter.dora, dropout=a.dropout, sequence_tokens=a.seq_len or PACKED_TOKENS, answer_tokens=answer_tokens, batch=a.batch, accumulate=a.accumulate, accumulate_by=a.accumulate_by, autocast=a.autocast,
        compute=a.compute, head_rows=a.head_rows, epochs=a.epochs, updates=a.updates, learning_rate=a.lr or (_FULL_RATE if a.full else _ADAPTERS_RATE),
        warm_up=a.warm_up, schedule=a.schedule, weight_decay=a.weight_decay, proximal_mu=a.proximal_mu, held_out=a.held_out, evaluate_every=a.eval_every, patience=a.patience,
        events=None if a.tensorboard is None else str(a.tensorboard.absolute()), seed=a.seed, date=a.date or date_of_run(a.out), sample=a.sample, json=a.json, show_data=a.show_data or 1, borders=a.borders, dpo=a.dpo, orpo=a.orpo, float32_result=a.float32,
        overwrite=a.overwrite, device=a.device,
    )  # fmt: skip


def _word(name: str | None) -> str:
    return "--from" if name == "begin_from" else f"--{(name or '').replace('_', '-')}"


def _absolute(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(str(path.absolute()) for path in paths)

"""Every model type and task of transformers' auto mappings as a tiny program of four training steps."""

import importlib
import re
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from benchmarks.follow_zoo.children import Case
from benchmarks.follow_zoo.compare import SETTINGS, Program, seed, state, training_begins
from benchmarks.follow_zoo.inputs import Wanted, batch_for
from benchmarks.follow_zoo.shrink import REACHES, Reach, shrink

STEPS = 4
SEARCH_S = 20.0  # processor seconds after which no further way to make a model is tried
LARGEST = 12_000_000  # parameters; what cannot be made smaller than this by its configuration is left out
WITH_A_LOSS = re.compile(
    r"CausalLM|ConditionalGeneration|MaskedLM|ImageClassification|ObjectDetection|CTC|Segmentation|PreTraining"
)


class DoesNotTrain(RuntimeError):
    """Raised when a tiny model could not be made, or no made-up batch gives it a finite loss."""


def tasks() -> dict[str, list[str]]:
    """Return the classes of every model type, the one most likely to have a loss first."""
    found: dict[str, list[str]] = {}
    for mapping in sorted(n for n in vars(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")):
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in found.setdefault(model_type, []):
                    found[model_type].append(name)
    return {t: sorted(names, key=lambda n: (not WITH_A_LOSS.search(n), n)) for t, names in found.items()}


def cases() -> Iterator[Case]:
    """Give one case per model type and class: first one class of each type, then the second of each."""
    importlib.import_module("transformers.modeling_utils")  # once here rather than in every child
    by_type = tasks()
    for turn in range(max(map(len, by_type.values()))):
        for model_type, names in sorted(by_type.items()):
            if turn < len(names):
                yield Case(f"transformers/{model_type}/{names[turn]}", program(model_type, names[turn]), SETTINGS)


def program(model_type: str, class_name: str) -> Program:
    """Return the training of a tiny model; how to make it is found out when it first runs."""
    recipe: list[tuple[Reach, Wanted]] = []

    def train() -> Any:
        warnings.simplefilter("ignore")
        if not recipe:
            recipe.append(find_recipe(model_type, class_name))
        seed()
        reach, wanted = recipe[0]
        model = make(model_type, class_name, reach)
        return four_steps(model, lambda: batch_for(model, wanted), class_name)

    return train


def make(model_type: str, class_name: str, reach: Reach) -> nn.Module:
    """Return a tiny instance with random weights, in training mode."""
    import transformers

    model_class = getattr(transformers, class_name)
    config_class = CONFIG_MAPPING.get(model_type, model_class.config_class)
    if model_class.config_class is not None and not issubclass(config_class, model_class.config_class):
        config_class = model_class.config_class
    fields = {k: v for k, v in config_class().to_dict().items() if k != "model_type"}
    config = config_class.from_dict(shrink(fields, reach))
    if not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > LARGEST:
        raise DoesNotTrain(f"{count / 1e6:.0f} million parameters are left after shrinking")
    torch.manual_seed(1)
    made: nn.Module = model_class(config).float().train()
    return made


def find_recipe(model_type: str, class_name: str) -> tuple[Reach, Wanted]:
    """Return how to make the model and its batches so that one step has a finite loss; the least
    reduced attempt comes last.
    """
    first: Exception | None = None
    began = time.process_time()
    for reach in REACHES:
        if time.process_time() - began > SEARCH_S:
            break
        try:
            model = make(model_type, class_name, reach)
        except Exception as error:
            first = first or error
            continue
        for wanted in _wishes(model):
            try:
                four_steps(model, lambda w=wanted, m=model: batch_for(m, w), class_name, steps=1)
            except Exception as error:
                first = first or error
                continue
            return reach, wanted
    raise DoesNotTrain(f"{type(first).__name__}: {first}") from first


def _wishes(model: Any) -> Iterator[Wanted]:
    """Yield what to put in the batch, from most to least; the number of image tokens is
    learned from the model's error.
    """
    for labels in (True, False):
        tokens = 0
        try:
            with torch.no_grad():
                model(**batch_for(model, Wanted(labels)))
        except Exception as error:
            match = re.search(r"features:?\s*(?:torch.Size\(\[)?(\d+)", str(error))
            tokens = int(match.group(1)) // 4 if match else 0
        yield Wanted(labels, image_tokens=tokens)
        yield Wanted(labels, images=False)
        if tokens == 0:
            yield Wanted(labels, frames=True)


def four_steps(model: nn.Module, batch: Any, salt: str, steps: int = STEPS) -> Any:
    """Train with clipping and one of AdamW's implementations, chosen by `salt`; return losses and state."""
    kind: dict[str, Any] = ({}, {"foreach": True}, {"fused": True})[zlib.crc32(salt.encode()) % 3]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **kind)
    training_begins()
    losses = []
    for _ in range(steps):
        loss = loss_of(model(**batch()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not bool(torch.isfinite(losses[-1])):
            raise DoesNotTrain("the loss is not finite: equal bits would show nothing")
    return losses, state(model, optimizer)


def loss_of(output: Any) -> Tensor:
    """Return the output's loss, or the mean square of all its numbers if it has none."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.float().mean()
    found = [t for t in torch.utils._pytree.tree_leaves(_plain(output)) if isinstance(t, Tensor)]
    parts = [t.float().square().mean() for t in found if t.requires_grad and t.is_floating_point() and t.numel()]
    if not parts:
        raise DoesNotTrain("no output has a gradient")
    return torch.stack(parts).sum()


def _plain(output: Any) -> Any:
    if hasattr(output, "items"):
        return [_plain(v) for _, v in output.items()]
    if isinstance(output, (list, tuple)):
        return [_plain(v) for v in output]
    return output

"""Made-up batches for models that are known only by their signature and configuration."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.follow_zoo.shrink import IMAGE_SIZE, TEXT_LENGTH, VOCABULARY

BATCH = 4
FIRST_WORD = 10  # smaller ones are special in most vocabularies


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a batch should hold besides the main input; several are tried until the model accepts one."""

    labels: bool = True
    images: bool = True
    frames: bool = False  # images are films
    image_tokens: int = 0  # per sequence


def configured(config: Any, *names: str, default: int) -> int:
    """Return the first of these integer fields that the configuration, or one inside it, has."""
    inside = [
        getattr(config, n, None) for n in ("text_config", "vision_config", "audio_config", "backbone_config", "encoder")
    ]
    for place in (config, *inside):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def batch_for(model: Any, wanted: Wanted) -> dict[str, Any]:
    """Return keyword arguments for one forward pass, drawn from the global generator."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    kind = type(model).__name__
    batch: dict[str, Any] = {}
    _add_text(batch, names, config, kind, wanted)
    if wanted.images or not batch:
        _add_images(batch, names, config, wanted.frames)
    _add_sound(batch, names, config)
    _add_series(batch, names, config)
    if wanted.labels:
        _add_labels(batch, names, config, kind)
    if "return_loss" in names and wanted.labels:
        batch["return_loss"] = True
    return batch


def text_length(config: Any) -> int:
    """Return the number of words in a sequence."""
    return min(TEXT_LENGTH, configured(config, "max_position_embeddings", "n_positions", default=TEXT_LENGTH))


def words(config: Any, *shape: int) -> Tensor:
    """Return random words of a vocabulary, without special tokens."""
    top = min(VOCABULARY, configured(config, "vocab_size", default=VOCABULARY)) - 24
    return torch.randint(min(FIRST_WORD, top - 1), top, shape)


def _add_text(batch: dict[str, Any], names: set[str], config: Any, kind: str, wanted: Wanted) -> None:
    if "input_ids" in names:
        length = text_length(config)
        shape = (BATCH, 2, length) if "MultipleChoice" in kind else (BATCH, length)
        ids = words(config, *shape)
        image = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if wanted.image_tokens and isinstance(image, int):
            ids = torch.cat([ids[:, :4], torch.full((BATCH, wanted.image_tokens), image), ids[:, 4:]], dim=1)
        batch["input_ids"] = ids
        if "attention_mask" in names and ids.dim() == 2:
            mask = torch.ones_like(ids)
            mask[0, -5:] = 0
            batch["attention_mask"] = mask
        if "bbox" in names:
            batch["bbox"] = torch.randint(0, 400, (BATCH, length, 2)).repeat(1, 1, 2) + torch.tensor([0, 0, 50, 50])
        if "pixel_values" in names and "token_type_ids" in names and kind.startswith(("Gemma3", "PaliGemma")):
            batch["token_type_ids"] = torch.zeros_like(ids)
    if "decoder_input_ids" in names and not re.search("SequenceClass|QuestionAns", kind):
        batch["decoder_input_ids"] = words(config, BATCH, TEXT_LENGTH // 2)


def _add_images(batch: dict[str, Any], names: set[str], config: Any, film: bool) -> None:
    size = configured(config, "image_size", "img_size", default=IMAGE_SIZE)
    channels = configured(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = configured(config, "num_frames", "frames_per_clip", default=8)
    if "pixel_values" in names:
        batch["pixel_values"] = torch.randn(BATCH, *([frames] if film else []), channels, size, size)
    if "pixel_values_videos" in names and "pixel_values" not in names:
        batch["pixel_values_videos"] = torch.randn(2, frames, channels, size, size)
    if "pixel_mask" in names and "pixel_values" in batch:
        batch["pixel_mask"] = torch.ones(BATCH, size, size, dtype=torch.long)


def _add_sound(batch: dict[str, Any], names: set[str], config: Any) -> None:
    if "input_values" in names:
        bins, length = configured(config, "num_mel_bins", default=0), configured(config, "max_length", default=0)
        batch["input_values"] = torch.randn(BATCH, length, bins) if bins and length else torch.randn(2, 4000)
    if "input_features" in names:
        bins = configured(
            config, "num_mel_bins", "input_channels", "feature_size", "input_feat_per_channel", default=80
        )
        positions = configured(config, "max_source_positions", default=0)
        last = configured(config, "input_feat_per_channel", default=0) or not positions
        batch["input_features"] = torch.randn(2, 96, bins) if last else torch.randn(2, bins, 2 * positions)


def _add_series(batch: dict[str, Any], names: set[str], config: Any) -> None:
    context = configured(config, "context_length", default=32)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = configured(config, "num_input_channels", "input_size", default=1)
    if "past_values" in names:
        many = channels if channels > 1 or "num_input_channels" in vars(config) else 0
        shape = (BATCH, context + lags, many) if many else (BATCH, context + lags)
        batch["past_values"] = torch.randn(*shape)
        ahead = configured(config, "prediction_length", default=8)
        features = configured(config, "num_time_features", default=0)
        if "past_time_features" in names:
            batch["past_time_features"] = torch.randn(BATCH, context + lags, features)
            batch["past_observed_mask"] = torch.ones(*shape)
            batch["future_time_features"] = torch.randn(BATCH, ahead, features)
        if "future_values" in names:
            batch["future_values"] = torch.randn(BATCH, ahead, many) if many else torch.randn(BATCH, ahead)


def _add_labels(batch: dict[str, Any], names: set[str], config: Any, kind: str) -> None:
    classes = max(2, int(getattr(config, "num_labels", 2) or 2))
    text = batch.get("input_ids")
    if "start_positions" in names:
        batch["start_positions"], batch["end_positions"] = (
            torch.randint(0, text_length(config), (BATCH,)) for _ in range(2)
        )
    if "next_sentence_label" in names:
        batch["next_sentence_label"] = torch.randint(0, 2, (BATCH,))
    if "mask_labels" in names:
        size = batch["pixel_values"].shape[-1]
        batch["mask_labels"] = [(torch.rand(2, size, size) > 0.5).float() for _ in range(BATCH)]
        batch["class_labels"] = [torch.randint(0, classes, (2,)) for _ in range(BATCH)]
    if "bool_masked_pos" in names and re.search(r"Masked|PreTraining", kind):
        side = batch["pixel_values"].shape[-1] // configured(config, "patch_size", default=16)
        batch["bool_masked_pos"] = torch.rand(BATCH, side * side) > 0.5
    if "labels" in names:
        batch["labels"] = _labels(batch, config, kind, classes, text)


def _labels(batch: dict[str, Any], config: Any, kind: str, classes: int, text: Tensor | None) -> Any:
    first = next(iter(batch.values()))
    rows = len(first)
    if re.search(r"ObjectDetection|ForSegmentation", kind):
        one = lambda: {"class_labels": torch.randint(0, classes, (3,)), "boxes": torch.rand(3, 4) * 0.4 + 0.1}  # noqa: E731
        size = first.shape[-1]
        masks = {"masks": (torch.rand(3, size, size) > 0.5).float()} if "Segmentation" in kind else {}
        return [one() | masks for _ in range(rows)]
    if "SemanticSegmentation" in kind:
        size = batch["pixel_values"].shape[-1]
        return torch.randint(0, classes, (rows, size, size))
    if "DepthEstimation" in kind:
        size = batch["pixel_values"].shape[-1]
        return torch.rand(rows, size, size)
    if re.search(r"SequenceClass|ImageClass|VideoClass|AudioClass|NextSentence|XVector", kind):
        return torch.randint(0, classes, (rows,))
    if "MultipleChoice" in kind:
        return torch.randint(0, 2, (rows,))
    if re.search(r"TokenClass|FrameClass", kind) and text is not None:
        return torch.randint(0, classes, text.shape)
    if "CTC" in kind:
        return words(config, rows, 4)
    if "decoder_input_ids" in batch:
        return words(config, *batch["decoder_input_ids"].shape)
    if text is not None:
        return words(config, *text.shape)
    return words(config, rows, TEXT_LENGTH // 2)

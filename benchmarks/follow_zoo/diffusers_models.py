"""The UNets, autoencoders and transformers of diffusers as tiny programs of four training steps."""

import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.children import Case
from benchmarks.follow_zoo.compare import SETTINGS, seed
from benchmarks.follow_zoo.shrink import WIDTH, Reach, shrink
from benchmarks.follow_zoo.transformers_models import LARGEST, DoesNotTrain, four_steps

_KINDS = re.compile(
    r"^(UNet|Autoencoder|Consistency|Prior|VQ|Transformer|ControlNet|DiT|T5Film)|Transformer(2D|3D)?Model$"
)
_ROWS = 2
_WORDS = 8


def cases() -> Iterator[Case]:
    """Give one case per model class."""
    if importlib.util.find_spec("diffusers") is None:
        return
    import diffusers
    from diffusers import ModelMixin

    for name in sorted(n for n in dir(diffusers) if _KINDS.search(n)):
        found = getattr(diffusers, name)
        if inspect.isclass(found) and issubclass(found, ModelMixin):
            yield Case(f"diffusers/{name}", partial(_train, found), SETTINGS)


def _train(model_class: Any) -> Any:
    warnings.simplefilter("ignore")
    seed()
    model = _make(model_class)
    return four_steps(model, lambda: _batch(model), model_class.__name__)


def _make(model_class: Any) -> nn.Module:
    """Return a tiny model: its constructor's defaults, made smaller; the defaults themselves if smaller
    ones do not fit together.
    """
    parameters = inspect.signature(model_class.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    fields = shrink(defaults, Reach(images=False, dropout=0.1))
    for name in ("norm_num_groups", "num_groups"):
        if isinstance(fields.get(name), int):
            fields[name] = 8
    for options in (fields, {}):
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(**options).parameters())
            if count <= LARGEST:
                made: nn.Module = model_class(**options).train()
                return made
        except (
            ValueError,
            TypeError,
            RuntimeError,
            AttributeError,
            IndexError,
            NotImplementedError,
            ZeroDivisionError,
        ):
            continue
    raise DoesNotTrain("no tiny instance of it could be made from the defaults of its constructor")


def _batch(model: Any) -> dict[str, Any]:
    """Return keyword arguments for one forward pass, chosen by the names of its parameters."""
    config, names = model.config, inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    channels = _first(config.get("in_channels") or config.get("num_channels") or 4)
    side = min(_first(config.get("sample_size") or 16), 32)
    for name in names:
        if name in {"sample", "x", "hidden_states"}:
            given[name] = _sample(type(model).__name__, channels, side)
        elif name == "timestep":
            given[name] = torch.randint(0, 50, (_ROWS,))
        elif name in {"encoder_hidden_states", "proj_embedding"}:
            width = _first(config.get("cross_attention_dim") or config.get("joint_attention_dim") or WIDTH)
            given[name] = torch.randn(_ROWS, _WORDS, width)
        elif name == "class_labels" and config.get("num_embeds_ada_norm"):
            given[name] = torch.randint(0, 4, (_ROWS,))
        elif name == "pooled_projections":
            given[name] = torch.randn(_ROWS, _first(config.get("pooled_projection_dim") or WIDTH))
    return given


def _sample(kind: str, channels: int, side: int) -> Tensor:
    if re.search("1D|Oobleck", kind):
        return torch.randn(_ROWS, channels, 64)
    if re.search("3D|Video|Temporal|Motion|LTX|Cog|Wan|Mochi|Allegro|Cosmos", kind):
        return torch.randn(_ROWS, channels, 5, side, side)
    return torch.randn(_ROWS, channels, side, side)


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)

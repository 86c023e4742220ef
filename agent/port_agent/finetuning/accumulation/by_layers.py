"""Run the micro-batches of an update together, layer by layer, so that each layer's weights are read once
per direction and update.

Run one at a time, each micro-batch goes through all layers and back, and weights that do not fit into the budget are
read for each of them. Here all micro-batches go through the first layer, then through the second, and so on. The hidden
rows between two layers are kept, and paged if they do not fit. In the backward pass each layer is run again for one
micro-batch at a time, forward and backward, so nothing else of it is kept. Its gradients are added in the order of the
micro-batches.

The bits are those of micro-batches that run one at a time: each operator gets the same operands, and each sum has the
same terms in the same order. Trained weights outside the layers, embeddings and head, are run again at the end: a tied
weight is both, and its gradient is one sum over both for each micro-batch. If the head is only a product, only the
lookup is run again (`trained_head`).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from port_agent.finetuning.accumulation.head_loss import SEEN_TOKENS, LearnedLoss, learned_places
from port_agent.finetuning.accumulation.trained_head import HeadTile, LookedUp, TrainedHead
from port_agent.finetuning.inputs.libraries import plain_model
from port_agent.intercept.budget import keeping, without_prefetch
from port_planner.base.tensor_bytes import same_bits

_MAX_HEAD_SHARE = 0.85
"""Largest share of the memory for tensors that a resident head may take; the rest must hold the logits of a
micro-batch.
"""

Inputs = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels of a micro-batch, [batch, length]."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer after the hidden rows."""


class NotByLayersError(Exception):
    """The micro-batches of this model must run one at a time; the text says why."""


def why_not_by_layers(model: Any) -> str | None:
    """Return why a causal language model's micro-batches cannot run layer by layer, or None if they can.

    Only the model's structure is examined. `model`: a model without adapters, or the result of `get_base_model`.
    """
    config = model.config
    if config.is_encoder_decoder or not hasattr(config, "num_hidden_layers"):
        return "it is not a single stack of layers"
    layers = _stacks(model.base_model, config.num_hidden_layers)
    if len(layers) != 1 or model.base_model is model:
        return "its layers are not one list"
    random = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _draws(module)})
    random += sorted(name for name, value in config.to_dict().items() if "attention_dropout" in name and value)
    if random:
        return f"its dropout ({', '.join(random)}) draws random numbers in the order of the micro-batches"
    seen: set[int] = set()
    for layer in layers[0]:
        mine = {id(p) for p in layer.parameters()}
        if mine & seen:
            return "its layers share weights"
        seen |= mine
    inside = {id(module) for module in layers[0].modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    return "its layers share weights with modules outside them" if seen & outside else None


class ByLayers:
    """Computes an update's gradients layer by layer. Raises NotByLayersError for a model that cannot run that way."""

    def __init__(self, model: Any, loss: LearnedLoss) -> None:
        self._model, self._loss = model, loss
        plain: Any = plain_model(model)
        if (why := why_not_by_layers(plain)) is not None:
            raise NotByLayersError(why)
        self._backbone: Any = plain.base_model
        self._head: nn.Module | None = plain.get_output_embeddings()
        self._layers: list[nn.Module] = list(_stacks(self._backbone, plain.config.num_hidden_layers)[0])
        inside = {id(p) for layer in self._layers for p in layer.parameters()}
        self._ends_trained = any(p.requires_grad and id(p) not in inside for p in model.parameters())
        self._embeddings: nn.Module = plain.get_input_embeddings()
        self._trained_head: TrainedHead | None = None
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        """Norms of the last update's gradients, computed while each gradient was in memory; other weights have no
        entry.
        """
        self._is_checked = False

    def __call__(self, batches: Sequence[Inputs], gradient_of: int) -> float:
        """Add the gradients of the summed loss of all micro-batches, divided by `gradient_of`, to those of the
        parameters; return that sum.

        Raises NotByLayersError if the model does something between its layers that is not repeated here, or draws
        random numbers. The caller then restores the random state, clears the gradients and runs the batches one at a
        time.
        """
        with without_prefetch():
            if not self._is_checked:
                self._check(batches[0][0])
                self._is_checked = True
            self.norms = {}
            drawn = torch.get_rng_state()
            runs = [_MicroBatch(self, tokens, labels) for tokens, labels in batches]
            for layer, following in zip(self._layers, [*self._layers[1:], self._head], strict=True):
                with _kept(layer, following):
                    for run in runs:
                        run.forward(layer)
            _check_nothing_drawn(drawn)
            head = self._head_of(runs)
            total = 0.0
            with _kept(self._head, self._layers[-1], _MAX_HEAD_SHARE if head is not None else None):
                for run in runs:
                    total += run.loss(gradient_of, head, keep_last=self._ends_trained)
            _check_nothing_drawn(drawn)
            back = self._layers[::-1]
            for layer, following in zip(back, [*back[1:], None], strict=True):
                with _kept(layer, following):
                    for run in runs:
                        run.backward(layer)
                    self._take_norms(layer.parameters())
            if head is not None:
                looked_up = [run.before_layers(head) for run in runs]
                head.add_gradients([run.head_tile for run in runs], [found for found in looked_up if found is not None])
                self._take_norms((head.weight,))
            elif self._ends_trained:
                with _kept(self._head, None):
                    for run in runs:
                        run.ends(gradient_of)
            return total

    def hidden_and_arguments(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[_Arguments]]:
        """Return the input of the first layer for some tokens, and the other arguments of each layer.

        Raises NotByLayersError.
        """
        seen: list[_Arguments] = []
        first: list[torch.Tensor] = []

        def pass_on(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not seen:
                first.append(hidden)
            seen.append((args, kwargs))
            return hidden

        with self._instead(pass_on), self.forward_pass():
            self._backbone(input_ids=tokens, use_cache=False)
        if len(seen) != len(self._layers):
            raise NotByLayersError(f"only {len(seen)} of its {len(self._layers)} layers run")
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in _leaves(seen)):
            raise NotByLayersError("its layers receive trained tensors besides the hidden rows")
        return first[0], seen

    def forward_pass(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for a forward pass."""
        return self._loss.forward_pass()

    def loss_behind(
        self,
        run: "_MicroBatch",
        behind: Callable[[torch.Tensor], torch.Tensor],
        gradient_of: int,
        of: Sequence[torch.Tensor] | None,
    ) -> float:
        """Return the loss; `behind` computes the last layer's output from the first layer's input.

        Gradients are added to those of the tensors in `of`.
        """
        layers = itertools.cycle(range(len(self._layers)))
        last = len(self._layers) - 1

        def stand_in(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return behind(hidden) if next(layers) == last else hidden

        with self._instead(stand_in):
            return self._loss(run.tokens, run.labels, gradient_of=gradient_of, of=of).item()

    def _take_norms(self, weights: Iterable[torch.Tensor]) -> None:
        for weight in weights:
            if weight.grad is not None:
                self.norms[weight] = torch.linalg.vector_norm(weight.grad)

    def head_loss(
        self, run: "_MicroBatch", last: torch.Tensor, gradient_of: int, head: TrainedHead
    ) -> tuple[float, HeadTile]:
        """Return the loss from the last layer's output, and what the head's gradient needs of it.

        Gradients go to `last` and to the parameters behind it.
        """
        layers = itertools.cycle(range(len(self._layers)))
        stand_in = self._instead(lambda hidden, *_, **__: last if next(layers) == len(self._layers) - 1 else hidden)
        with stand_in, run.looking_up():
            hidden = self._backbone(input_ids=run.tokens, use_cache=False).last_hidden_state
        return head.loss(hidden, run.labels, gradient_of)

    @contextlib.contextmanager
    def looking_up(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Make the table of embeddings return rows that were looked up before."""
        if rows is not None:
            self._embeddings.forward = lambda *_, **__: rows.clone()
        try:
            yield
        finally:
            if rows is not None:
                del self._embeddings.forward

    def first_hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[_Arguments], list[torch.Tensor]]:
        """Return the result of `hidden_and_arguments`, and the rows looked up in the table of embeddings."""
        seen: list[torch.Tensor] = []
        watching = self._embeddings.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
        try:
            return *self.hidden_and_arguments(tokens), seen
        finally:
            watching.remove()

    def _head_of(self, runs: Sequence["_MicroBatch"]) -> TrainedHead | None:
        """Return the trained head if it can run once for several micro-batches; None if it must run per micro-batch."""
        head = self._trained_head
        if head is None or not all(run.was_looked_up for run in runs):
            return None
        return head if all(head.works_for(run.logits_rows) for run in runs) else None

    @contextlib.contextmanager
    def _instead(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Replace the layers' forward method within the block."""
        for layer in self._layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _check(self, tokens: torch.Tensor) -> None:
        """Raise NotByLayersError unless the model gives its layers and its head the same inputs as this class would.

        This is checked by one ordinary pass of the model over some tokens.
        """
        self._loss.stands_alone(tokens)
        tokens = tokens[:1, :SEEN_TOKENS]
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            watch = _Watch(self._layers, *self.hidden_and_arguments(tokens))
            with watch.watching():
                logits = self._logits(tokens)
            with self._instead(lambda *_, **__: watch.hidden):
                ends = self._logits(tokens)
        if watch.place != len(self._layers) or not _same(logits, ends):
            raise NotByLayersError("its head receives more than the output of the last layer")
        if self._ends_trained:
            with self._instead(lambda *_, **__: watch.hidden):
                self._trained_head = TrainedHead.of(plain_model(self._model), self._loss, tokens)

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.forward_pass():
            logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits


class _Watch:
    """Watches the model run its layers, which raise NotByLayersError if they run differently than expected."""

    def __init__(self, layers: Sequence[nn.Module], hidden: torch.Tensor, arguments: Sequence[_Arguments]) -> None:
        self._layers, self._arguments = layers, arguments
        self.hidden = hidden
        """The expected input of the next layer."""
        self.place = 0
        self._version = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._after).remove)
            yield

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.place >= len(self._layers) or layer is not self._layers[self.place]:
            raise NotByLayersError("its layers do not run in the order of the list")
        if not _same(args[:1], (self.hidden,)) or not _same((args[1:], kwargs), self._arguments[self.place]):
            raise NotByLayersError(f"it changes the hidden rows before layer {self.place + 1}")
        self._version = args[0]._version

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.place += 1
        if not isinstance(output, torch.Tensor) or output.shape != args[0].shape:
            raise NotByLayersError(f"layer {self.place} does not return hidden rows")
        if args[0]._version != self._version:
            raise NotByLayersError(f"layer {self.place} overwrites its input")
        self.hidden = output


class _MicroBatch:
    """One micro-batch on its way through the layers and back."""

    def __init__(self, by_layers: ByLayers, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.tokens, self.labels = tokens, labels
        self._by_layers = by_layers
        hidden, self._arguments, looked_up = by_layers.first_hidden(tokens)
        self._looked_up = looked_up[0] if len(looked_up) == 1 else None
        """Rows from the table of embeddings, [batch, length, width]; None unless it is looked up exactly once."""
        self._head_tile: HeadTile | None = None
        self._given = [_cut(hidden)]
        """The input of each layer, [batch, length, width], followed by the output of the last."""
        self._last: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        """Gradient of the output of the next layer in the backward pass."""

    def forward(self, layer: nn.Module) -> None:
        """Run the next layer."""
        self._given.append(_cut(self._run(layer, len(self._given) - 1, self._given[-1])))

    def _run(self, layer: nn.Module, place: int, hidden: torch.Tensor) -> torch.Tensor:
        args, kwargs = self._arguments[place]
        with self._by_layers.forward_pass():
            given: torch.Tensor = layer(hidden, *args, **kwargs)
        return given

    @property
    def was_looked_up(self) -> bool:
        """Whether its rows in the table of embeddings are known."""
        return self._looked_up is not None

    @property
    def logits_rows(self) -> int:
        """The number of rows of its logits."""
        return len(self.tokens) * learned_places(self.labels)[0]

    @property
    def head_tile(self) -> HeadTile:
        """The part of this micro-batch for a head that runs for all micro-batches together.

        Raises NotByLayersError before the head has run.
        """
        if self._head_tile is None:
            raise NotByLayersError("its head has not run")
        return self._head_tile

    def looking_up(self) -> contextlib.AbstractContextManager[None]:
        """Prevent the table of embeddings from being read again."""
        return self._by_layers.looking_up(self._looked_up)

    def loss(self, gradient_of: int, head: TrainedHead | None, *, keep_last: bool) -> float:
        """Return the loss of the last layer's output, which is kept for `ends` or released.

        `head`: a head that runs for all micro-batches together.
        """
        last = self._given.pop()
        if not last.requires_grad:
            raise NotByLayersError("nothing in its layers is trained")
        if head is not None:
            loss, self._head_tile = self._by_layers.head_loss(self, last, gradient_of, head)
            self._gradient, last.grad = last.grad, None
            return loss
        loss = self._by_layers.loss_behind(self, lambda _: last, gradient_of, (last,))
        self._gradient, last.grad = last.grad, None
        self._last = last if keep_last else None
        return loss

    def backward(self, layer: nn.Module) -> None:
        """Run a layer again, forward and backward."""
        place, hidden = len(self._given) - 1, self._given.pop()
        if self._gradient is None:  # nothing before this layer is trained
            return
        wanted = [p for p in (hidden, *layer.parameters()) if p.requires_grad]
        given = self._run(layer, place, hidden)
        if given.requires_grad:
            given.backward(self._gradient, inputs=wanted)
        self._gradient, hidden.grad = hidden.grad, None

    def before_layers(self, head: TrainedHead) -> LookedUp | None:
        """Run the modules before the layers again, forward and backward; return the gradient for a table that is also
        the head.
        """
        gradient, self._gradient = self._gradient, None
        if gradient is None:  # nothing before the layers is trained
            return None
        if not head.tied or self._looked_up is None:
            self._by_layers.hidden_and_arguments(self.tokens)[0].backward(gradient)
            return None
        rows = self._looked_up.requires_grad_()
        with self._by_layers.looking_up(rows):
            self._by_layers.hidden_and_arguments(self.tokens)[0].backward(gradient)
        return None if rows.grad is None else head.looked_up(self.tokens, rows.grad)

    def ends(self, gradient_of: int) -> None:
        """Run the modules outside the layers again, forward and backward."""
        bridge: Any = _Bridge.apply
        self._by_layers.loss_behind(self, lambda hidden: bridge(hidden, self._last, self._gradient), gradient_of, None)


class _Bridge(torch.autograd.Function):
    """Stands for all layers: forward, it returns the last layer's output; backward, the gradient
    of the first layer's input.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, last: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        ctx.gradient = gradient
        return last.view_as(last)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.gradient, None, None


def _check_nothing_drawn(before: torch.Tensor) -> None:
    if not torch.equal(before, torch.get_rng_state()):
        raise NotByLayersError("it draws random numbers in the order of the micro-batches")


def _cut(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden rows detached, as the beginning of a new graph."""
    return hidden.detach().requires_grad_(hidden.requires_grad)


def _kept(
    layer: nn.Module | None, following: nn.Module | None, most: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """Keep resident what all micro-batches use in turn, and begin to read what comes next. `most`: see `keeping`."""
    return keeping(_weights(layer), _weights(following), most)


def _weights(layer: nn.Module | None) -> list[torch.Tensor]:
    return [] if layer is None else [*layer.parameters(), *layer.buffers()]


def _stacks(backbone: nn.Module, count: int) -> list[nn.ModuleList]:
    """Return the lists of `count` layers that are not inside another such list."""
    lists = [(name, module) for name, module in backbone.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [m for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [found for found in outer if len(found) == count]


def _draws(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS) and module.p > 0


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, including the bits of any tensors in them."""
    if isinstance(one, tuple | list):
        return isinstance(other, tuple | list) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):  # a keyword of None equals an absent keyword
        return isinstance(other, dict) and all(_same(one.get(k), other.get(k)) for k in one.keys() | other.keys())
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one, other)
    return one is other or bool(one == other)

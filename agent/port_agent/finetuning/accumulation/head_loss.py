"""The loss of a language model's head and its gradient, computed for some rows of the logits at a time.

Logits are the largest tensors of fine-tuning: 74 MiB for 256 tokens of Qwen2.5 in bfloat16, and the usual loss makes
four more of twice that size in 32 bits. Rows of a softmax are independent of each other, so the loss can be computed
for a few rows at a time with the same bits. The gradient takes the logits' own memory, and the chosen log-probabilities
are added in the order of the whole. A frozen head may also run on some rows at a time; then the whole logits never
exist.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from port_agent.finetuning.accumulation.head_rows import HeadRows, head_row_blocks, works_by_element
from port_agent.finetuning.inputs.libraries import BaseModelOutputWithPastAndCrossAttentions, plain_model
from port_agent.finetuning.inputs.on_device import forked_random
from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.quantized.widened import WidenedLinear
from port_agent.finetuning.text.sequence_file import IGNORED
from port_agent.finetuning.text.sequences import BUCKET_TOKENS
from port_agent.finetuning.text.task import TaskKind
from port_agent.intercept.tiles.products import accumulated_bytes, column_blocks, gathered_bytes
from port_planner.base.tensor_bytes import same_bits
from port_planner.ir.device_kinds import CPU

_BLOCK_BYTES = 4 << 20
"""Bytes of a block of rows in 32 bits."""

_BLOCKS = 3
"""Blocks that exist at the same time."""

_MIN_ROWS = 4
"""Fewest rows in a block: with fewer, calls take longer than their computation. A softmax is computed row by row."""

SEEN_TOKENS = 16
"""Tokens of the first batch used to test whether the head stands alone."""

_CAPPED = 1024
"""Factor on the head's input used to test whether it caps its logits."""

_ODD_ROWS = slice(3, 8)
"""Rows of SEEN_TOKENS with which a test shows that the functions after a head's product do not treat any row differently."""

_BEHIND_PRODUCT = 3
"""Largest number of additional tensors of the logits' size if a cap or a scale follows the head's product: what tanh saves, and two
gradients.
"""

EncoderInput = tuple[torch.Tensor, torch.Tensor]
"""Tokens, [batch, length], and a mask of the same shape that is 1 for tokens and 0 for padding.

A plain encoder also learns these tokens.
"""


Beside = EncoderInput | torch.Tensor | None
"""A model's inputs besides tokens: an encoder's input, or, if texts are masked from each other, each token's position in its text,
[batch, length].
"""


def model_inputs(tokens: torch.Tensor, source: Beside) -> dict[str, torch.Tensor]:
    """Return a model's inputs by name: tokens alone, tokens with positions, a decoder's tokens with its encoder's input, or only an
    encoder's input.
    """
    if source is None:
        return {"input_ids": tokens}
    if isinstance(source, torch.Tensor):
        return {"input_ids": tokens, "position_ids": source}
    if source[0] is tokens:
        return {"input_ids": tokens, "attention_mask": source[1]}
    return {"input_ids": source[0], "attention_mask": source[1], "decoder_input_ids": tokens}


class LearnedLoss:
    """The summed loss of the tokens that a model is to learn, and the gradient of everything trained.

    `head_rows`: rows that the head runs on at a time; None for all at once, or for blocks with the same bits
    (`run_in_blocks`). Products of few rows may round differently from those of many, so each number of rows gives its
    own result. `kind`: which token a place predicts: the next or, in an encoder, its own. `autocast`: forward passes
    run under torch's autocast, and the head then runs with the other layers.
    """

    def __init__(
        self, model: Any, head_rows: int | None = None, kind: TaskKind = TaskKind.CAUSAL_LM, *, autocast: bool = False
    ) -> None:
        self._model, self._head_rows, self._autocast = model, head_rows, autocast
        self._own_token = kind is TaskKind.MASKED_LM
        self._settings = {} if self._own_token else {"use_cache": False}
        self._plain: Any = plain_model(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._plain.forward).parameters
        self._stands_alone: bool | None = None
        """Result of the test whether the head stands alone; None before the test."""
        self._is_product = False
        """Whether a test showed that the head is only a product, without a cap or a scale after it."""
        self._scales = False
        """Whether a test showed that whatever follows the product works on each logit by itself, such as a cap or a
        scale.
        """
        self._in_blocks: HeadRows | None = None

    def __call__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        source: Beside = None,
        gradient_of: int | None = None,
        of: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the sum of the labels' losses, in 32 bits, with the bits of `cross_entropy(logits.float(), ..., reduction="sum")`.

        `tokens` and `labels`: [batch, length], a label for each token, IGNORED if none is learned. `source`: the other
        inputs. Logits begin at the first place after which a token is learned, rounded to BUCKET_TOKENS, because each
        number of rows is a separate step to a planner. With `gradient_of`, one backward pass adds the gradients of the
        sum divided by it to those of the parameters, or to those of the tensors in `of`. Raises FinetuneError if the
        head cannot run on some rows.
        """
        kept, following = learned_places(labels, own_token=self._own_token)
        if isinstance(source, tuple):
            self._stands_alone = False
        if self._in_blocks is not None:
            self._in_blocks.blocks(len(following))  # compared before the results of the other layers exist
        if not self.stands_alone(tokens):
            return self._of_whole(model_inputs(tokens, source), kept, following, gradient_of, of)
        hidden = self._backbone(**model_inputs(tokens, source), use_cache=False).last_hidden_state
        return self._of_rows(hidden[:, -kept:], following, gradient_of, of)

    def forward_pass(self) -> contextlib.AbstractContextManager[object]:
        """Return the context for a forward pass on the CPU."""
        return forward_pass(CPU, autocast=self._autocast)

    def stands_alone(self, tokens: torch.Tensor) -> bool:
        """Return whether the head, given hidden rows, returns what the whole model returns. Tested once, on the first of some tokens."""
        if self._stands_alone is None:
            self._stands_alone = self.separable and self._gives_the_same(tokens)
        return self._stands_alone

    def is_product(self, tokens: torch.Tensor) -> bool:
        """Return whether the head, frozen or trained, is only a product of the backbone's output. Tested on some tokens."""
        return self._is_apart and self._gives_the_same(tokens) and self._is_product

    def may_run_in_blocks(self, tokens: torch.Tensor) -> bool:
        """Return whether the head may run on some rows at a time unasked. Tested on the first of some tokens."""
        return self._head_rows is None and self.stands_alone(tokens) and (self._is_product or self._scales)

    def run_in_blocks(self, most: int) -> HeadRows:
        """Run the head on at most `most` rows at a time from now on, with the bits of all rows at once."""
        head = self._plain.get_output_embeddings()
        self._in_blocks = HeadRows(head.weight, head.bias, most)
        return self._in_blocks

    def rows_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return the number of rows whose logits exist at the same time, in blocks of `at_once` if given."""
        return max(stop - start for start, stop in (head_row_blocks(rows, at_once) if at_once else self._blocks(rows)))

    def bytes_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return the peak bytes of the loss of `rows` rows and its gradient, in blocks of `at_once` if given.

        Counted are the logits and the largest of: what their product takes when its blocks of columns are compared, a
        block in 32 bits, what the backward product gathers of the weight, and what a cap saves.
        """
        head = self._plain.get_output_embeddings()
        if head is None:
            return 0
        vocabulary, most = head.weight.shape[0], self.rows_at_once(rows, at_once)
        logits = most * vocabulary * head.weight.dtype.itemsize
        block = max(stop - start for start, stop in row_blocks(most, vocabulary)) * vocabulary * torch.float32.itemsize
        summed = accumulated_bytes(most, vocabulary, head.weight.dtype)
        gathered = min(gathered_bytes(head.weight), head.weight.nbytes)
        saved = logits if self._scales else 0
        return int(logits + max(summed, saved + _BLOCKS * block, saved + gathered, _BEHIND_PRODUCT * saved))

    def _of_whole(
        self,
        inputs: dict[str, torch.Tensor],
        kept: int,
        labels: torch.Tensor,
        gradient_of: int | None,
        of: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        if self._head_rows is not None:
            raise FinetuneError(
                f"the head of this model ({self._plain.config.model_type}) cannot run on {self._head_rows} rows at a "
                "time: it is trained, under --autocast, or not a separate module after the other layers; leave out "
                "--head-rows"
            )
        with forward_pass(labels.device.type, autocast=self._autocast):
            if self._keeps_rows:
                logits = self._model(**inputs, **self._settings, logits_to_keep=kept).logits
            else:
                logits = self._model(**inputs, **self._settings).logits[:, -kept:].contiguous()
        chosen = chosen_log_probabilities(logits, labels, gradient_of)
        if gradient_of is not None:
            logits.backward(logits.detach(), inputs=of)
        return summed_loss(chosen, labels)

    def _of_rows(
        self, hidden: torch.Tensor, labels: torch.Tensor, gradient_of: int | None, of: Sequence[torch.Tensor] | None
    ) -> torch.Tensor:
        """Run the head on blocks of rows, each contiguous, because a view of the whole would multiply the weight as a
        batch of one.

        The logits of a block are released before the next.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        chosen, given = torch.empty(len(labels), 1, device=rows.device), torch.empty_like(rows.detach())
        for start, stop in self._blocks(len(labels)):
            block = rows.detach()[start:stop]
            if gradient_of is not None and not self._is_product:
                block.requires_grad_()
            with torch.set_grad_enabled(block.requires_grad):
                logits = self._head(block[None])
            chosen[start:stop] = chosen_log_probabilities(logits, labels[start:stop], gradient_of)
            if block.requires_grad:
                (given[start:stop],) = torch.autograd.grad(logits, block, logits.detach())
            elif gradient_of is not None:  # the call that autograd would make, without the end of a pass for each block
                given[start:stop] = _input_gradient(self._plain.get_output_embeddings(), logits[0])
            del logits
        if gradient_of is not None:
            rows.backward(given, inputs=of)
        return summed_loss(chosen, labels)

    def _blocks(self, rows: int) -> Sequence[tuple[int, int]]:
        """Return where the blocks of rows begin and end on which the head runs."""
        if self._in_blocks is not None:
            return self._in_blocks.blocks(rows)
        return list(column_blocks(rows, self._head_rows or rows))

    @property
    def separable(self) -> bool:
        """Whether the head can run in blocks; a trained head cannot, because its gradient is a sum over all rows."""
        head = self._plain.get_output_embeddings()
        return self._is_apart and not any(p.requires_grad for p in head.parameters())

    @property
    def _is_apart(self) -> bool:
        """Whether the head is separate from a backbone module, and its products round in a known way."""
        head = self._plain.get_output_embeddings()
        return head is not None and self._keeps_rows and self._backbone is not self._plain and not self._autocast

    @property
    def _backbone(self) -> nn.Module:
        """The layers without the head."""
        backbone: nn.Module = self._plain.base_model
        return backbone

    def _gives_the_same(self, tokens: torch.Tensor) -> bool:
        """Return whether the head, given the backbone's output for some tokens, returns what the whole model returns."""
        seen: list[torch.Tensor] = []
        watching = self._backbone.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state))
        with torch.no_grad(), forked_random(tokens.device.type):
            try:
                logits = self._model(input_ids=tokens[:1, :SEEN_TOKENS], use_cache=False).logits
                if not seen:  # it calls only a part of its backbone, as OPT calls its decoder
                    return False
                self._see_behind_product((seen[0], _CAPPED * seen[0]))
                return same_bits(logits, self._head(seen[0]))
            except AttributeError:  # it asks its backbone for more outputs
                return False
            finally:
                watching.remove()

    def _see_behind_product(self, hidden: Sequence[torch.Tensor]) -> None:
        """Test on some rows whether the head is only a product, or a product followed by an elementwise function."""
        head = self._plain.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return
        self._is_product = all(same_bits(self._head(rows), head(rows)) for rows in hidden)
        self._scales = not self._is_product and all(self._scales_each(head(rows), self._head(rows)) for rows in hidden)

    def _scales_each(self, product: torch.Tensor, logits: torch.Tensor) -> bool:
        """Return whether the head makes these logits from its product, [batch, rows, vocabulary], elementwise."""
        try:
            return (
                same_bits(self._behind_product(product), logits)
                and same_bits(self._behind_product(product[:, _ODD_ROWS]), logits[:, _ODD_ROWS])
                and works_by_element(self._behind_product, product.dtype)
            )
        except RuntimeError:  # the function only accepts rows of the model's or the vocabulary's width
            return False

    def _behind_product(self, product: torch.Tensor) -> torch.Tensor:
        """Return the model's own logits from its head's product, [batch, rows, vocabulary], with whatever follows the
        product.
        """
        head = self._plain.get_output_embeddings()
        self._plain.set_output_embeddings(nn.Identity())
        try:
            return self._head(product)
        finally:
            self._plain.set_output_embeddings(head)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's own logits of hidden rows, [batch, rows, width], with whatever follows the backbone."""
        name = self._plain.base_model_prefix
        backbone = getattr(self._plain, name)
        setattr(self._plain, name, _BackboneOutput(hidden))
        try:
            logits: torch.Tensor = self._plain(inputs_embeds=hidden, use_cache=False).logits
        finally:
            setattr(self._plain, name, backbone)
        return logits


def _input_gradient(head: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input, [rows, width], of a head that is a product, from the gradient of its logits."""
    if isinstance(head, WidenedLinear):
        return head.input_gradient(gradient)
    return torch.mm(gradient, head.weight)


class LabelLoss:
    """The summed loss of the labels that a model must choose, and the gradient of everything trained."""

    def __init__(self, model: Any, *, autocast: bool = False) -> None:
        self._model, self._autocast = model, autocast

    def __call__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        source: Beside = None,
        gradient_of: int | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses in 32 bits.

        `labels`: a number for each text, [batch, 1]; otherwise as `LearnedLoss`.
        """
        with forward_pass(tokens.device.type, autocast=self._autocast):
            logits = self._model(**model_inputs(tokens, source)).logits.float()
        loss = F.cross_entropy(logits, labels[:, 0], reduction="sum")
        if gradient_of is not None:
            (loss / gradient_of).backward()
        return loss.detach()

    def may_run_in_blocks(self, tokens: torch.Tensor) -> bool:
        """Return False: there is nothing to divide into blocks."""
        return False

    def rows_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return 0: a text has only as many logits as there are labels."""
        return 0

    def bytes_at_once(self, rows: int, at_once: int | None = None) -> int:
        """Return 0, for the same reason."""
        return 0


def forward_pass(kind: str, *, autocast: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context for a forward pass on a kind of device.

    Casts of weights are not cached, because they would stay in memory until the end of the pass.
    """
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False) if autocast else contextlib.nullcontext()


class _BackboneOutput(nn.Module):
    """Stands for a backbone whose output exists already."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return self._output


def learned_places(labels: torch.Tensor, *, own_token: bool = False) -> tuple[int, torch.Tensor]:
    """Return how many of the last places have logits, and what each of them predicts, [batch * places].

    `labels`: [batch, length]; each place predicts the label of the next token, or with `own_token` its own.
    """
    following = labels if own_token else F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    first = int((following != IGNORED).any(0).int().argmax())
    kept = kept_places(labels.shape[1], first)
    return kept, following[:, -kept:].reshape(-1)


def kept_places(length: int, first: int) -> int:
    """Return how many of `length` places have logits, if `first` is the first to learn from: all from its bucket on."""
    return length - first // BUCKET_TOKENS * BUCKET_TOKENS


def chosen_log_probabilities(
    logits: torch.Tensor, labels: torch.Tensor, gradient_of: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Return the log-probability of each label, [rows, 1] in 32 bits, from logits [..., vocabulary]. Where the label is IGNORED, the value
    is arbitrary.

    With `gradient_of`, the logits are overwritten with the gradient of the labels' summed loss divided by it, or
    weighted by the log-probabilities' own gradients, [rows, 1]. `logits.backward(logits.detach())` continues with it.
    Both have the bits of `cross_entropy(logits.float(), labels, reduction="sum")`. The gradient is computed by the
    operators that autograd would call, so an interceptor sees one forward and one backward pass.
    """
    memory, labels = logits.detach().view(-1, logits.shape[-1]), labels.reshape(-1)
    chosen = torch.empty(len(labels), 1, device=memory.device)
    for start, stop in row_blocks(len(labels), memory.shape[1]):
        learned = labels[start:stop, None].clamp(min=0)
        with torch.no_grad():
            log_probabilities = F.log_softmax(memory[start:stop].float(), dim=-1)
            chosen[start:stop] = log_probabilities.gather(1, learned)
            if gradient_of is not None:
                each = (
                    gradient_of[start:stop]
                    if isinstance(gradient_of, torch.Tensor)
                    else -torch.ones((), device=memory.device) / gradient_of
                )
                share = torch.where(labels[start:stop, None] == IGNORED, 0.0, each)
                given = torch.zeros_like(log_probabilities).scatter_(1, learned, share)
                memory[start:stop] = torch.ops.aten._log_softmax_backward_data(
                    given, log_probabilities, -1, torch.float32
                )
                del given
        del log_probabilities
    return chosen


def row_blocks(rows: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of the blocks of logits that are converted to 32 bits at once. Blocks are as even as possible, so that
    none takes much more.
    """
    at_once = max(_BLOCK_BYTES // (vocabulary * torch.float32.itemsize), _MIN_ROWS)
    count = max(min(-(-rows // at_once), rows // _MIN_ROWS), 1)
    return itertools.pairwise(block * rows // count for block in range(count + 1))


def summed_loss(chosen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of all labels that are not IGNORED, from their log-probabilities `chosen`, [rows, 1]."""
    places = torch.where(labels == IGNORED, IGNORED, 0)
    return F.nll_loss(chosen, places, ignore_index=IGNORED, reduction="sum")

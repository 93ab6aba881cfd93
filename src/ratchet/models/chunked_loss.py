"""Logits some columns at a time: the body of a model runs once, its head on as many positions as fit into memory.

Logits are the greatest tensor of an evaluation: 8 rows of 1,024 tokens at a vocabulary of 150,000 are 5 GB in float32,
and half a dozen of the like lie beside them while the likelihood is computed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ratchet.data.conversation import MASKED
from ratchet.errors import BaseModelError
from ratchet.models.device import Model
from ratchet.models.loss import (
    SequenceBatch,
    TeacherTargets,
    answer_nll,
    compute_all_logits,
    compute_loss_and_gradient,
    forward_inputs,
)
from ratchet.models.model_spec import find_blocks, find_body

CHUNK_ELEMENTS = 2**24
"""Logits that are computed at once: 64 MiB in float32, and some copies."""


class ForwardPass:
    """One forward pass over rows that are filled on the right, without a mask.

    What makes logits of hidden states (head, soft cap, scale) is done by the model's own class: it is called again for
    every further piece, with a body that gives back a piece of what it has found.
    """

    _given: Mapping[str, Tensor] = {}

    def __init__(
        self, model: Model, input_ids: Tensor, span: tuple[int, int], *, cache: Any = None, keep: bool = False
    ) -> None:
        """Run the body, and the head on the first piece. To be called without gradients.

        Args:
            input_ids: int64 [rows, positions].
            span: first position whose logits are wanted, and the one after the last; at least one.
            cache: of the tokens before these; it is added to.
            keep: make a cache if there is none.

        Raises:
            BaseModelError: the model runs its body more than once, so pieces of it would not be the whole.
        """
        self.model = model
        self.first, self.last = span
        self._ids = input_ids
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        vocabulary = int(whole.config.get_text_config().vocab_size)
        self._rows = len(self._laid(input_ids))
        self._width = max(1, CHUNK_ELEMENTS // (self._rows * vocabulary))
        self._body = find_body(whole)
        self._found: list[Any] = []
        given = dict(self._given) if cache is None else {**self._given, "past_key_values": cache}
        # A model that is its own body answers with logits, which are no hidden states to take pieces of.
        hooks = [] if self._body is whole else [self._body.register_forward_hook(self._take)]
        try:
            output = model(input_ids=input_ids, use_cache=keep or cache is not None, **given)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self._found) > 1:
            raise BaseModelError(f"{type(whole).__name__}: runs its layers {len(self._found)} times for one text")
        self.cache: Any = getattr(output, "past_key_values", None)
        """Of all tokens up to here, if one was asked for and the model has one."""
        self._begun: Tensor = output.logits

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Position of the first column and logits [rows, columns, vocabulary], until all of the span are there."""
        begun, stop = self._begun, self._stop(self.first)
        if begun.shape[:2] != (self._rows, stop - self.first):
            # The class looked elsewhere for hidden states: they are whole.
            begun = self._laid(begun)[:, self.first : self.last]
            for start in range(0, begun.shape[1], self._width):
                yield self.first + start, begun[:, start : start + self._width]
            return
        yield self.first, begun
        for start in range(stop, self.last, self._width):
            yield start, self._logits(start)

    def nll(self, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of a token at each position of the span; float32 [rows, span].

        Args:
            targets: int64 [rows, span]: the token that follows each position.
        """
        found = torch.empty(targets.shape, dtype=torch.float32, device=targets.device)
        for start, logits in self.pieces():
            columns = slice(start - self.first, start - self.first + logits.shape[1])
            chosen = targets[:, columns]
            nll = functional.cross_entropy(logits.float().flatten(0, 1), chosen.flatten(), reduction="none")
            found[:, columns] = nll.view(chosen.shape)
        return found

    def _stop(self, start: int) -> int:
        return min(start + self._width, self.last)

    def _laid(self, found: Tensor) -> Tensor:
        """What belongs to tokens, [rows, positions, ...], as rows of which a span is wanted."""
        return found

    def _take(self, _module: Any, _inputs: Any, output: Any) -> Any:
        output = map_hidden_states(output, self._laid)
        self._found.append(output)
        return _slice_output(output, slice(self.first, self._stop(self.first)))

    def _logits(self, start: int) -> Tensor:
        """Of a further piece: the model with a body that has its answer ready."""
        piece = _slice_output(self._found[0], slice(start, self._stop(start)))
        with substitute_body_output(self._body, piece):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits


class SelectedPositionsPass(ForwardPass):
    """A pass of which logits are wanted at single positions, wherever in a row: one row of them, in that order."""

    def __init__(
        self, model: Model, input_ids: Tensor, places: Tensor, given: Mapping[str, Tensor], *, cache: Any, keep: bool
    ) -> None:
        """Run the body, and the head on the first piece. To be called without gradients.

        Args:
            input_ids: int64 [rows, positions].
            places: int64 [wanted], ascending, each once: row x positions + position.
            given: what the model is told beside tokens and cache: mask and positions.
            cache: of the tokens before these; it is added to.
            keep: make a cache if there is none.

        Raises:
            BaseModelError: the model runs its body more than once, so pieces of it would not be the whole.
        """
        self._places, self._given = places, given
        super().__init__(model, input_ids, (0, len(places)), cache=cache, keep=keep)

    def _laid(self, found: Tensor) -> Tensor:
        return found.flatten(0, 1)[self._places].unsqueeze(0)


class DeferredHeadPass(SelectedPositionsPass):
    """The same, of which logits are computed when they are asked for: the body has run, the head has not."""

    def _stop(self, start: int) -> int:
        return min(start + 1, self.last)  # the head runs with the body, on one position

    def between(self, start: int, stop: int) -> Tensor:
        """Logits [stop - start, vocabulary] of some of the places, by their number. To be called without gradients."""
        if self._begun.shape[:2] != (1, 1):  # the class looked elsewhere for hidden states
            return self._laid(self._begun)[0, start:stop]
        with substitute_body_output(self._body, _slice_output(self._found[0], slice(start, stop))):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits[0]


@contextmanager
def substitute_body_output(body: Any, answer: Any) -> Iterator[None]:
    """A model whose body has its answer ready: what is computed meanwhile is the head."""
    own = body.__dict__.get("forward")
    body.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


def _slice_output(output: Any, columns: slice) -> Any:
    """A body's output with the hidden states of some positions."""
    return map_hidden_states(output, lambda states: states[:, columns])


def map_hidden_states(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A body's output with other hidden states."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    piece = copy.copy(output)
    piece.last_hidden_state = change(output.last_hidden_state)
    return piece


# The last block computed where it is looked at: nothing but the head reads its output, and that at some positions.
#
# Keys and values of the last block are needed everywhere, for learned positions attend to all before them. Its
# queries,
# what it makes of the attention, and its feed-forward layers are needed at learned positions alone, forward and back.

QUERIES, KEYS, OUTPUTS = {"q_proj"}, {"k_proj", "v_proj"}, {"o_proj", "out_proj", "dense"}
"""Names of linear layers of an attention, whatever comes between them."""
FEED_FORWARD = {"mlp", "feed_forward"}
LINEAR = {
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "c_proj",
    "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3",
}  # fmt: skip
"""Names of layers of a feed-forward part that takes each position by itself; one with experts has others."""
BETWEEN = {"act", "act_fn", "activation", "activation_fn", "dropout", "resid_dropout"}
WORTH_SHARE = 0.9
"""Share of learned positions from which on picking them costs what it saves."""


@contextmanager
def restrict_last_block(model: Model, places: Tensor, shape: torch.Size) -> Iterator[None]:
    """A model whose last block gives what it always does at some places, and anything elsewhere.

    The backward pass belongs into it: a block that is recomputed has to be computed in the same way.

    Args:
        model: without adapters around it: its body is run in here.
        places: int64 [wanted], ascending, each once: row x positions of a row + position.
        shape: rows and positions of a row.
    """
    with ExitStack() as stack:
        if 0 < len(places) <= WORTH_SHARE * shape.numel():
            for module in _position_wise_modules(model):
                around = _SelectedPositionsHook(places, shape)
                stack.callback(module.register_forward_pre_hook(around.before).remove)
                stack.callback(module.register_forward_hook(around.behind).remove)
        yield


def _position_wise_modules(model: Model) -> Iterator[nn.Module]:
    """Parts of the last block that take each position by itself; none of a class that is not transformers' own, for
    such may run its blocks several times (Ouro), and the last one's output would be read at all positions."""
    _, blocks = find_blocks(model)
    if not len(blocks) or not type(model).__module__.startswith("transformers."):
        return
    for name, part in blocks[-1].named_children():
        inner = {name for name, _ in part.named_children()}
        if name in FEED_FORWARD and inner & LINEAR and inner <= LINEAR | BETWEEN:
            yield part
        elif inner >= QUERIES | KEYS and inner & OUTPUTS:
            yield from (layer for name, layer in part.named_children() if name in QUERIES | OUTPUTS)


class _SelectedPositionsHook:
    """Around a module: its input at the places only, its output where it belongs with zeros elsewhere."""

    def __init__(self, places: Tensor, shape: torch.Size) -> None:
        self.places, self.shape = places, shape
        self._picked = False

    def before(self, _module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._picked = bool(inputs) and inputs[0].shape[:-1] == self.shape
        if not self._picked:
            return inputs
        return (inputs[0].flatten(0, 1).index_select(0, self.places).unsqueeze(0), *inputs[1:])

    def behind(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if not self._picked:
            return output
        whole = output.new_zeros(self.shape.numel(), output.shape[-1])
        return whole.index_copy(0, self.places, output[0]).view(*self.shape, -1)


# Loss and gradient with the head apart: the body runs once, the head on some of the learned positions at a time.
#
# Logits are the greatest tensor of a training with a large vocabulary: 2,048 positions at 128,000 tokens are 1 GB in
# float32, and their logarithms and gradient are as much again. Here the gradient of a piece is taken as soon as its
# logits are there, and they are gone before the next piece (the idea of Liger's fused linear cross entropy, Hsu et al.
# 2024, arXiv 2410.10989, without its kernels). What makes logits of hidden states (head, adapters on it, soft cap,
# scale)
# is done by the model's own class: it is called again for every piece, with a body that has its answer ready.

LEARNED_ELEMENTS = 2**24
"""Logits that are computed at once: 64 MiB in float32, and their gradient as much."""

During = Callable[[str], AbstractContextManager[Any]]
"""Told what is being done: `forward`, `loss` (head and likelihood, with its gradient) or `backward`."""


def _ignore_phase(_: str) -> AbstractContextManager[Any]:
    return nullcontext()


def forward_backward(
    model: Model,
    batch: SequenceBatch,
    factor: float,
    during: During = _ignore_phase,
    lesson: TeacherTargets | None = None,
) -> Tensor:
    """Negative log-likelihood of all labels of a micro-batch together, in nats; no graph is left.

    `factor` times its gradient is added to the gradients of what learns. With a lesson it is the loss of learning from
    a teacher too (teacher_loss.py).
    """
    return _ChunkedLoss(model, batch, during, lesson).learn(factor)


def compute_nll(model: Model, batch: SequenceBatch) -> Tensor:
    """The same without a gradient. To be called where torch takes none."""
    return _ChunkedLoss(model, batch, _ignore_phase).learn(None)


class _ChunkedLoss:
    def __init__(
        self, model: Model, batch: SequenceBatch, during: During, lesson: TeacherTargets | None = None
    ) -> None:
        self.model, self.batch, self.during, self.lesson = model, batch, during, lesson
        self.whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body = find_body(self.whole)
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=MASKED).flatten()
        self.places = (targets != MASKED).nonzero().squeeze(1)
        """Of hidden states that are learned from, rows one after the other."""
        self.targets = targets[self.places]

    def learn(self, factor: float | None) -> Tensor:
        if self.body is not self.whole:
            with restrict_last_block(self.whole, self.places, self.batch.input_ids.shape):
                if (found := self._apart(factor)) is not None:
                    return found
        return self._in_one(factor)

    def _apart(self, factor: float | None) -> Tensor | None:
        with self.during("forward"):
            hidden = self._hidden()
        if hidden is None:
            return None
        with self.during("loss"):
            total, gradient = self._pieces(hidden.detach().flatten(0, 1), hidden.requires_grad, factor)
        if gradient is not None:
            with self.during("backward"):
                hidden.backward(gradient.view_as(hidden))
        return total

    def _in_one(self, factor: float | None) -> Tensor:
        """For models whose body cannot be told from its head."""
        if self.lesson is not None:
            return self._taught_in_one(self.lesson, factor)
        with self.during("forward"):
            nll = answer_nll(self.model, self.batch.input_ids, self.batch.labels, self.batch.position_ids).sum()
        if factor is not None:
            with self.during("backward"):
                (nll * factor).backward()
        return nll.detach().double()

    def _taught_in_one(self, lesson: TeacherTargets, factor: float | None) -> Tensor:
        with self.during("forward"):
            logits = compute_all_logits(self.model, self.batch).flatten(0, 1)[self.places]
        with self.during("loss"):
            total, gradient = compute_loss_and_gradient(logits, self.targets, lesson.some(slice(0, len(self.places))))
        if factor is not None:
            with self.during("backward"):
                logits.backward((gradient * factor).to(logits.dtype))
        return total

    def _hidden(self) -> Tensor | None:
        """What the body finds, [sequences, positions, width]; None where the logits come from elsewhere.

        The head sees a single position, and what it makes of it is not looked at.
        """
        found: list[Any] = []

        def take(_module: Any, _inputs: Any, output: Any) -> Any:
            found.append(output)
            return map_hidden_states(output, lambda states: states.detach()[:1, :1])

        hook = self.body.register_forward_hook(take)
        try:
            logits = self.model(**forward_inputs(self.batch.input_ids, self.batch.position_ids), use_cache=False).logits
        finally:
            hook.remove()
        if len(found) != 1 or logits.shape[:2] != (1, 1):
            return None
        self.answer = found[0]
        return _hidden_states(self.answer)

    def _pieces(self, states: Tensor, deep: bool, factor: float | None) -> tuple[Tensor, Tensor | None]:
        """The sum, and the gradient of the hidden states if they have one.

        Args:
            states: hidden states [positions of all sequences, width], without a graph.
            deep: something in the body learns.
        """
        vocabulary = int(self.whole.config.get_text_config().vocab_size)
        distributions = 1 if self.lesson is None else self.lesson.distributions
        width = max(1, LEARNED_ELEMENTS // (distributions * vocabulary))
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        gradient = torch.zeros_like(states) if deep and factor is not None else None
        for start in range(0, len(self.places), width):
            places, targets = self.places[start : start + width], self.targets[start : start + width]
            lesson = None if self.lesson is None else self.lesson.some(slice(start, start + len(places)))
            piece = states[places].unsqueeze(0).requires_grad_(gradient is not None)
            logits = self._head(piece)
            if lesson is not None:
                loss, found = compute_loss_and_gradient(logits[0], targets, lesson)
                total += loss
                if factor is not None and logits.requires_grad:
                    logits.backward(found.mul_(factor).to(logits.dtype).unsqueeze(0))
            else:
                with torch.no_grad():
                    # One tensor for logarithm, probability and gradient: they are needed one after the other.
                    found = functional.log_softmax(logits[0].float(), dim=-1)
                    total -= found.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64)
                if factor is not None and logits.requires_grad:
                    logits.backward(_cross_entropy_gradient(found, targets, factor).to(logits.dtype).unsqueeze(0))
            if gradient is not None:
                gradient[places] = piece.grad[0]
        return total, gradient

    def _head(self, piece: Tensor) -> Tensor:
        """Logits of a piece: the model with a body that has its answer ready."""
        with substitute_body_output(self.body, map_hidden_states(self.answer, lambda _: piece)):
            logits: Tensor = self.model(input_ids=self.batch.input_ids[:1, :1], use_cache=False).logits
        return logits


def _cross_entropy_gradient(log_probabilities: Tensor, targets: Tensor, factor: float) -> Tensor:
    """Of `factor` x cross entropy by the logits, written over their logarithms: probability, less one at the target."""
    with torch.no_grad():
        found = log_probabilities.exp_()
        found[torch.arange(len(targets), device=targets.device), targets] -= 1
        return found.mul_(factor)


def _hidden_states(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return found

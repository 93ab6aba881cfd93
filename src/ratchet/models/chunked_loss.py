"""Computes logits, losses and gradients in pieces, so that the logits of all positions never exist at once.

The body of a model runs once; its head runs on as many positions as fit in memory, because logits are the largest
tensors of an evaluation (8 rows of 1,024 tokens at a vocabulary of 150,000: 5 GB in float32), and of a training with a
large vocabulary. The model's own class turns hidden states into logits (head, adapters on the head, soft cap, scale).
The model is called again for each further piece; its body then computes nothing, but returns its saved output.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import BaseModelError
from ratchet.models.device import Model
from ratchet.models.loss import (
    SequenceBatch,
    TeacherTargets,
    answer_nll,
    compute_logits,
    compute_loss_and_gradient,
)
from ratchet.models.model_spec import find_blocks, find_body
from ratchet.models.packed_attention import attend_within_rows

CHUNK_ELEMENTS = 2**24
"""Number of logits that an evaluation computes at once. They need 64 MiB in float32, plus some copies."""
LEARNED_ELEMENTS = 2**24
"""Number of logits that a training computes at once. They need 64 MiB in float32, and their gradient needs the same.
With a teacher, this number is divided by `TeacherTargets.distributions`."""

QUERIES, KEYS, OUTPUTS = {"q_proj"}, {"k_proj", "v_proj"}, {"o_proj", "out_proj", "dense"}
"""Names of the linear layers of an attention, which may contain other modules too."""
FEED_FORWARD = {"mlp", "feed_forward"}
LINEAR = {
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "c_proj",
    "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3",
}  # fmt: skip
"""Names of the linear layers in a feed-forward part that processes each position separately (experts do not)."""
ELEMENTWISE = {"act", "act_fn", "activation", "activation_fn", "dropout", "resid_dropout"}
MAX_SELECTED_SHARE = 0.9
"""Share of trained positions above which selecting them costs more than it saves."""

Phase = Callable[[str], AbstractContextManager[Any]]
"""Returns the context in which the part of the work with this name runs. The names are `forward`, `loss` (head and
likelihood, with their gradient) and `backward`."""


class ForwardPass:
    """One forward pass over rows that are padded on the right, without a mask."""

    def __init__(
        self, model: Model, input_ids: Tensor, span: tuple[int, int], *, cache: Any = None, make_cache: bool = False,
        forward_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Run the body, and the head on the first piece. Call this under torch.no_grad.

        Raises BaseModelError if the model runs its body more than once, so its logits cannot be computed in pieces.

        Args:
            input_ids: int64 [rows, positions].
            span: first position whose logits are needed, and end of the range; at least one position.
            cache: keys and values of earlier tokens; this pass extends it.
            forward_kwargs: other arguments of the model, such as mask and position ids.
        """
        self.model = model
        self.first, self.last = span
        self._ids = input_ids
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        vocabulary = int(base.config.get_text_config().vocab_size)
        self._rows = len(self._select_rows(input_ids))
        self._piece_width = max(1, CHUNK_ELEMENTS // (self._rows * vocabulary))
        self._body = find_body(base)
        outputs: list[Any] = []

        def capture_output(_module: Any, _inputs: Any, output: Any) -> Any:
            outputs.append(_map_hidden_states(output, self._select_rows))
            return _slice_output(outputs[-1], slice(self.first, self._piece_end(self.first)))

        # A model that is its own body returns logits, not hidden states.
        hook = None if self._body is base else self._body.register_forward_hook(capture_output)
        cached = {} if cache is None else {"past_key_values": cache}
        try:
            output = model(input_ids=input_ids, use_cache=make_cache or cache is not None, **forward_kwargs, **cached)
        finally:
            if hook is not None:
                hook.remove()
        if len(outputs) > 1:
            raise BaseModelError(
                f"{type(base).__name__}: runs its layers {len(outputs)} times for one text; expected once"
            )
        self._body_output = outputs[0] if outputs else None
        self.cache: Any = getattr(output, "past_key_values", None)
        """Keys and values of all tokens up to the end of this pass; None if not requested or not supported."""
        self._first_logits: Tensor = output.logits

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first position and the logits [rows, columns, vocabulary] of each piece of the span."""
        logits, stop = self._first_logits, self._piece_end(self.first)
        if logits.shape[:2] != (self._rows, stop - self.first):
            # The model did not compute its logits from the body's output, so they cover all positions.
            logits = self._select_rows(logits)[:, self.first : self.last]
            for start in range(0, logits.shape[1], self._piece_width):
                yield self.first + start, logits[:, start : start + self._piece_width]
            return
        yield self.first, logits
        for start in range(stop, self.last, self._piece_width):
            yield start, self._run_head(slice(start, self._piece_end(start)))

    def _run_head(self, positions: slice) -> Tensor:
        with _substitute_body_output(self._body, _slice_output(self._body_output, positions)):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits

    def nll(self, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood (nats) of the token after each position of the span, float32 [rows, span].

        Args:
            targets: int64 [rows, span]: the token that follows each position.
        """
        result = torch.empty(targets.shape, dtype=torch.float32, device=targets.device)
        for start, logits in self.pieces():
            columns = slice(start - self.first, start - self.first + logits.shape[1])
            piece_targets = targets[:, columns]
            nll = functional.cross_entropy(logits.float().flatten(0, 1), piece_targets.flatten(), reduction="none")
            result[:, columns] = nll.view(piece_targets.shape)
        return result

    def _piece_end(self, start: int) -> int:
        return min(start + self._piece_width, self.last)

    def _select_rows(self, tensor: Tensor) -> Tensor:
        """Arrange a tensor of tokens, [rows, positions, ...], so that the span indexes its second axis."""
        return tensor


class SelectedPositionsPass(ForwardPass):
    """A forward pass with logits at selected positions of any rows; these positions form one row.

    `positions` is int64 [count], ascending and unique: row x columns + column.
    """

    def __init__(
        self, model: Model, input_ids: Tensor, positions: Tensor, forward_kwargs: Mapping[str, Tensor], *,
        cache: Any = None, make_cache: bool = False,
    ) -> None:  # fmt: skip
        self._positions = positions
        span = (0, len(positions))
        super().__init__(model, input_ids, span, cache=cache, make_cache=make_cache, forward_kwargs=forward_kwargs)

    def _select_rows(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[self._positions].unsqueeze(0)


class DeferredHeadPass(SelectedPositionsPass):
    """A `SelectedPositionsPass` that runs the body at once, and the head only when logits are requested."""

    def _piece_end(self, start: int) -> int:
        return min(start + 1, self.last)  # the head runs together with the body, on one position

    def compute_logits(self, start: int, stop: int) -> Tensor:
        """Return logits [stop - start, vocabulary] of a range of the positions. Call this under torch.no_grad."""
        if self._first_logits.shape[:2] != (1, 1):  # the model did not compute them from the body's output
            return self._select_rows(self._first_logits)[0, start:stop]
        return self._run_head(slice(start, stop))[0]


@contextmanager
def _substitute_body_output(body: Any, output: Any) -> Iterator[None]:
    """Replace the output of a model's body, so that a call of the model computes only the head."""
    original = body.__dict__.get("forward")
    body.forward = lambda *_, **__: output
    try:
        yield
    finally:
        if original is None:
            del body.forward
        else:
            body.forward = original


def _slice_output(output: Any, positions: slice) -> Any:
    """Return a body's output with the hidden states of some positions."""
    return _map_hidden_states(output, lambda states: states[:, positions])


def _map_hidden_states(output: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a body's output with transformed hidden states."""
    if isinstance(output, tuple):
        return (transform(output[0]), *output[1:])
    transformed = copy.copy(output)
    transformed.last_hidden_state = transform(output.last_hidden_state)
    return transformed


# The last block at selected positions. Only the head reads the block's output, and only at trained positions.
#
# The block's keys and values are needed everywhere, because trained positions attend to all positions before them. The
# block's queries, attention output and feed-forward layers are needed only at trained positions, in the forward and in
# the backward pass.


@contextmanager
def restrict_last_block(model: Model, positions: Tensor, shape: torch.Size) -> Iterator[None]:
    """Restrict the last block to some positions; at all other positions its output is undefined.

    Run the backward pass inside this context too, so that activation checkpointing recomputes the block the same way.
    Only models with a class of transformers are restricted. Other classes may run their blocks several times (Ouro);
    they then read the output of the last block at all positions.

    Args:
        model: base model (`get_base_model`), whose body runs inside the context.
        positions: int64 [count], ascending and unique: row x columns + column.
    """
    _, blocks = find_blocks(model)
    is_worthwhile = 0 < len(positions) <= MAX_SELECTED_SHARE * shape.numel()
    with ExitStack() as stack:
        if is_worthwhile and len(blocks) and type(model).__module__.startswith("transformers."):
            for module in _position_wise_modules(blocks[-1]):
                hook = _SelectedPositionsHook(positions, shape)
                stack.callback(module.register_forward_pre_hook(hook.select_inputs).remove)
                stack.callback(module.register_forward_hook(hook.scatter_outputs).remove)
        yield


def _position_wise_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a block that process each position separately."""
    for name, part in block.named_children():
        child_names = {name for name, _ in part.named_children()}
        if name in FEED_FORWARD and child_names & LINEAR and child_names <= LINEAR | ELEMENTWISE:
            yield part
        elif child_names >= QUERIES | KEYS and child_names & OUTPUTS:
            yield from (layer for name, layer in part.named_children() if name in QUERIES | OUTPUTS)


class _SelectedPositionsHook:
    """Hooks that pass only selected positions to a module, and make the module's output zero at all other positions."""

    def __init__(self, positions: Tensor, shape: torch.Size) -> None:
        self.positions, self.shape = positions, shape
        self._is_active = False

    def select_inputs(self, _module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._is_active = bool(inputs) and inputs[0].shape[:-1] == self.shape
        if not self._is_active:
            return inputs
        return (inputs[0].flatten(0, 1).index_select(0, self.positions).unsqueeze(0), *inputs[1:])

    def scatter_outputs(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if not self._is_active:
            return output
        full = output.new_zeros(self.shape.numel(), output.shape[-1])
        return full.index_copy(0, self.positions, output[0]).view(*self.shape, -1)


# Loss and gradient of a training step: the body runs once, the head on a chunk of the trained positions at a time.
#
# The gradient of a chunk is computed as soon as its logits are known, and the logits are freed before the next chunk
# (the idea of Liger's fused linear cross entropy, Hsu et al. 2024, arXiv 2410.10989, without its kernels).


def ignore_phase(_: str) -> AbstractContextManager[Any]:
    """Measure no phase."""
    return nullcontext()


def compute_loss(
    model: Model,
    batch: SequenceBatch,
    scale: float | None,
    teacher_targets: TeacherTargets | None = None,
    phase: Phase = ignore_phase,
) -> "ChunkedLoss":
    """Run the forward pass of a micro-batch and return its loss; call `backward()` on it once.

    Args:
        scale: factor of the gradient, needed here because the forward pass already computes the gradient of the head.
            None: no gradient is computed.
        teacher_targets: distillation targets, which add the second part of the loss (loss.py).
        phase: wraps `forward`, `loss` and `backward`.
    """
    return ChunkedLoss(model, batch, scale, teacher_targets, phase)


def forward_backward(
    model: Model,
    batch: SequenceBatch,
    scale: float,
    phase: Phase = ignore_phase,
    teacher_targets: TeacherTargets | None = None,
) -> Tensor:
    """Run forward and backward pass of a micro-batch; return the sum of its losses in nats.

    Adds `scale` times the gradient to the gradients of the trainable parameters, and frees the graph.
    """
    loss = compute_loss(model, batch, scale, teacher_targets, phase)
    loss.backward()
    return loss.value


def compute_nll(model: Model, batch: SequenceBatch) -> Tensor:
    """Return the sum of a micro-batch's negative log-likelihoods, without a gradient. Call this under torch.no_grad."""
    return ChunkedLoss(model, batch, None, None, ignore_phase).value


class ChunkedLoss:
    """Loss of one micro-batch, in nats, summed over its labels; created by `compute_loss`.

    The forward pass computes the gradient of the head, chunk by chunk; `backward()` computes the gradient of the body.
    Without a `scale`, no gradient is computed.
    """

    def __init__(
        self,
        model: Model,
        batch: SequenceBatch,
        scale: float | None,
        teacher_targets: TeacherTargets | None = None,
        phase: Phase = ignore_phase,
        counts_correct: bool = False,
    ) -> None:
        self.model, self.batch, self.phase, self.teacher_targets = model, batch, phase, teacher_targets
        self._counts_correct = counts_correct
        self.correct: Tensor | int = 0
        """Number of targets that are the most likely token, if they are counted."""
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body = find_body(self.base)
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        self.positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        """Trained positions in the flattened hidden states, row after row."""
        self.targets = targets[self.positions]
        del targets  # it has the size of the whole batch, and the forward pass below runs in this function
        self.value = torch.zeros((), dtype=torch.float64)
        """Loss summed over the labels, in nats, float64."""
        self.body_output: Any = None
        self._backward: Callable[[], None] | None = None
        self._contexts = ExitStack()
        """Contexts of the forward pass (`restrict_last_block`), which stay open until the backward pass has run."""
        with ExitStack() as contexts:
            hidden = None
            if self.body is not self.base:
                contexts.enter_context(restrict_last_block(self.base, self.positions, batch.input_ids.shape))
                with self.phase("forward"):
                    hidden = self._run_body()
            if hidden is None:
                contexts.close()
                self._compute_at_once(scale)
            else:
                with self.phase("loss"):
                    gradient = self._run_head(hidden.detach().flatten(0, 1), hidden.requires_grad, scale)
                if gradient is not None:
                    self._backward = partial(hidden.backward, gradient.view_as(hidden))
            if self._backward is not None:
                self._contexts = contexts.pop_all()

    def item(self) -> float:
        """Wait for the device and return the loss as a number."""
        return float(self.value)

    def backward(self) -> None:
        """Add `scale` times the gradient to the trainable parameters' gradients, and free the graph."""
        batch, backward, self._backward = self.batch, self._backward, None
        try:
            if backward is not None:
                with attend_within_rows(self.model, batch.input_ids, batch.position_ids), self.phase("backward"):
                    backward()
        finally:
            self._contexts.close()
            self.body_output = self.teacher_targets = None  # a caller may keep the loss while the next one is computed

    def _compute_at_once(self, scale: float | None) -> None:
        """Compute the loss of a model whose body cannot be separated from the head."""
        batch = self.batch
        if self.teacher_targets is None:
            with self.phase("forward"):
                nll = answer_nll(self.model, batch.input_ids, batch.labels, batch.position_ids).sum()
                if self._counts_correct:
                    logits = self._compute_trained_logits()
                    self.correct = (logits.argmax(-1) == self.targets).sum()
            self.value = nll.detach().double()
            if scale is not None:
                self._backward = (nll * scale).backward
            return
        with self.phase("forward"):
            logits = self._compute_trained_logits()
        with self.phase("loss"):
            targets = self.teacher_targets.select(slice(0, len(self.positions)))
            self.value, gradient = compute_loss_and_gradient(logits, self.targets, targets)
        if scale is not None:
            self._backward = partial(logits.backward, gradient.mul_(scale).to(logits.dtype))

    def _compute_trained_logits(self) -> Tensor:
        """Return logits [trained positions, vocabulary] of a pass of the whole model."""
        logits = compute_logits(self.model, self.batch.input_ids, self.batch.position_ids)
        return logits.flatten(0, 1)[self.positions]

    def _run_body(self) -> Tensor | None:
        """Return hidden states [sequences, positions, width]; None if the model does not compute logits from them.

        The head runs on a single position, and its output is discarded.
        """
        outputs: list[Any] = []

        def capture_output(_module: Any, _inputs: Any, output: Any) -> Any:
            outputs.append(output)
            return _map_hidden_states(output, lambda states: states.detach()[:1, :1])

        hook = self.body.register_forward_hook(capture_output)
        try:
            logits = compute_logits(self.model, self.batch.input_ids, self.batch.position_ids)
        finally:
            hook.remove()
        if len(outputs) != 1 or logits.shape[:2] != (1, 1):
            return None
        self.body_output = outputs[0]
        states: Tensor = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0].last_hidden_state
        return states

    def _run_head(self, states: Tensor, trains_body: bool, scale: float | None) -> Tensor | None:
        """Compute the loss; return the gradient of the hidden states if the body has trainable parameters."""
        vocabulary = int(self.base.config.get_text_config().vocab_size)
        distributions = 1 if self.teacher_targets is None else self.teacher_targets.distributions
        width = max(1, LEARNED_ELEMENTS // (distributions * vocabulary))
        self.value = torch.zeros((), dtype=torch.float64, device=states.device)
        gradient = torch.zeros_like(states) if trains_body and scale is not None else None
        for start in self._chunk_starts(width):
            positions, targets = self.positions[start : start + width], self.targets[start : start + width]
            chunk = states[positions].unsqueeze(0).requires_grad_(gradient is not None)
            with _substitute_body_output(self.body, _map_hidden_states(self.body_output, lambda _: chunk)):  # noqa: B023
                logits: Tensor = self.model(input_ids=self.batch.input_ids[:1, :1], use_cache=False).logits
            factor = scale if logits.requires_grad else None
            if self.teacher_targets is not None:
                chunk_targets = self.teacher_targets.select(slice(start, start + len(positions)))
                loss, logit_gradient = compute_loss_and_gradient(logits[0], targets, chunk_targets)
                self.value += loss
            else:
                with torch.no_grad():
                    logit_gradient = functional.log_softmax(logits[0].float(), dim=-1)
                    self._add_nll(start, -logit_gradient.gather(1, targets.unsqueeze(1)).squeeze(1))
                    if self._counts_correct:
                        self.correct += (logit_gradient.argmax(-1) == targets).sum()
                    if factor is not None:  # in place, so that a chunk needs only one tensor of this size
                        logit_gradient.exp_()[torch.arange(len(targets), device=targets.device), targets] -= 1
            if factor is not None:
                logits.backward(self._scale_gradient(start, logit_gradient, factor).to(logits.dtype).unsqueeze(0))
            if gradient is not None:
                gradient[positions] = chunk.grad[0]
        return gradient

    def _chunk_starts(self, width: int) -> Iterable[int]:
        """Return the first trained position of each chunk of the head."""
        return range(0, len(self.positions), width)

    def _add_nll(self, start: int, nll: Tensor) -> None:
        """Add the negative log-likelihoods of the targets from `start` on."""
        self.value += nll.sum(dtype=torch.float64)

    def _scale_gradient(self, start: int, gradient: Tensor, scale: float) -> Tensor:
        """Scale the gradient of the logits of the targets from `start` on, in place."""
        return gradient.mul_(scale)

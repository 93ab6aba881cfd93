"""Computes logits, losses and gradients in pieces, so that the logits of all positions never exist at once.

The body of a model runs once; its head runs on as many positions as fit in memory. Logits are the largest tensor of an
evaluation: 8 rows of 1,024 tokens at a vocabulary of 150,000 are 5 GB in float32, and computing the likelihood needs
half a dozen tensors of that size. Logits are also the largest tensor of a training with a large vocabulary: 2,048
positions at 128,000 tokens are 1 GB in float32, and their logarithms and their gradient take as much again.

The model's own class turns hidden states into logits (head, adapters on the head, soft cap, scale). The model is called
again for each further piece; in these calls its body computes nothing, but returns its saved output.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
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
    compute_all_logits,
    compute_loss_and_gradient,
    forward_inputs,
)
from ratchet.models.model_spec import find_blocks, find_body

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

    _forward_kwargs: Mapping[str, Tensor] = {}

    def __init__(
        self, model: Model, input_ids: Tensor, span: tuple[int, int], *, cache: Any = None, make_cache: bool = False
    ) -> None:
        """Run the body, and the head on the first piece. Call this under torch.no_grad.

        Args:
            input_ids: int64 [rows, positions].
            span: first position whose logits are needed, and end of the range; at least one position.
            cache: keys and values of earlier tokens; this pass extends it.
            make_cache: create a cache if none is passed.

        Raises:
            BaseModelError: the model runs its body more than once, so its logits cannot be computed in pieces.
        """
        self.model = model
        self.first, self.last = span
        self._ids = input_ids
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        vocabulary = int(base.config.get_text_config().vocab_size)
        self._rows = len(self._select_rows(input_ids))
        self._piece_width = max(1, CHUNK_ELEMENTS // (self._rows * vocabulary))
        self._body = find_body(base)
        self._body_outputs: list[Any] = []
        forward_kwargs = (
            dict(self._forward_kwargs) if cache is None else {**self._forward_kwargs, "past_key_values": cache}
        )
        # A model that is its own body returns logits, not hidden states.
        hooks = [] if self._body is base else [self._body.register_forward_hook(self._capture_output)]
        try:
            output = model(input_ids=input_ids, use_cache=make_cache or cache is not None, **forward_kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self._body_outputs) > 1:
            raise BaseModelError(
                f"{type(base).__name__}: runs its layers {len(self._body_outputs)} times for one text; expected once"
            )
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
            yield start, self._compute_piece(start)

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

    def _capture_output(self, _module: Any, _inputs: Any, output: Any) -> Any:
        output = map_hidden_states(output, self._select_rows)
        self._body_outputs.append(output)
        return _slice_output(output, slice(self.first, self._piece_end(self.first)))

    def _compute_piece(self, start: int) -> Tensor:
        """Return the logits of a further piece."""
        piece = _slice_output(self._body_outputs[0], slice(start, self._piece_end(start)))
        with substitute_body_output(self._body, piece):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits


class SelectedPositionsPass(ForwardPass):
    """A forward pass with logits at selected positions of any rows; these positions form one row, ascending."""

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        positions: Tensor,
        forward_kwargs: Mapping[str, Tensor],
        *,
        cache: Any,
        make_cache: bool,
    ) -> None:
        """Run the body, and the head on the first piece. Call this under torch.no_grad.

        Args:
            input_ids: int64 [rows, positions].
            positions: int64 [count], ascending and unique: row x columns + column.
            forward_kwargs: other arguments of the model: mask and position ids.
            cache: keys and values of earlier tokens; this pass extends it.
            make_cache: create a cache if none is passed.

        Raises:
            BaseModelError: the model runs its body more than once, so its logits cannot be computed in pieces.
        """
        self._positions, self._forward_kwargs = positions, forward_kwargs
        super().__init__(model, input_ids, (0, len(positions)), cache=cache, make_cache=make_cache)

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
        with substitute_body_output(self._body, _slice_output(self._body_outputs[0], slice(start, stop))):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits[0]


@contextmanager
def substitute_body_output(body: Any, output: Any) -> Iterator[None]:
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
    return map_hidden_states(output, lambda states: states[:, positions])


def map_hidden_states(output: Any, transform: Callable[[Tensor], Tensor]) -> Any:
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

    Args:
        model: base model (`get_base_model`), whose body runs inside the context.
        positions: int64 [count], ascending and unique: row x columns + column.
        shape: rows and columns of the batch.
    """
    with ExitStack() as stack:
        if 0 < len(positions) <= MAX_SELECTED_SHARE * shape.numel():
            for module in _position_wise_modules(model):
                hook = _SelectedPositionsHook(positions, shape)
                stack.callback(module.register_forward_pre_hook(hook.select_inputs).remove)
                stack.callback(module.register_forward_hook(hook.scatter_outputs).remove)
        yield


def _position_wise_modules(model: Model) -> Iterator[nn.Module]:
    """Yield the parts of the last block that process each position separately.

    Only models with a class of transformers have such parts. Other classes may run their blocks several times (Ouro);
    they then read the output of the last block at all positions.
    """
    _, blocks = find_blocks(model)
    if not len(blocks) or not type(model).__module__.startswith("transformers."):
        return
    for name, part in blocks[-1].named_children():
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


def _ignore_phase(_: str) -> AbstractContextManager[Any]:
    return nullcontext()


def compute_loss(
    model: Model,
    batch: SequenceBatch,
    scale: float,
    teacher_targets: TeacherTargets | None = None,
    phase: Phase = _ignore_phase,
) -> "ChunkedLoss":
    """Run the forward pass of a micro-batch and return its loss; call `backward()` on it once.

    Args:
        model: the model, with its adapter.
        batch: the micro-batch.
        scale: factor of the gradient, needed here because the forward pass already computes the gradient of the head.
        teacher_targets: distillation targets, which add the second part of the loss (loss.py).
        phase: wraps `forward`, `loss` and `backward`.
    """
    return ChunkedLoss(model, batch, teacher_targets, phase).compute(scale)


def forward_backward(
    model: Model,
    batch: SequenceBatch,
    scale: float,
    phase: Phase = _ignore_phase,
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
    return ChunkedLoss(model, batch, None, _ignore_phase).compute(None).value


class ChunkedLoss:
    """Loss of one micro-batch, in nats, summed over its labels; created by `compute_loss`.

    The forward pass computes the gradient of the head, chunk by chunk; `backward()` computes the gradient of the body.
    """

    def __init__(
        self, model: Model, batch: SequenceBatch, teacher_targets: TeacherTargets | None, phase: Phase
    ) -> None:
        self.model, self.batch, self.phase, self.teacher_targets = model, batch, phase, teacher_targets
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body = find_body(self.base)
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        self.positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        """Trained positions in the flattened hidden states, row after row."""
        self.targets = targets[self.positions]
        self.value = torch.zeros((), dtype=torch.float64)
        """Loss summed over the labels, in nats, float64."""
        self.body_output: Any = None
        self._backward: Callable[[], None] | None = None
        self._contexts = ExitStack()
        """Contexts of the forward pass (`restrict_last_block`), which stay open until the backward pass has run."""

    def item(self) -> float:
        """Wait for the device and return the loss as a number."""
        return float(self.value)

    def backward(self) -> None:
        """Add `scale` times the gradient to the trainable parameters' gradients, and free the graph."""
        backward, self._backward = self._backward, None
        try:
            if backward is not None:
                with self.phase("backward"):
                    backward()
        finally:
            self._contexts.close()
            self.body_output = self.teacher_targets = None  # a caller may keep the loss while the next one is computed

    def compute(self, scale: float | None) -> "ChunkedLoss":
        """Run the forward pass. If `scale` is None, no gradient is computed."""
        with ExitStack() as contexts:
            is_computed = False
            if self.body is not self.base:
                contexts.enter_context(restrict_last_block(self.base, self.positions, self.batch.input_ids.shape))
                is_computed = self._compute_in_chunks(scale)
            if not is_computed:
                contexts.close()
                self._compute_at_once(scale)
            if self._backward is not None:
                self._contexts = contexts.pop_all()
        return self

    def _compute_in_chunks(self, scale: float | None) -> bool:
        """Compute the loss in chunks; return False, without a loss, if logits are not computed from hidden states."""
        with self.phase("forward"):
            hidden = self._run_body()
        if hidden is None:
            return False
        with self.phase("loss"):
            self.value, gradient = self._run_head(hidden.detach().flatten(0, 1), hidden.requires_grad, scale)
        if gradient is not None:
            self._backward = partial(hidden.backward, gradient.view_as(hidden))
        return True

    def _compute_at_once(self, scale: float | None) -> None:
        """Compute the loss of a model whose body cannot be separated from the head."""
        if self.teacher_targets is not None:
            self._compute_distillation_at_once(self.teacher_targets, scale)
            return
        with self.phase("forward"):
            nll = answer_nll(self.model, self.batch.input_ids, self.batch.labels, self.batch.position_ids).sum()
        self.value = nll.detach().double()
        if scale is not None:
            self._backward = partial(_backward_scaled, nll, scale)

    def _compute_distillation_at_once(self, teacher_targets: TeacherTargets, scale: float | None) -> None:
        with self.phase("forward"):
            logits = compute_all_logits(self.model, self.batch).flatten(0, 1)[self.positions]
        with self.phase("loss"):
            self.value, gradient = compute_loss_and_gradient(
                logits, self.targets, teacher_targets.select(slice(0, len(self.positions)))
            )
        if scale is not None:
            self._backward = partial(_backward_with_gradient, logits, gradient, scale)

    def _run_body(self) -> Tensor | None:
        """Return hidden states [sequences, positions, width]; None if the model does not compute logits from them.

        The head runs on a single position, and its output is discarded.
        """
        outputs: list[Any] = []

        def capture_output(_module: Any, _inputs: Any, output: Any) -> Any:
            outputs.append(output)
            return map_hidden_states(output, lambda states: states.detach()[:1, :1])

        hook = self.body.register_forward_hook(capture_output)
        try:
            logits = self.model(**forward_inputs(self.batch.input_ids, self.batch.position_ids), use_cache=False).logits
        finally:
            hook.remove()
        if len(outputs) != 1 or logits.shape[:2] != (1, 1):
            return None
        self.body_output = outputs[0]
        return _hidden_states(self.body_output)

    def _run_head(self, states: Tensor, trains_body: bool, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """Return the loss, and the gradient of the hidden states if the body has trainable parameters.

        Args:
            states: hidden states [positions of all sequences, width], without a graph.
            trains_body: whether a parameter of the body is trainable.
            scale: factor of the gradient; None: no gradient.
        """
        vocabulary = int(self.base.config.get_text_config().vocab_size)
        distributions = 1 if self.teacher_targets is None else self.teacher_targets.distributions
        width = max(1, LEARNED_ELEMENTS // (distributions * vocabulary))
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        gradient = torch.zeros_like(states) if trains_body and scale is not None else None
        for start in range(0, len(self.positions), width):
            positions, targets = self.positions[start : start + width], self.targets[start : start + width]
            teacher_targets = (
                None
                if self.teacher_targets is None
                else self.teacher_targets.select(slice(start, start + len(positions)))
            )
            chunk = states[positions].unsqueeze(0).requires_grad_(gradient is not None)
            logits = self._compute_logits(chunk)
            if teacher_targets is not None:
                loss, logit_gradient = compute_loss_and_gradient(logits[0], targets, teacher_targets)
                total += loss
                if scale is not None and logits.requires_grad:
                    logits.backward(logit_gradient.mul_(scale).to(logits.dtype).unsqueeze(0))
            else:
                with torch.no_grad():
                    log_probabilities = functional.log_softmax(logits[0].float(), dim=-1)
                    total -= log_probabilities.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64)
                if scale is not None and logits.requires_grad:
                    logit_gradient = _cross_entropy_gradient(log_probabilities, targets, scale)
                    logits.backward(logit_gradient.to(logits.dtype).unsqueeze(0))
            if gradient is not None:
                gradient[positions] = chunk.grad[0]
        return total, gradient

    def _compute_logits(self, chunk: Tensor) -> Tensor:
        """Return the logits of a chunk of hidden states."""
        with substitute_body_output(self.body, map_hidden_states(self.body_output, lambda _: chunk)):
            logits: Tensor = self.model(input_ids=self.batch.input_ids[:1, :1], use_cache=False).logits
        return logits


def _backward_scaled(loss: Tensor, scale: float) -> None:
    (loss * scale).backward()


def _backward_with_gradient(logits: Tensor, gradient: Tensor, scale: float) -> None:
    logits.backward((gradient * scale).to(logits.dtype))


def _cross_entropy_gradient(log_probabilities: Tensor, targets: Tensor, factor: float) -> Tensor:
    """Return the gradient of `factor` x cross entropy by the logits: `factor` x (probability, minus one at the target).

    The gradient overwrites `log_probabilities`, so that a chunk needs only one tensor of this size.
    """
    with torch.no_grad():
        gradient = log_probabilities.exp_()
        gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        return gradient.mul_(factor)


def _hidden_states(output: Any) -> Tensor:
    states: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return states

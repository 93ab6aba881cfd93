"""Answers many prompts in batches; each answer is the same as if its prompt were decoded alone.

Prompts are fetched in windows and read longest first. When a row (a prompt and the tokens generated for it) ends, a
waiting row takes its place. The plain pass of a row (one row, no padding, no cache, the whole text) defines its answer:
it decides each token whose lead in the batch, and each mean log-probability whose last digit, rounding could have
changed. So batches, restarts and out-of-memory errors do not change a byte of an answer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ratchet.models import oom
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.decoding.batch import (
    BeforePass,
    DecodingBatch,
    DecodingOptions,
    DecodingRequest,
    DecodingResult,
    DecodingRow,
    FinishReason,
    KvCacheBatch,
    UncachedBatch,
    UniformLengthBatch,
    compute_reference_logits,
    find_shared_prefix,
    get_context_length,
    longest_first_key,
)
from ratchet.models.decoding.token_choice import (
    DECIMALS,
    MARGIN,
    TokenChoices,
    TokenSampler,
    coarsest_epsilon,
    default_error_units,
    is_rounding_certain,
)
from ratchet.models.device import Model
from ratchet.models.likelihoods import MIN_TOLERANCE, TOLERANCE_EPSILONS
from ratchet.models.memory import capacity, parameters

__all__ = ["BatchDecoder", "DecodingOptions", "DecodingRequest", "DecodingResult", "FinishReason"]

DecodingCallback = Callable[[str, dict[str, Any]], None]
"""Called with the name and data of an event."""

PROBE_TOKENS = 3
"""Number of tokens that the probe of a batching method appends to each prompt."""

SHRINK = 0.8
"""At the first failure, the budget is reduced to this share of the size that did not fit; further failures before a
success halve the budget."""
GROW = 1.25
"""Factor on the budget after enough successful passes."""
GROW_AFTER_PASSES = 50
"""Number of successful passes before the budget grows; doubled each time that a pass fails after the budget grew."""
MAX_WAIT_PASSES = 10_000
MEMORY_SHARE = 0.5
"""Share of free memory that the forecast uses: other processes need memory too, and allocations leave gaps."""
READ_TOKENS = 8192
"""Maximum padded tokens of prompts that are read in one pass; a single longer prompt is read in one pass too."""
CPU_ROWS, GPU_ROWS = 64, 256
"""Default maximum number of rows that are decoded together, on a CPU and on a GPU."""
MIN_JOIN_SHARE = 0.25
"""Prompts are read only if they become at least this share of the rows, or if no others wait, because a pass over few
prompts costs as much as a pass over many."""
REPORT_EVERY_PASSES = 32
"""Number of passes between two `batch` events."""
EXPECTED_LENGTH_FACTOR = 2.0
"""Expected maximum length of an answer, as a multiple of the mean so far."""
KNOWN_ANSWERS = 16
"""Until this many answers have ended, every answer is expected to reach its maximum length."""
FALLBACK_PROBE_TOKENS = 8
"""Number of tokens of a prompt that probe the batching method if whole prompts do not fit into memory."""


@dataclass(frozen=True)
class BatchingMethod:
    """A way to decode rows together."""

    name: str
    """`joined`: rows join and leave at any time. `even`: rows of one length start together. `alone`: each row is read
    from its start for each token."""
    create_batch: Callable[[], DecodingBatch]
    error_units: float
    """Greatest measured difference from the logits of plain passes, in units of eps x the greatest absolute logit (see
    `token_choice.FINE_EPSILONS`)."""


def choose_batching_method(
    model: Model, prompts: Sequence[Sequence[int]], prefix: tuple[int, ...], pad: int, before_pass: BeforePass
) -> BatchingMethod:
    """Return the first method whose logits equal those of plain passes except for rounding.

    Raises out-of-memory errors (`oom.is_out_of_memory`) of a forward pass.

    Args:
        prompts: some prompts, of different length if possible; all start with `prefix`.
    """
    candidates: dict[str, Callable[[], DecodingBatch]] = {
        "joined": partial(KvCacheBatch, model, pad, before_pass),
        "even": partial(UniformLengthBatch, model, pad, before_pass),
    }
    for name, create_batch in candidates.items():
        try:
            with torch.no_grad():
                error_units = _exercise_batch(model, create_batch(), prompts, prefix)
        except Exception as error:  # a model's own code may raise anything for an unsupported call
            if oom.is_out_of_memory(error):
                raise
        else:
            if error_units is not None:
                return BatchingMethod(name, create_batch, error_units)
    return BatchingMethod("alone", partial(UncachedBatch, model, before_pass), 0.0)


def _exercise_batch(
    model: Model, batch: DecodingBatch, prompts: Sequence[Sequence[int]], prefix: tuple[int, ...]
) -> float | None:  # fmt: skip
    """Add, extend and remove rows as decoding does; return the greatest error in units, or None if it is too large."""
    eps, worst = coarsest_epsilon(model), 0.0
    max_units = max(MIN_TOLERANCE, TOLERANCE_EPSILONS * eps) / eps
    first = list(prompts[0])
    texts = [first, list(prompts[-1]) if batch.supports_joining else [*first[:-1], first[0]]]
    joined_text = [*prefix, *prompts[-1][len(prefix) :][::-1]]

    def is_near(logits: Tensor) -> bool:
        nonlocal worst
        worst = max(worst, *(_error_in_units(row, model, text, eps) for row, text in zip(logits, texts, strict=True)))
        return bool(worst <= max_units)

    if not is_near(batch.add([tuple(text) for text in texts], prefix)):
        return None
    for step in range(PROBE_TOKENS):
        for text in texts:
            text.append(text[step % len(text)])
        if not is_near(batch.step([text[-1] for text in texts])):
            return None
        if step == 0:
            texts = [texts[i] for i in batch.keep([1])]
            if batch.supports_joining:
                texts.append(joined_text)
                logits = batch.add([tuple(joined_text)], prefix)
                worst = max(worst, _error_in_units(logits[0], model, joined_text, eps))
        elif step == 1:  # bitsandbytes uses another code path for a single row
            texts = [texts[i] for i in batch.keep([0])]
    return worst if worst <= max_units else None


def _error_in_units(logits: Tensor, model: Model, text: Sequence[int], eps: float) -> float:
    """Return the error of logits in units of eps x the greatest logit; infinite if the error is NaN or infinite."""
    error = relative_logit_difference(logits, compute_reference_logits(model, text)[0])
    return error / eps if math.isfinite(error) else math.inf


def relative_logit_difference(logits: Tensor, expected: Tensor) -> float:
    """Return the greatest difference of two logits [vocabulary], relative to the greatest absolute expected logit.

    Equal infinities do not differ.
    """
    a, b = logits.float(), expected.float()
    difference = torch.where(a == b, 0.0, (a - b).abs()).amax()
    scale = torch.where(torch.isfinite(b), b.abs(), 0.0).amax()
    return float(difference / scale) if float(difference) else 0.0


class ExactTokenSelector:
    """Chooses tokens and computes mean log-probabilities; `figures` counts choices and repeated computations."""

    def __init__(
        self, model: Model, settings: DecodingOptions, on_event: DecodingCallback, before_pass: BeforePass
    ) -> None:
        self.figures = {"tokens_chosen": 0, "tokens_rechecked": 0, "means_recomputed": 0}
        self._model, self._settings, self._on_event, self._before_pass = model, settings, on_event, before_pass
        self._sampler = TokenSampler(settings.temperature, settings.top_p)
        self._eps = coarsest_epsilon(model)
        self._units = default_error_units(self._eps)
        self._is_unbatched = False

    def set_method(self, method: BatchingMethod) -> None:
        """Use a batching method and its measured error."""
        self._is_unbatched = method.name == "alone"
        self._units = max(self._units, MARGIN * method.error_units)
        bound = 0.0 if self._is_unbatched else self._units
        self._on_event("method", {"method": method.name, "error_units": method.error_units, "bound_units": bound})

    def choose(self, rows: Sequence[DecodingRow], logits: Tensor) -> TokenChoices:
        """Choose a token for each row; the row's plain pass decides doubtful tokens.

        Args:
            logits: [rows, vocabulary].
        """
        streams = [(row.request.stream, len(row.ids)) for row in rows]
        bound = 0.0 if self._is_unbatched or not self._settings.exact else self._units * self._eps
        chosen = self._sampler.choose(logits, streams, bound)
        self.figures["tokens_chosen"] += len(rows)
        for i, row in enumerate(rows):
            if chosen.is_certain[i]:
                continue
            self.figures["tokens_rechecked"] += 1
            self._before_pass(row.tokens)
            plain_logits = compute_reference_logits(self._model, row.text())
            plain = self._sampler.choose(plain_logits, streams[i : i + 1], 0.0)
            row.has_nonfinite_logits |= not chosen.is_finite[i]
            if chosen.is_finite[i] and plain.is_finite[0]:
                error_units = relative_logit_difference(logits[i], plain_logits[0]) / self._eps
                if 2 * error_units > self._units:
                    self._on_event("bound", {"error_units": error_units, "bound_units": self._units})
                    self._units = MARGIN * error_units
            for name in ("tokens", "nats", "is_finite", "scales"):
                getattr(chosen, name)[i] = getattr(plain, name)[0]
        return chosen

    def find_finished(self, rows: Sequence[DecodingRow], chosen: TokenChoices) -> dict[int, DecodingResult]:
        """Return the results of rows that end with the chosen token, by index.

        This method does not change the rows, because a later pass may still fail.
        """
        results = {}
        for i, row in enumerate(rows):
            finish: FinishReason | None = None
            ids, nats = [*row.ids, chosen.tokens[i]], row.nats + chosen.nats[i]
            if not chosen.is_finite[i]:
                finish, ids, nats = "invalid", row.ids, row.nats
            elif chosen.tokens[i] in self._settings.end_token_ids:
                finish = "stop"
            elif len(ids) == row.limit:
                finish = "length" if row.limit == self._settings.max_new_tokens else "context"
            if finish is not None:
                scale = max(row.scale, chosen.scales[i])
                results[i] = DecodingResult(
                    row.request.index, tuple(ids), finish, self._compute_mean(row, ids, nats, scale)
                )
        return results

    def _compute_mean(self, row: DecodingRow, ids: Sequence[int], nats: float, scale: float) -> float:
        """Return the rounded mean log-probability; one plain pass over the text decides doubtful rounding."""
        if not ids:
            return 0.0
        bound = (
            self._units * self._eps
        )  # also for rows read alone, because one pass over all tokens sums in another order
        if self._settings.exact and not is_rounding_certain(nats / len(ids), len(ids), bound * scale):
            self.figures["means_recomputed"] += 1
            ids_of_text = [*row.request.ids, *ids]
            self._before_pass(len(ids_of_text) - 1)
            text = torch.tensor([ids_of_text], device=self._model.device)
            first, last = len(row.request.ids) - 1, len(ids_of_text) - 1
            nats = -float(
                ForwardPass(self._model, text[:, :-1], (first, last)).nll(text[:, first + 1 :]).double().sum()
            )
        return round(nats / len(ids), DECIMALS) + 0.0


# Number of tokens decoded together: forecast from free memory, reduced after failures, increased after successes.


@dataclass(frozen=True)
class PaddedTokenBudget:
    """Maximum padded tokens (rows x columns) in memory; a single row is decoded at any length."""

    tokens: int
    failed_tokens: int = 0
    """Padded tokens that did not fit when the budget was last reduced; 0: none."""
    successful_passes: int = 0
    wait_passes: int = GROW_AFTER_PASSES
    grown: bool = False
    """True if the last change increased the budget: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "PaddedTokenBudget":
        """Return the budget after `failed_tokens` did not fit; `repeated`: no pass succeeded since the last failure."""
        before = min(self.tokens, failed_tokens)
        tokens = before // 2 if repeated else min(before, int(SHRINK * failed_tokens))
        wait = min(MAX_WAIT_PASSES, 2 * self.wait_passes) if self.grown else self.wait_passes
        return PaddedTokenBudget(max(1, tokens), failed_tokens, wait_passes=wait)

    def after_success(self, is_limiting: bool) -> "PaddedTokenBudget":
        """Return the budget after a successful pass; `is_limiting`: prompts wait because of the budget.

        The budget may grow to a size that failed before: another process may have used the memory at that time.
        """
        passes = self.successful_passes + is_limiting
        if passes < self.wait_passes:
            return replace(self, successful_passes=passes)
        return replace(self, tokens=max(self.tokens + 1, int(GROW * self.tokens)), successful_passes=0, grown=True)


def forecast_tokens(model: Model, rows: int, is_sampled: bool) -> int:
    """Estimate the padded tokens that fit into free memory; at least 1.

    MEMORY_SHARE of the memory that remains after the weights must hold keys and values, logits of `rows` rows with the
    workspace of sampling, and one pass over prompts.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    weights = sum(tensor.nbytes for tensor in parameters.list_unique_tensors(model))
    free = MEMORY_SHARE * (capacity.measure_device(model.device).available_bytes - weights)
    # One token in the widest layer, in float32.
    hidden = int(config.hidden_size)
    inner = _largest_setting(getattr(config, "intermediate_size", None) or 4 * hidden)
    free -= decoding_bytes(model, rows, 0, is_sampled) + READ_TOKENS * 4 * (8 * hidden + 3 * inner)
    return max(1, int(free // decoding_bytes(model, 0, 1, is_sampled)))


def decoding_bytes(model: Model, rows: int, tokens: int, is_sampled: bool) -> int:
    """Return the bytes of keys and values of all padded tokens, of logits, and of the workspace of sampling."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    key_heads = _largest_setting(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or -(-int(config.hidden_size) // heads))
    sizes = [tensor.element_size() for tensor in model.parameters() if tensor.is_floating_point()]
    # Keys and values in all layers, plus half for unused columns of the buffers.
    token_bytes = 3 * int(config.num_hidden_layers) * key_heads * head * int(max(sizes, default=4))
    return rows * int(config.vocab_size) * (40 if is_sampled else 12) + tokens * token_bytes


def _largest_setting(value: Any) -> int:
    """Return the greatest value of a config entry that may be a list with one value per layer."""
    return int(max(value) if isinstance(value, list | tuple) else value)


# The decoder.


class BatchDecoder:
    """Answers prompts with one model."""

    def __init__(
        self,
        model: Model,
        settings: DecodingOptions,
        budget_tokens: int | None,
        on_event: DecodingCallback,
        heartbeat: Callable[[], None],
        before_pass: BeforePass = lambda _: None,
    ) -> None:
        """Create a decoder for a model in evaluation mode.

        Args:
            budget_tokens: initial budget of padded tokens; None: forecast from free memory.
            on_event: receives `method` (how rows are decoded together), `batch` (current figures), `budget` (the
                budget changed) and `bound` (rounding errors are larger than assumed), each with its data.
            heartbeat: called before every pass, several times a second.
            before_pass: called with the padded tokens of each pass; its exceptions count as raised by the pass.
        """
        self.model, self.settings = model, settings
        self._on_event, self._heartbeat, self._before_pass = on_event, heartbeat, before_pass
        self._selector = ExactTokenSelector(model, settings, on_event, before_pass)
        self._counts = {"passes": 0, "answers": 0, "answer_tokens": 0}
        self._max_rows = settings.max_rows or (CPU_ROWS if model.device.type == "cpu" else GPU_ROWS)
        self._idle_bytes = capacity.allocated_bytes(model.device)
        self._budget = PaddedTokenBudget(
            budget_tokens or forecast_tokens(model, self._max_rows, settings.temperature > 0)
        )
        self._budget_after_first_failure: PaddedTokenBudget | None = None
        self._is_memory_limited = False
        self._context = get_context_length(model)
        self._method: BatchingMethod | None = None
        self._batch: DecodingBatch | None = None
        self._active: list[DecodingRow] = []
        self._waiting: list[DecodingRow] = []
        self._reading: list[DecodingRow] = []

    @property
    def figures(self) -> dict[str, int]:
        """Counts of passes, finished answers and their tokens, chosen tokens, tokens that plain passes rechecked, and
        recomputed mean log-probabilities."""
        return {**self._counts, **self._selector.figures}

    def generate(self, prompts: Iterator[DecodingRequest], stop: Callable[[], bool]) -> Iterator[DecodingResult]:
        """Yield each result when it is finished, in any order. Raises ValueError if a prompt is empty.

        Args:
            stop: called before every pass; once it returns True, nothing more is computed and unfinished rows are
                dropped.
        """
        drained = False
        while not stop():
            self._heartbeat()
            if not self._waiting and not drained:
                window = list(islice(prompts, self.settings.window))
                drained = len(window) < self.settings.window
                yield from self._enqueue(window)
            elif self._waiting or self._active:
                yield from self._run_pass()
            else:
                return

    def _enqueue(self, window: Sequence[DecodingRequest]) -> list[DecodingResult]:
        """Add prompts to the waiting rows; return results of prompts that fill the context."""
        rows, results = [], []
        for request in window:
            if not request.ids:
                raise ValueError(f"prompt {request.index} has no tokens")
            limit = self.settings.max_new_tokens
            if self._context is not None:
                limit = min(limit, self._context - len(request.ids))
            if limit < 1:
                results.append(DecodingResult(request.index, (), "context", 0.0))
            else:
                rows.append(DecodingRow(request, limit))
        prefix = find_shared_prefix([row.request.ids for row in rows])
        for row in rows:
            row.shared_prefix = prefix
        self._waiting = sorted([*self._waiting, *rows], key=longest_first_key)
        return results

    def _run_pass(self) -> list[DecodingResult]:
        """Run one pass and return the results that it finished; handle out-of-memory errors."""
        try:
            with torch.no_grad():
                method = self._method or self._probe_method()
                if self._batch is None:
                    self._batch = method.create_batch()
                self._reading = group = self._select_prompts(self._batch)
                if group:
                    rows, logits = group, self._batch.add([row.text() for row in group], group[0].shared_prefix)
                else:
                    rows, logits = self._active, self._batch.step([row.ids[-1] for row in self._active])
                chosen = self._selector.choose(rows, logits)
                finished = self._selector.find_finished(rows, chosen)
                self._waiting = self._waiting[len(group) :]
                self._active = [*self._active, *group]
                results = self._commit(self._batch, len(self._active) - len(rows), chosen, finished)
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
        else:
            self._set_budget(self._budget.after_success(self._is_memory_limited))
            self._budget_after_first_failure = None
            self._report()
            return results
        return self._handle_out_of_memory()

    def _probe_method(self) -> BatchingMethod:
        """Choose the method by a probe with the longest and shortest waiting prompts, or with less text if needed."""
        longest = None if self._context is None else max(1, self._context - PROBE_TOKENS)
        long, short = (self._waiting[i].request.ids[:longest] for i in (0, -1))
        prefix = self._waiting[0].shared_prefix
        if len(long) == len(short) and len(short) - len(prefix) > 1:
            short = short[:-1]
        small = short[:FALLBACK_PROBE_TOKENS]
        for prompts in ((long, short), (short, short[: len(prefix) + 1])):
            try:
                return self._choose_method(prompts, prefix[: min(map(len, prompts)) - 1])
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
            oom.release_memory()
        return self._choose_method((small, small[:2]), ())

    def _choose_method(self, prompts: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> BatchingMethod:
        self._method = choose_batching_method(
            self.model, prompts, prefix, self.settings.pad_token_id, self._before_pass
        )
        self._selector.set_method(self._method)
        return self._method

    def _select_prompts(self, batch: DecodingBatch) -> list[DecodingRow]:
        """Select as many prompts as fit, if these are worth a pass (MIN_JOIN_SHARE); record if memory is the limit."""
        self._is_memory_limited = False
        if self._active and not batch.supports_joining:
            return []
        active, answers = len(self._active), self._counts["answers"]
        new_tokens = self.settings.max_new_tokens
        if answers >= KNOWN_ANSWERS:
            new_tokens = 1 + int(EXPECTED_LENGTH_FACTOR * self._counts["answer_tokens"] / answers)
        longest = max((row.expected_length(new_tokens) for row in self._active), default=0)
        group: list[DecodingRow] = []
        for row in self._waiting[: self._max_rows - active]:
            longest = max(longest, row.expected_length(new_tokens))
            first = group[0] if group else row
            can_join = row.shared_prefix == first.shared_prefix and (
                batch.supports_joining or row.tokens == first.tokens
            )
            fits = (active + len(group) + 1) * longest <= self._budget.tokens or not (active or group)
            self._is_memory_limited = not fits
            if not can_join or not fits or (group and (len(group) + 1) * first.tokens > READ_TOKENS):
                break
            group.append(row)
        is_worthwhile = len(group) >= MIN_JOIN_SHARE * (active + len(group)) or len(group) == len(self._waiting)
        return group if is_worthwhile else []

    def _commit(
        self, batch: DecodingBatch, first: int, chosen: TokenChoices, finished: dict[int, DecodingResult]
    ) -> list[DecodingResult]:
        """Append the chosen tokens to the active rows from index `first`, and remove finished rows."""
        is_cache_invalid = False
        for i, row in enumerate(self._active[first:]):
            is_cache_invalid |= i in finished and (row.has_nonfinite_logits or not chosen.is_finite[i])
            row.append(chosen.tokens[i], chosen.nats[i], chosen.scales[i])
        self._counts["answers"] += len(finished)
        self._counts["answer_tokens"] += sum(len(result.ids) for result in finished.values())
        if finished:
            remaining = [i for i in range(len(self._active)) if i - first not in finished]
            self._active = [self._active[i] for i in batch.keep(remaining)]
        if is_cache_invalid:  # cached NaN would spread to the next row in its place, in spite of the mask
            self._requeue_rows()
        elif not self._active:
            self._batch = None
        return list(finished.values())

    def make_room(self) -> None:
        """Free memory for another use: active rows wait again with their tokens, and batches become smaller.

        Call it between two results; it does not change answers.
        """
        if self._active:
            failed_tokens = len(self._active) * max(row.tokens + 1 for row in self._active)
            self._set_budget(self._budget.shrunk(failed_tokens, repeated=False))
        self._requeue_rows()
        oom.release_memory()

    def _requeue_rows(self) -> None:
        """Move active rows, with their tokens, back to the waiting rows."""
        self._waiting = sorted([*self._waiting, *self._active], key=longest_first_key)
        self._active, self._reading, self._batch = [], [], None

    def _handle_out_of_memory(self) -> list[DecodingResult]:
        """Reduce the budget and queue the same rows again; give up a row that does not fit even alone."""
        pending = [*self._active, *self._reading] or self._waiting[:1]
        failed_tokens = len(pending) * max(row.tokens + 1 for row in pending)
        self._requeue_rows()
        oom.release_memory()
        if len(pending) == 1:
            self._waiting.remove(pending[0])
            self._set_budget(self._budget_after_first_failure or self._budget)
            self._budget_after_first_failure = None
            return [DecodingResult(pending[0].request.index, (), "memory", 0.0)]
        smaller = self._budget.shrunk(failed_tokens, self._budget_after_first_failure is not None)
        self._budget_after_first_failure = self._budget_after_first_failure or smaller
        self._set_budget(smaller)
        return []

    def _set_budget(self, budget: PaddedTokenBudget) -> None:
        """Set the budget and report a change."""
        if budget.tokens != self._budget.tokens:
            action = "grow" if budget.tokens > self._budget.tokens else "shrink"
            self._on_event("budget", {"action": action, "tokens": budget.tokens, "failed_tokens": budget.failed_tokens})
        self._budget = budget

    def _report(self) -> None:
        self._counts["passes"] += 1
        if self._counts["passes"] % REPORT_EVERY_PASSES == 1:
            event: dict[str, Any] = {"rows": len(self._active), "tokens": self._batch.tokens() if self._batch else 0}
            event |= {"waiting": len(self._waiting), "budget_tokens": self._budget.tokens}
            memory = capacity.measure_device(self.model.device)
            event |= {"available_bytes": memory.available_bytes, "device_bytes": memory.total_bytes}
            event["held_bytes"] = capacity.allocated_bytes(self.model.device)
            batch_bytes = decoding_bytes(self.model, event["rows"], event["tokens"], self.settings.temperature > 0)
            event["forecast_bytes"] = self._idle_bytes + batch_bytes
            self._on_event("batch", {**event, **self.figures})

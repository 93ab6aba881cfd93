"""What is taken from a batch, and what the row's own plain pass decides: the rule that makes answers exact."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    Finish,
    compute_reference_logits,
    find_shared_prefix,
    get_context_length,
    longest_first_key,
)
from ratchet.models.decoding.batching_probe import (
    MORE_TOKENS,
    BatchingMethod,
    choose_batching_method,
    relative_logit_difference,
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
from ratchet.models.memory import capacity, parameters

Told = Callable[[str, dict[str, Any]], None]


class ExactTokenSelector:
    """Settles tokens and mean log-probabilities of rows; `figures` counts what was chosen, and what was in doubt."""

    def __init__(self, model: Model, settings: DecodingOptions, told: Told, before_pass: BeforePass) -> None:
        self.figures = {"chosen": 0, "doubted": 0, "means_anew": 0}
        self._model, self._settings, self._told, self._before = model, settings, told, before_pass
        self._chooser = TokenSampler(settings.temperature, settings.top_p)
        self._eps = coarsest_epsilon(model)
        self._units = default_error_units(self._eps)
        self._alone = False

    def learn(self, way: BatchingMethod) -> None:
        """How far the model was off when it was tried out."""
        self._alone = way.name == "alone"
        self._units = max(self._units, MARGIN * way.seen)
        self._told("way", {"way": way.name, "seen_units": way.seen, "bound_units": 0.0 if self._alone else self._units})

    def choose(self, rows: Sequence[DecodingRow], logits: Tensor) -> TokenChoices:
        """A token for each row; by its plain pass, where it is in doubt.

        Args:
            logits: [rows, vocabulary].
        """
        draws = [(row.asked.stream, len(row.ids)) for row in rows]
        chosen = self._chooser.choose(logits, draws, self._bound if self._settings.exact else 0.0)
        self.figures["chosen"] += len(rows)
        for i, row in enumerate(rows):
            if chosen.sure[i]:
                continue
            self.figures["doubted"] += 1
            self._before(row.tokens)
            own = compute_reference_logits(self._model, row.text())
            one = self._chooser.choose(own, draws[i : i + 1], 0.0)
            row.spoilt |= not chosen.finite[i]
            if chosen.finite[i] and one.finite[0]:
                self._seen(relative_logit_difference(logits[i], own[0]) / self._eps)
            for name in ("tokens", "nats", "finite", "scales"):
                getattr(chosen, name)[i] = getattr(one, name)[0]
        return chosen

    def ended(self, rows: Sequence[DecodingRow], chosen: TokenChoices) -> dict[int, DecodingResult]:
        """Of the rows that end with what was chosen, by index. Rows stay as they are: a pass may yet fail."""
        found = {}
        for i, row in enumerate(rows):
            finish: Finish | None = None
            ids, nats = [*row.ids, chosen.tokens[i]], row.nats + chosen.nats[i]
            if not chosen.finite[i]:
                finish, ids, nats = "invalid", row.ids, row.nats
            elif chosen.tokens[i] in self._settings.ends:
                finish = "stop"
            elif len(ids) == row.limit:
                finish = "length" if row.limit == self._settings.max_new_tokens else "context"
            if finish is not None:
                scale = max(row.scale, chosen.scales[i])
                found[i] = DecodingResult(row.asked.place, tuple(ids), finish, self._mean(row, ids, nats, scale))
        return found

    @property
    def _bound(self) -> float:
        """What a logit may be off, relative to its row's greatest."""
        return 0.0 if self._alone else self._units * self._eps

    def _seen(self, seen_units: float) -> None:
        """Plain logits were compared with a batch's: where they differ by more than half of the bound, it is raised."""
        if 2 * seen_units > self._units:
            self._told("bound", {"seen_units": seen_units, "bound_units": self._units})
            self._units = MARGIN * seen_units

    def _mean(self, row: DecodingRow, ids: Sequence[int], nats: float, scale: float) -> float:
        """Mean log-probability, rounded; by one plain pass over the whole text, where rounding is in doubt."""
        if not ids:
            return 0.0
        bound = self._units * self._eps  # where tokens were read alone, too: one pass over them all sums otherwise
        if self._settings.exact and not is_rounding_certain(nats / len(ids), len(ids), bound * scale):
            self.figures["means_anew"] += 1
            whole = [*row.asked.ids, *ids]
            self._before(len(whole) - 1)
            text = torch.tensor([whole], device=self._model.device)
            first, last = len(row.asked.ids) - 1, len(whole) - 1
            nats = -float(
                ForwardPass(self._model, text[:, :-1], (first, last)).nll(text[:, first + 1 :]).double().sum()
            )
        return round(nats / len(ids), DECIMALS) + 0.0


# How many tokens are decoded at once: forecast from free memory; less where that was too much, else more.

SHRINK = 0.8
"""Of what did not fit, at the first failure; each further one before a pass that fits halves."""
GROW = 1.25
GROW_AFTER_PASSES = 50
"""Passes that fitted before more is tried; doubled each time that more did not fit."""
LONGEST_WAIT_PASSES = 10_000
SHARE = 0.5
"""Of free memory that rows may take by forecast: others use it too, and blocks are never packed without gaps."""
READ_TOKENS = 8192
"""Padded tokens of prompts that are read in one pass; a single longer prompt is read whole."""


@dataclass(frozen=True)
class PaddedTokenBudget:
    """Padded tokens (rows x columns) that may be held at once; a single row is decoded whatever its length."""

    tokens: int
    failed_tokens: int = 0
    """What did not fit when the budget was last made smaller; 0: nothing yet."""
    good_passes: int = 0
    wait_passes: int = GROW_AFTER_PASSES
    grown: bool = False
    """Whether the last change made it larger: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "PaddedTokenBudget":
        """After `failed_tokens` did not fit; `repeated`: no pass has fitted since the failure before."""
        before = min(self.tokens, failed_tokens)
        tokens = before // 2 if repeated else min(before, int(SHRINK * failed_tokens))
        wait = min(LONGEST_WAIT_PASSES, 2 * self.wait_passes) if self.grown else self.wait_passes
        return PaddedTokenBudget(max(1, tokens), failed_tokens, wait_passes=wait)

    def after_good_pass(self, limits: bool) -> "PaddedTokenBudget":
        """After a pass that fitted; `limits`: prompts wait because of the budget. What failed is tried again: the want
        may have been another process's."""
        good = self.good_passes + limits
        if good < self.wait_passes:
            return replace(self, good_passes=good)
        return replace(self, tokens=max(self.tokens + 1, int(GROW * self.tokens)), good_passes=0, grown=True)


def forecast_tokens(model: Model, rows: int, drawn: bool) -> int:
    """Padded tokens that should fit: keys and values, logits of `rows` rows with what choosing takes, and one pass over
    prompts, in a share of the memory that is free beside the weights; at least 1."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    weights = sum(tensor.nbytes for tensor in parameters.list_unique_tensors(model))
    room = SHARE * (capacity.measure_device(model.device).available_bytes - weights)
    room -= decoding_bytes(model, rows, 0, drawn) + READ_TOKENS * _prefill_bytes_per_token(config)
    return max(1, int(room // kv_cache_bytes_per_token(model, config)))


def decoding_bytes(model: Model, rows: int, tokens: int, drawn: bool) -> int:
    """What so many rows with so many padded tokens take: keys and values, logits with what choosing takes."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    return rows * int(config.vocab_size) * (40 if drawn else 12) + tokens * kv_cache_bytes_per_token(model, config)


def kv_cache_bytes_per_token(model: Model, config: Any) -> int:
    """Keys and values of one token in all layers, and half as much again: buffers are larger than what is in them."""
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    key_heads = _largest_setting(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or -(-hidden // heads))
    types = [tensor.element_size() for tensor in model.parameters() if tensor.is_floating_point()]
    return 3 * layers * key_heads * head * int(max(types, default=torch.float32.itemsize))


def _prefill_bytes_per_token(config: Any) -> int:
    """Of one token in the widest layer, in float32."""
    hidden = int(config.hidden_size)
    return 4 * (8 * hidden + 3 * _largest_setting(getattr(config, "intermediate_size", None) or 4 * hidden))


def _largest_setting(found: Any) -> int:
    """Some models say it layer by layer."""
    return int(max(found) if isinstance(found, list | tuple) else found)


# Answers to many prompts: rows are decoded together, and each is answered as if it were alone.
#
# Prompts are pulled in windows and read longest first; where rows end, others take their places. What an answer is, is
# settled by plain passes (one row, no filling, no cache, the whole text): a token is taken from a batch only if its
# lead
# is beyond what rounding can do, a mean log-probability only if it is rounded one way; otherwise the plain pass
# decides.
# So neither the batch nor a restart nor memory that ran out changes a byte of an answer (docs/generation.md).

__all__ = ["BatchDecoder", "DecodingOptions", "DecodingRequest", "DecodingResult", "Finish"]

CPU_ROWS, GPU_ROWS = 64, 256
"""Rows that are decoded at once at most, if the settings do not say."""
FREE_SHARE = 0.25
"""Of the places, which prompts that could take them wait for: reading few costs a pass like reading many."""
TOLD_EVERY = 32
"""Passes from one telling of the batch to the next."""
EXPECTED = 2.0
"""Tokens that a row is expected to get at most, in mean answers so far."""
KNOWN_ANSWERS = 16
"""Before so many have ended, each is expected to get all it may."""
TRIAL_TOKENS = 8
"""Of a prompt with which the model is tried out when memory does not suffice for whole ones."""


class BatchDecoder:
    """Answers prompts with one model. `figures` holds counts of what was done so far."""

    def __init__(
        self, model: Model, settings: DecodingOptions, budget_tokens: int | None, told: Told, beat: Callable[[], None],
        before_pass: BeforePass = lambda _: None,
    ) -> None:  # fmt: skip
        """Takes the model as it is, in evaluation mode.

        Args:
            budget_tokens: padded tokens held at once to begin with; None: forecast from free memory.
            told: hears `way` (how rows are decoded together), `batch` (live figures), `budget` (it changed), `bound`
                (rounding was found to be larger than thought), each with its figures.
            beat: called in every turn, some times a second: work goes on.
            before_pass: called with the padded tokens of each pass; what it raises counts as raised by the pass.
        """
        self.model, self.settings = model, settings
        self._told, self._beat, self._before = told, beat, before_pass
        self._settler = ExactTokenSelector(model, settings, told, before_pass)
        self._counts = {"passes": 0, "answers": 0, "answer_tokens": 0}
        self._most_rows = settings.rows or (CPU_ROWS if model.device.type == "cpu" else GPU_ROWS)
        self._idle_bytes = capacity.allocated_bytes(model.device)
        self._budget = PaddedTokenBudget(
            budget_tokens or forecast_tokens(model, self._most_rows, settings.temperature > 0)
        )
        self._before_failures: PaddedTokenBudget | None = None
        self._limited = False
        self._context = get_context_length(model)
        self._way: BatchingMethod | None = None
        self._rows: DecodingBatch | None = None
        self._active: list[DecodingRow] = []
        self._waiting: list[DecodingRow] = []
        self._reading: list[DecodingRow] = []

    @property
    def figures(self) -> dict[str, int]:
        """Passes; answers that are finished and their tokens; tokens chosen, and of those, decided by plain passes
        (`doubted`); means of log-probabilities computed anew."""
        return {**self._counts, **self._settler.figures}

    def answers(self, prompts: Iterator[DecodingRequest], stop: Callable[[], bool]) -> Iterator[DecodingResult]:
        """Answers as they are finished, in any order.

        Args:
            stop: asked in every turn; once it says so, nothing more is computed, and what is under way is dropped.

        Raises:
            ValueError: an empty prompt.
        """
        drained = False
        while not stop():
            self._beat()
            if not self._waiting and not drained:
                window = list(islice(prompts, self.settings.window))
                drained = len(window) < self.settings.window
                yield from self._take(window)
            elif self._waiting or self._active:
                yield from self._turn()
            else:
                return

    def _take(self, window: Sequence[DecodingRequest]) -> list[DecodingResult]:
        """Prompts wait from now on, but for those that fill the context."""
        rows, full = [], []
        for asked in window:
            if not asked.ids:
                raise ValueError(f"prompt {asked.place} has no tokens")
            limit = self.settings.max_new_tokens
            if self._context is not None:
                limit = min(limit, self._context - len(asked.ids))
            if limit < 1:
                full.append(DecodingResult(asked.place, (), "context", 0.0))
            else:
                rows.append(DecodingRow(asked, limit))
        shared = find_shared_prefix([row.asked.ids for row in rows])
        for row in rows:
            row.header = shared
        self._waiting = sorted([*self._waiting, *rows], key=longest_first_key)
        return full

    def _turn(self) -> list[DecodingResult]:
        """One pass, and what ended with it; or what follows from memory that ran out."""
        try:
            with torch.no_grad():
                way = self._way or self._tried()
                if self._rows is None:
                    self._rows = way.make()
                self._reading = self._next(self._rows)
                found = self._read(self._rows) if self._reading else self._step(self._rows)
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
        else:
            self._set(self._budget.after_good_pass(self._limited))
            self._before_failures = None
            self._tell()
            return found
        return self._make_smaller()

    def _tried(self) -> BatchingMethod:
        """The way in which this model decodes rows together, found on the longest prompt and another; on less where
        memory does not suffice."""
        most = None if self._context is None else max(1, self._context - MORE_TOKENS)
        long, short = (self._waiting[i].asked.ids[:most] for i in (0, -1))
        shared = self._waiting[0].header
        if len(long) == len(short) and len(short) - len(shared) > 1:
            short = short[:-1]
        small = short[:TRIAL_TOKENS]
        for prompts in ((long, short), (short, short[: len(shared) + 1])):
            try:
                return self._learn(prompts, shared[: min(map(len, prompts)) - 1])
            except Exception as error:
                if not oom.is_out_of_memory(error):
                    raise
            oom.release_memory()
        return self._learn((small, small[:2]), ())

    def _learn(self, prompts: Sequence[Sequence[int]], shared: tuple[int, ...]) -> BatchingMethod:
        self._way = choose_batching_method(self.model, prompts, shared, self.settings.pad, self._before)
        self._settler.learn(self._way)
        return self._way

    def _next(self, rows: DecodingBatch) -> list[DecodingRow]:
        """Prompts to be read now: as many as have room, if worth a pass. Notes whether room was what lacked."""
        self._limited = False
        if self._active and not rows.joins:
            return []
        expected, held = self._expected(), len(self._active)
        longest = max((row.after(expected) for row in self._active), default=0)
        group: list[DecodingRow] = []
        for row in self._waiting[: self._most_rows - held]:
            longest = max(longest, row.after(expected))
            first = group[0] if group else row
            together = row.header == first.header and (rows.joins or row.tokens == first.tokens)
            fits = (held + len(group) + 1) * longest <= self._budget.tokens or not (held or group)
            self._limited = not fits
            if not together or not fits or (group and (len(group) + 1) * first.tokens > READ_TOKENS):
                break
            group.append(row)
        worth = len(group) >= FREE_SHARE * (held + len(group)) or len(group) == len(self._waiting)
        return group if worth else []

    def _expected(self) -> int:
        """Tokens that a row gets from now on, at most as far as is known."""
        if self._counts["answers"] < KNOWN_ANSWERS:
            return self.settings.max_new_tokens
        return 1 + int(EXPECTED * self._counts["answer_tokens"] / self._counts["answers"])

    def _read(self, rows: DecodingBatch) -> list[DecodingResult]:
        group = self._reading
        logits = rows.add([row.text() for row in group], group[0].header)
        chosen = self._settler.choose(group, logits)
        ended = self._settler.ended(group, chosen)
        self._waiting = self._waiting[len(group) :]
        self._active += group
        return self._commit(rows, len(self._active) - len(group), chosen, ended)

    def _step(self, rows: DecodingBatch) -> list[DecodingResult]:
        logits = rows.step([row.ids[-1] for row in self._active])
        chosen = self._settler.choose(self._active, logits)
        return self._commit(rows, 0, chosen, self._settler.ended(self._active, chosen))

    def _commit(
        self, rows: DecodingBatch, first: int, chosen: TokenChoices, ended: dict[int, DecodingResult]
    ) -> list[DecodingResult]:
        """Rows from `first` on take what was chosen for them; those that ended leave."""
        spoilt = False
        for i, row in enumerate(self._active[first:]):
            spoilt |= i in ended and (row.spoilt or not chosen.finite[i])
            row.take(chosen.tokens[i], chosen.nats[i], chosen.scales[i])
        self._counts["answers"] += len(ended)
        self._counts["answer_tokens"] += sum(len(one.ids) for one in ended.values())
        if ended:
            kept = [i for i in range(len(self._active)) if i - first not in ended]
            self._active = [self._active[i] for i in rows.keep(kept)]
        if spoilt:  # NaN in a place that others take would be theirs: masked, it is NaN still
            self._begin_anew()
        elif not self._active:
            self._rows = None
        return list(ended.values())

    def make_room(self) -> None:
        """Something beside this does not fit into memory: rows under way wait again, with the tokens they have, and
        batches are smaller from now on. To be called between two answers; it changes none."""
        if self._active:
            failed_tokens = len(self._active) * max(row.tokens + 1 for row in self._active)
            self._set(self._budget.shrunk(failed_tokens, repeated=False))
        self._begin_anew()
        oom.release_memory()

    def _begin_anew(self) -> None:
        """Rows under way wait again, with the tokens they have."""
        self._waiting = sorted([*self._waiting, *self._active], key=longest_first_key)
        self._active, self._reading, self._rows = [], [], None

    def _make_smaller(self) -> list[DecodingResult]:
        """Memory ran out: a smaller budget, and the same rows again; a row that was alone is given up."""
        under_way = [*self._active, *self._reading] or self._waiting[:1]
        failed_tokens = len(under_way) * max(row.tokens + 1 for row in under_way)
        self._begin_anew()
        oom.release_memory()
        if len(under_way) == 1:
            self._waiting.remove(under_way[0])
            self._set(self._before_failures or self._budget)
            self._before_failures = None
            return [DecodingResult(under_way[0].asked.place, (), "memory", 0.0)]
        smaller = self._budget.shrunk(failed_tokens, self._before_failures is not None)
        self._before_failures = self._before_failures or smaller
        self._set(smaller)
        return []

    def _set(self, budget: PaddedTokenBudget) -> None:
        """Tell if it changed."""
        if budget.tokens != self._budget.tokens:
            action = "grow" if budget.tokens > self._budget.tokens else "shrink"
            self._told("budget", {"action": action, "tokens": budget.tokens, "failed_tokens": budget.failed_tokens})
        self._budget = budget

    def _tell(self) -> None:
        self._counts["passes"] += 1
        if self._counts["passes"] % TOLD_EVERY == 1:
            held: dict[str, Any] = {"rows": len(self._active), "tokens": self._rows.tokens() if self._rows else 0}
            held |= {"waiting": len(self._waiting), "budget_tokens": self._budget.tokens}
            found = capacity.measure_device(self.model.device)
            held |= {"available_bytes": found.available_bytes, "device_bytes": found.total_bytes}
            held["held_bytes"] = capacity.allocated_bytes(self.model.device)
            rows = decoding_bytes(self.model, held["rows"], held["tokens"], self.settings.temperature > 0)
            held["forecast_bytes"] = self._idle_bytes + rows
            self._told("batch", {**held, **self.figures})

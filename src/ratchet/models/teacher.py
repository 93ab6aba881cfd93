"""Validates and loads the teacher of a distillation, and computes its probabilities at every trained position."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.config.train import DistillSettings, Train
from ratchet.config.units import format_bytes
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import DataError, SettingsError
from ratchet.models import base_model, loading, model_spec, vocabulary
from ratchet.models.chunked_loss import DeferredHeadPass, SelectedPositionsPass
from ratchet.models.device import Model
from ratchet.models.loss import FULL_TENSORS, TOP_K_TENSORS, SequenceBatch, StoredTeacherTargets
from ratchet.models.memory import capacity
from ratchet.models.model_spec import ModelSpec
from ratchet.models.teacher_reference import KEY

MIN_LOG_PROBABILITY = -1e4
"""Smallest log-probability of a teacher. It must not be -inf, because the reverse direction contains log(q / p)."""
_BYTES_PER_WEIGHT = {"nf4": 0.53, "fp4": 0.53}
"""Bytes of a 4-bit weight with its constants; other weights have the size of their dtype."""


@dataclass(frozen=True)
class TeacherCandidate:
    """A validated teacher without loaded weights."""

    path: Path
    spec: ModelSpec
    tokens: int
    """Number of token ids, which teacher and base share; further rows of the embedding are padding."""
    rows: int

    def weight_bytes(self, settings: DistillSettings, dtype: torch.dtype) -> int:
        """Estimate the memory of the weights."""
        return int(self.spec.parameters * _BYTES_PER_WEIGHT.get(settings.quantization, dtype.itemsize))

    def require_memory(self, settings: Train, device: torch.device) -> None:
        """Raise SettingsError if the weights alone need more memory than is available."""
        needed = self.weight_bytes(settings.distill, loading.pick_dtype(settings.compute_dtype, device))
        if needed > (available := capacity.measure_device(device).available_bytes):
            raise SettingsError(
                f"{KEY}: its weights need about {format_bytes(needed)}, but {format_bytes(available)} are available; "
                "set train.distill.quantization: nf4, run `ratchet distill` on a larger machine, or use a smaller "
                "teacher"
            )

    def base_rows(self, base: ModelSpec) -> int:
        """Return the rows of the base's embedding, including rows for its added tokens."""
        return max(base.embedding_rows, self.tokens)

    def describe_padding(self, base: ModelSpec) -> str | None:
        """Describe the padding if the embeddings of teacher and base differ in size; None otherwise."""
        return describe_embedding_padding(self.rows, self.base_rows(base), self.tokens)

    def require_length(self, rows: TokenRows) -> None:
        """Raise DataError if a row is longer than the teacher's context."""
        max_tokens = self.spec.context_length
        if max_tokens and len(rows) and int(rows.lengths.max()) > max_tokens:
            raise DataError(
                f"{KEY}: training row {int(rows.lengths.argmax())} has {int(rows.lengths.max())} tokens, but the "
                f"teacher reads at most {max_tokens}; set prepare.max_tokens: {max_tokens}, or use another teacher"
            )


@dataclass(frozen=True)
class TeacherPredictions:
    """The teacher's outputs at the trained positions of some rows, in the order of the rows."""

    tokens: Tensor
    """int32 [positions, k], most probable first, on the CPU."""
    log_probabilities: Tensor
    """Log-probabilities at the temperature, float16 [positions, k + 1].

    The first k are those of `tokens`, the last is that of all other tokens together.
    """
    loss: float
    """Sum over positions of the negative log-likelihood of the rows' tokens, in nats, at temperature 1."""
    left_out: float
    """Sum over positions of the probability of all tokens that are not in `tokens`, at the temperature."""


def inspect_teacher(path: Path, setting: str, tokenizer: Any, settings: DistillSettings) -> TeacherCandidate:
    """Validate a teacher without loading its weights.

    Args:
        setting: value of train.distill.teacher, for messages.
        tokenizer: tokenizer of the base, with its added tokens.

    Raises:
        BaseModelError: the directory contains no model, or cannot be read.
        SettingsError: the teacher's tokens differ from the base's, or are not more than top_k.
    """
    base_model.list_model_files(path)
    spec = model_spec.load(path)
    spec.require_causal()
    required_rows = vocabulary.required_rows(tokenizer)
    _require_same_vocabulary(tokenizer.get_vocab(), base_model.open_tokenizer(path).get_vocab(), setting)
    rows = spec.embedding_rows
    if rows < required_rows:
        raise SettingsError(
            f"{KEY}: {setting}: its tokenizer has ids up to {required_rows - 1}, but the model has only {rows} "
            "embedding rows; use the model that belongs to this tokenizer"
        )
    if settings.top_k is not None and settings.top_k >= required_rows:
        raise SettingsError(f"train.distill.top_k: {settings.top_k}: expected less than the {required_rows} tokens")
    return TeacherCandidate(path, spec, required_rows, rows)


def _require_same_vocabulary(base: Mapping[str, int], teacher: Mapping[str, int], setting: str) -> None:
    """Raise SettingsError unless both tokenizers give the same ids to the same tokens."""
    if base == teacher:
        return
    different = sorted((id_, token) for token, id_ in base.items() if teacher.get(token) != id_)
    additional = sorted((id_, token) for token, id_ in teacher.items() if token not in base)
    if different:
        id_, token = different[0]
        teacher_id = f"{teacher[token]} in the teacher" if token in teacher else "not in the teacher"
        difference = (
            f"{len(different)} of the base's {len(base):,} tokens differ, such as {token!r}: id {id_} in the base, "
            f"{teacher_id}"
        )
    else:
        difference = f"it has {len(additional)} tokens that the base lacks, such as {additional[0][1]!r}"
    raise SettingsError(
        f"{KEY}: {setting} has another tokenizer, so its probabilities do not apply to the base's tokens: "
        f"{difference}. Use a teacher with the base's tokenizer (its embedding may be padded), or generate answers "
        "with this teacher and train on them: `ratchet generate`"
    )


def describe_embedding_padding(teacher_rows: int, base_rows: int, tokens: int) -> str | None:
    """Describe the padding of two embeddings for the same tokens; None if both have the same number of rows."""
    if teacher_rows == base_rows:
        return None
    return (
        f"embeddings have {teacher_rows:,} rows (teacher) and {base_rows:,} (base) for the same {tokens:,} tokens: the "
        "other rows are padding and are ignored"
    )


def derive_teacher_settings(settings: Train) -> Train:
    """Return the settings with which a teacher is loaded: its own quantization, and the training's compute dtype."""
    return Train(quantization=settings.distill.quantization, compute_dtype=settings.compute_dtype)


def take_top_k(logits: Tensor, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens [positions, k], and the log-probabilities of these and of the rest.

    The log-probabilities are [positions, k + 1]; the last is that of all other tokens together.

    Args:
        logits: [positions, tokens] in float32.
    """
    log_probabilities = functional.log_softmax(logits / temperature, dim=1)
    top = log_probabilities.topk(k, dim=1)
    rest = log_probabilities.scatter_(1, top.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    return top.indices, torch.cat([top.values, rest], dim=1).clamp_(min=MIN_LOG_PROBABILITY)


def _first_nonfinite_position(values: Tensor) -> int | None:
    """Return the first index of `values` [positions, ...] with a number that is not finite; None if all are finite."""
    if math.isfinite(float(values.sum())):
        return None
    return int((~torch.isfinite(values)).any(dim=1).nonzero()[0])


def _nonfinite_output_error(row: int, path: Path) -> DataError:
    """Build the error for a teacher whose output for a training row is NaN."""
    return DataError(
        f"{KEY}: {path}: the output for training row {row} is not finite; set train.compute_dtype: float32, or use "
        "another teacher"
    )


class TeacherModel:
    """A teacher with loaded weights."""

    def __init__(self, candidate: TeacherCandidate, settings: Train, device: torch.device) -> None:
        """Load the model.

        Raises:
            SettingsError: the device or the model does not support the settings.
            BaseModelError: the teacher's files are damaged.
        """
        self.candidate, self.settings, self.device = candidate, settings.distill, device
        self.dtype = loading.pick_dtype(settings.compute_dtype, device)
        try:
            self.model: Model = loading.load(candidate.path, None, derive_teacher_settings(settings), device)
        except SettingsError as error:
            text = str(error).replace("train.quantization", "train.distill.quantization").replace(" (plain LoRA)", "")
            raise SettingsError(f"{KEY}: {text}") from None

    def predict(self, rows: TokenRows, row_indices: Sequence[int]) -> TeacherPredictions:
        """Compute the outputs for these rows in one batch. Raises DataError if an output is NaN."""
        batch = SequenceBatch.from_sequences(rows, [[row] for row in row_indices], self.device)
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        targets = targets[positions]
        k = self.settings.top_k or 0  # top_k is always set for stored outputs
        tokens, values = [torch.empty((0, k), dtype=torch.int32)], [torch.empty((0, k + 1), dtype=torch.float16)]
        if not len(positions):
            return TeacherPredictions(tokens[0], values[0], 0.0, 0.0)
        loss = left_out = 0.0
        with torch.no_grad():
            for start, all_logits in SelectedPositionsPass(self.model, batch.input_ids, positions, {}).pieces():
                logits = all_logits[0, :, : self.candidate.tokens].float()  # without padding
                piece = slice(start, start + len(logits))
                piece_targets = targets[piece].unsqueeze(1)
                loss += float(
                    (logits.logsumexp(dim=1) - logits.gather(1, piece_targets)[:, 0]).sum(dtype=torch.float64)
                )
                top_tokens, log_probabilities = take_top_k(logits, self.settings.temperature, k)
                if (invalid := _first_nonfinite_position(log_probabilities)) is not None:
                    row = row_indices[int(positions[piece][invalid]) // batch.input_ids.shape[1]]
                    raise _nonfinite_output_error(row, self.candidate.path)
                left_out += float(log_probabilities[:, -1].exp().sum(dtype=torch.float64))
                tokens.append(top_tokens.to(torch.int32).cpu())
                values.append(log_probabilities.to(torch.float16).cpu())
        return TeacherPredictions(torch.cat(tokens), torch.cat(values), loss, left_out)


# A teacher that is evaluated during training.
#
# The teacher's body runs once, before the student's, and its hidden states at trained positions are kept. The teacher's
# head then runs on the same chunks of positions as the student's (chunked_loss.py), so that the logits of all positions
# never exist at once, either of the teacher or of the student.
#
# The teacher is frozen, in evaluation mode, and uses no cache, so its outputs do not depend on earlier computations.
# Only the last bits of a row's outputs depend on the other rows of the micro-batch, as for the student.


@dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that evaluates each micro-batch."""

    model: Model
    tokens: int
    """Number of token ids shared with the student; further rows of the embedding are padding."""
    settings: DistillSettings
    path: Path

    def compute_targets(self, batch: SequenceBatch, row_of: Callable[[int], int]) -> "OnlineTeacherTargets":
        """Compute the distillation targets of the student's micro-batch.

        `row_of` returns the training row of a trained position, given the position's index in the micro-batch.
        """
        return OnlineTeacherTargets(self, batch, row_of)


class OnlineTeacherTargets:
    """The teacher's outputs at the trained positions of one micro-batch; see `TeacherTargets`."""

    def __init__(self, teacher: OnlineTeacher, batch: SequenceBatch, row_of: Callable[[int], int]) -> None:
        self._teacher, self._row_of = teacher, row_of
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
        trained_positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        forward_kwargs = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        self._empty_logits = torch.empty((0, teacher.tokens), device=batch.labels.device)
        self._pass = None
        if len(trained_positions):
            with torch.no_grad():
                self._pass = DeferredHeadPass(teacher.model, batch.input_ids, trained_positions, forward_kwargs)

    @property
    def distributions(self) -> int:
        """See `TeacherTargets`."""
        return FULL_TENSORS if self._teacher.settings.top_k is None else TOP_K_TENSORS

    def select(self, positions: slice) -> StoredTeacherTargets:
        """Compute the targets of a range of trained positions. Raises DataError if an output is NaN."""
        settings, first = self._teacher.settings, int(positions.start)
        with torch.no_grad():
            logits = self._empty_logits
            if self._pass is not None:
                logits = self._pass.compute_logits(first, int(positions.stop))[:, : self._teacher.tokens].float()
            tokens = None
            if settings.top_k is None:
                log_probabilities = functional.log_softmax(logits / settings.temperature, dim=1).clamp_(
                    min=MIN_LOG_PROBABILITY
                )
            else:
                tokens, log_probabilities = take_top_k(logits, settings.temperature, settings.top_k)
            if (invalid := _first_nonfinite_position(log_probabilities)) is not None:
                raise _nonfinite_output_error(self._row_of(first + invalid), self._teacher.path)
        return StoredTeacherTargets(
            tokens, log_probabilities, settings.weight, settings.temperature, settings.direction
        )

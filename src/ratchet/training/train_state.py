"""State of a training after a step: everything that later steps depend on, in addition to weights and optimizer."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ratchet.training.microbatch_budget import MicrobatchBudget


@dataclass(frozen=True)
class TrainState:
    """Counters and histories after `step` optimizer steps: plain numbers, which a checkpoint stores as JSON."""

    step: int = 0
    validation_loss: dict[int, float] = field(default_factory=dict)
    """Validation loss by step, in nats per answer token."""
    token_accuracy: dict[int, float] = field(default_factory=dict)
    """Share of the validation's answer tokens that were the most likely ones, by step, if early stopping needs it."""
    best_step: int = 0
    bad_validations: int = 0
    """Number of validations in a row in which no metric of `early_stopping` improved."""
    train_loss: float = 0.0
    trained_tokens: int = 0
    input_tokens: int = 0
    skipped_steps: int = 0
    """Number of steps that were skipped, or undone by a rollback."""
    grad_norms: tuple[float, ...] = ()
    """Gradient norms, before clipping, of the last `guards.window_steps` good steps."""
    bad_steps: tuple[int, ...] = ()
    """Numbers of the bad steps among the last `guards.window_steps` steps."""
    learning_rate_scale: float = 1.0
    """Factor by which the guards have multiplied the learning rate."""
    recovering_steps: int = 0
    """Number of good steps since `learning_rate_scale` last changed, if it recovers."""
    losses: tuple[float, ...] = ()
    """Losses of the last `guards.window_steps` good steps since the last rollback or report of rising losses, if a
    guard needs them."""
    rollback_step: int = 0
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass; 1 except in float16."""
    loss_scale_steps: int = 0
    """Number of steps without overflow since the loss scale last changed."""
    module_norm_steps: tuple[int, ...] = ()
    module_norms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """L2 norms of the gradients before clipping, at `module_norm_steps`, by module."""
    budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)
    validation_budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON. Fields in ADDED_FIELDS that have their default are omitted."""
        values, default = asdict(self), TrainState()
        return {
            name: value for name, value in values.items() if name not in ADDED_FIELDS or value != getattr(default, name)
        }

    @property
    def best_loss(self) -> float | None:
        """Validation loss at `best_step`."""
        return self.validation_loss.get(self.best_step)

    @property
    def required_steps(self) -> frozenset[int]:
        """Steps whose checkpoints this state needs in addition to its own."""
        return frozenset({self.best_step, self.rollback_step} - {0, self.step})


ADDED_FIELDS = frozenset({"recovering_steps", "losses", "token_accuracy"})
"""Fields that are newer than many checkpoints. A checkpoint contains them only if a setting uses them, so checkpoints
of other runs keep their bytes, and earlier versions can read them."""


@dataclass(frozen=True)
class TrainSnapshot:
    """Copy of a training's complete state at one step. Later steps do not change it; all tensors are on the CPU."""

    state: TrainState
    weights: dict[str, Tensor]
    """Trainable matrices, by parameter name."""
    optimizer_tensors: dict[str, Tensor]
    """The optimizer's tensors, by path (`optimizer.flatten_state`)."""
    optimizer_values: dict[str, Any]
    adapter_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that this kind of adapter needs in addition to its matrices (adapters.extra_tensors)."""
    residuals: tuple[dict[str, Tensor], ...] = ()
    """Residuals of gradient compression, by rank (GradientReducer.state)."""

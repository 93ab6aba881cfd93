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
    best_step: int = 0
    bad_validations: int = 0
    """Number of validations since the best validation."""
    train_loss: float = 0.0
    """Loss of the last applied step."""
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
    rollback_step: int = 0
    """Step of the snapshot that the guards may roll back to."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass; 1 except in float16."""
    loss_scale_steps: int = 0
    """Number of steps without overflow since the loss scale last changed."""
    module_norm_steps: tuple[int, ...] = ()
    """Steps at which the gradient norm of each module was recorded."""
    module_norms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """L2 norms of the gradients before clipping, at `module_norm_steps`, by module."""
    budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)
    """Limit of training micro-batches."""
    validation_budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)

    @property
    def best_loss(self) -> float | None:
        """Validation loss at `best_step`."""
        return self.validation_loss.get(self.best_step)

    @property
    def required_steps(self) -> frozenset[int]:
        """Steps whose checkpoints this state needs in addition to its own."""
        return frozenset({self.best_step, self.rollback_step} - {0, self.step})

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "TrainState":
        """Parse the values of `to_json`. Raises TypeError, KeyError or ValueError for other values."""
        parsed: dict[str, Any] = {
            "validation_loss": {int(step): float(loss) for step, loss in raw["validation_loss"].items()},
            "grad_norms": tuple(map(float, raw["grad_norms"])),
            "bad_steps": tuple(map(int, raw["bad_steps"])),
            "module_norm_steps": tuple(map(int, raw["module_norm_steps"])),
            "module_norms": {str(name): tuple(map(float, norms)) for name, norms in raw["module_norms"].items()},
            "budget": MicrobatchBudget(**raw["budget"]),
            "validation_budget": MicrobatchBudget(**raw["validation_budget"]),
        }
        return cls(**{**raw, **parsed})


@dataclass(frozen=True)
class TrainSnapshot:
    """Copy of a training's complete state at one step. Later steps do not change it; all tensors are on the CPU."""

    state: TrainState
    weights: dict[str, Tensor]
    """Trainable matrices, by parameter name."""
    optimizer_tensors: dict[str, Tensor]
    """The optimizer's tensors, by path (`optimizer.flatten_state`)."""
    optimizer_values: dict[str, Any]
    """The optimizer's values that are not tensors, as JSON."""
    adapter_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that this kind of adapter needs in addition to its matrices (adapters.extra_tensors)."""
    residuals: tuple[dict[str, Tensor], ...] = ()
    """Residuals of gradient compression, by rank (GradientReducer.state)."""

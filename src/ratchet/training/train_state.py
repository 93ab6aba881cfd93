"""Where training stands after a step: everything that later steps depend on, beside weights and optimizer."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ratchet.training.microbatch_budget import MicrobatchBudget


@dataclass(frozen=True)
class TrainState:
    """Counters and histories after `step` optimizer steps. Plain numbers only: it is JSON in a checkpoint."""

    step: int = 0
    validation_loss: dict[int, float] = field(default_factory=dict)
    """By step, in nats per answer token."""
    best_step: int = 0
    bad_validations: int = 0
    """Validations since the best one."""
    train_loss: float = 0.0
    """Of the last step that was learned from."""
    trained_tokens: int = 0
    input_tokens: int = 0
    skipped_steps: int = 0
    """Steps that were left out, or undone by going back."""
    norms: tuple[float, ...] = ()
    """Gradient norms before clipping of the last good steps, at most `guards.window_steps`."""
    bad_steps: tuple[int, ...] = ()
    """Steps of the last `guards.window_steps` that were bad."""
    rate_scale: float = 1.0
    """What guards have multiplied the learning rate by."""
    good_step: int = 0
    """Step of the snapshot that a rule may go back to."""
    loss_scale: float = 1.0
    """What the loss is multiplied by before the backward pass; other than 1 only when computing in float16."""
    scale_steps: int = 0
    """Steps since the loss scale last changed."""
    gradient_steps: tuple[int, ...] = ()
    """Steps at which the gradient was taken apart by modules."""
    gradient_norms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """L2 norms before clipping at those steps, by module."""
    budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)
    """Of training micro-batches."""
    validation_budget: MicrobatchBudget = field(default_factory=MicrobatchBudget)

    @property
    def best_loss(self) -> float | None:
        """Validation loss at `best_step`."""
        return self.validation_loss.get(self.best_step)

    @property
    def refers_to(self) -> frozenset[int]:
        """Steps whose checkpoints this state needs beside its own."""
        return frozenset({self.best_step, self.good_step} - {0, self.step})

    def as_json(self) -> dict[str, Any]:
        """Plain values; `from_json` takes them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "TrainState":
        """Raises TypeError, KeyError or ValueError when the values are not those of a state."""
        changed: dict[str, Any] = {
            "validation_loss": {int(step): float(loss) for step, loss in raw["validation_loss"].items()},
            "norms": tuple(map(float, raw["norms"])),
            "bad_steps": tuple(map(int, raw["bad_steps"])),
            "gradient_steps": tuple(map(int, raw["gradient_steps"])),
            "gradient_norms": {str(name): tuple(map(float, norms)) for name, norms in raw["gradient_norms"].items()},
            "budget": MicrobatchBudget(**raw["budget"]),
            "validation_budget": MicrobatchBudget(**raw["validation_budget"]),
        }
        return cls(**{**raw, **changed})


@dataclass(frozen=True)
class TrainSnapshot:
    """All of a training at one step, in memory of its own: nothing that happens later changes it."""

    state: TrainState
    weights: dict[str, Tensor]
    """The matrices that learn, by parameter name; on the CPU."""
    optimizer: dict[str, Tensor]
    """The optimizer's tensors by path (see optimizer.py); on the CPU."""
    rest: dict[str, Any]
    """The optimizer's other values, as JSON."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """What the kind of adapter needs beside its matrices (adapter.extra_tensors); on the CPU."""
    wire: tuple[dict[str, Tensor], ...] = ()
    """What each rank has left unsent of its gradients (wire.py: state), in the order of ranks; on the CPU."""

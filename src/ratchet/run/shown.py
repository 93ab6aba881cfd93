"""What of a run is shown elsewhere, in MLflow say: told from its spec and its journal."""

from ratchet import digest
from ratchet.config import Settings
from ratchet.run.directory import RunPaths, RunSpec
from ratchet.run.journal import Event, Reader
from ratchet.run.observers import Status

METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "validation/loss")


def parameters_of(spec: RunSpec, settings: Settings) -> dict[str, str]:
    """Flat and few: what decides the result. They are the run's identity, so they never change."""
    flat = {"base.source": settings.base.source, "base.digest": spec.base_digest[: digest.SHORT]}
    flat |= {"data.digest": spec.data_digest[: digest.SHORT], "recipe_version": str(spec.recipe_version)}
    for key, value in spec.train.model_dump(mode="json").items():
        for name, leaf in ((f"{key}.{k}", v) for k, v in value.items()) if isinstance(value, dict) else [(key, value)]:
            flat[f"train.{name}"] = ",".join(leaf) if isinstance(leaf, list) else str(leaf)
    return flat


def figures_of(event: Event) -> dict[str, float]:
    """The points of one event, by name of the metric."""
    if event.kind == "validation":
        return {"validation/loss": event.data["loss"]}
    if event.kind != "step":
        return {}
    values = {f"train/{key}": event.data[key] for key in ("loss", "learning_rate", "grad_norm")}
    return values | {"train/tokens_per_second": event.data["input_tokens"] / max(event.data["step_s"], 1e-6)}


def end_of(paths: RunPaths) -> Status:
    """How a run that nobody trains ended, by its result and its journal."""
    ends = [e.data.get("decision") for e in Reader(paths.journal).read() if e.kind in ("attempt", "stopped", "died")]
    if paths.is_finished():
        return "FINISHED"
    return "FAILED" if ends and ends[-1] == "GiveUp" else "KILLED"

"""Kept checkpoints as MLflow's logged models: the run they come from, their step, their figures, their digests.

No weights are sent: they lie in the run's result and, by DVC, in its remote. MLflow calls such a model external.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.errors import DamagedError, DataError
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import say
from ratchet.storage.records.base import TrainReport
from ratchet.tracking.mlflow.experiments import RUN_TAG, Experiment, log_batch

STEP_TAG, ROLE_TAG, KEPT_TAG, ADAPTER_TAG = (
    "ratchet.step", "ratchet.checkpoint", "ratchet.kept", "ratchet.adapter_digest"
)  # fmt: skip
VERSIONS_TAG = "mlflow.modelVersions"
"""Where MLflow's pages look for the registered versions of a logged model."""
EXTERNAL_TAG = "mlflow.model.isExternal"
LOSS = "validation/loss"
OWN = ("test/candidate/", "test/merged/")
"""What keys begin with that tell of the kept adapter, or of the model it was exported as."""


def log(experiment: Experiment, client: Any, run: Any, paths: RunPaths) -> None:
    """Make best and last checkpoint of a finished run logged models; repeating it changes nothing.

    Args:
        experiment: of the run.
        client: MLflow's.
        run: as MLflow has it now, its points stored.
        paths: of the run. A result that cannot be read makes no models, and says so: all else is shown.
    """
    try:
        report = TrainReport.load(paths.result / "train.json")
    except (DataError, DamagedError) as error:
        say(f"no logged models: {error}")
        return
    found = _by_step(experiment, client, run)
    roles: dict[int, list[str]] = {}
    for role, step in (("best", report.best_step), ("last", report.steps)):
        roles.setdefault(step, []).append(role)
    missing = [(step, names) for step, names in roles.items() if step not in found]
    if missing:
        experiment.each([partial(_make, experiment, client, run, report, step, names) for step, names in missing])
        found = _by_step(experiment, client, run)
    for step in roles:
        if str(found[step].status) != "READY":
            _complete(experiment, client, run, found[step], paths)


def of_run(experiment: Experiment, client: Any, mlflow_id: str) -> list[Any]:
    """The logged models of MLflow's run of this id, the oldest first."""
    order = [{"field_name": "creation_timestamp", "ascending": True}]
    wanted = f"source_run_id = '{mlflow_id}'"
    return list(client.search_logged_models([experiment.id], filter_string=wanted, order_by=order))


def attributed(experiment: Experiment, client: Any, run: Any, metrics: Sequence[Any]) -> list[Any]:
    """The metrics, those of the run's own model said to be of its logged model and of the data that were prepared."""
    from mlflow.entities import Metric

    if not any(metric.key.startswith(OWN) for metric in metrics):
        return list(metrics)
    kept = next((m for m in of_run(experiment, client, run.info.run_id) if m.tags.get(KEPT_TAG) == "true"), None)
    if kept is None:
        return list(metrics)
    about = {"model_id": kept.model_id, **_dataset(run)}
    return [Metric(m.key, m.value, m.timestamp, m.step, **about) if m.key.startswith(OWN) else m for m in metrics]


def link_version(client: Any, experiment_id: str, adapter_digest: str, name: str, version: int) -> None:
    """Tell the logged model of an adapter that it is registered as this version; nothing happens if there is none."""
    wanted = f"tags.`{ADAPTER_TAG}` = '{adapter_digest}'"
    for model in client.search_logged_models([experiment_id], filter_string=wanted):
        told = json.loads(model.tags.get(VERSIONS_TAG, "[]"))
        entry = {"name": name, "version": str(version)}
        if not any(str(one.get("version")) == str(version) and one.get("name") == name for one in told):
            client.set_logged_model_tags(model.model_id, {VERSIONS_TAG: json.dumps([*told, entry])})


def _by_step(experiment: Experiment, client: Any, run: Any) -> dict[int, Any]:
    """One logged model for each step: of those that a lost answer has made twice, the older one stays."""
    found: dict[int, Any] = {}
    for model in of_run(experiment, client, run.info.run_id):
        if (step := model.tags.get(STEP_TAG)) is None:
            continue  # somebody else's
        if found.setdefault(int(step), model) is not model:
            client.delete_logged_model(model.model_id)
    return found


def _make(experiment: Experiment, client: Any, run: Any, report: TrainReport, step: int, roles: Sequence[str]) -> None:
    tags = {RUN_TAG: report.run_id, STEP_TAG: str(step), ROLE_TAG: ",".join(roles), EXTERNAL_TAG: "true"}
    tags[KEPT_TAG] = str(step == report.kept_step).lower()
    tags["ratchet.place"] = f"result/checkpoints/{roles[0]}"
    if step == report.kept_step:
        tags |= {ADAPTER_TAG: report.adapter_digest, "ratchet.place": "result/adapter"}
    name = f"{report.run_id}-{'-'.join(roles)}-step-{step}"
    client.create_logged_model(experiment.id, name, run.info.run_id, tags, dict(run.data.params), "adapter")


def _complete(experiment: Experiment, client: Any, run: Any, model: Any, paths: RunPaths) -> None:
    """Everything that belongs to a model; that it is READY comes last, and says so."""
    from mlflow.entities import LoggedModelOutput, Metric

    step = int(model.tags[STEP_TAG])
    losses = client.get_metric_history(run.info.run_id, LOSS) if LOSS in run.data.metrics else []
    about = {"model_id": model.model_id, **_dataset(run)}
    # With the very time of the point of the run, or the run would have it twice.
    points = [Metric(LOSS, p.value, p.timestamp, p.step, **about) for p in losses if p.step == step]
    calls = [partial(client.log_model_artifact, model.model_id, str(path)) for path in _described(paths, model.tags)]
    if points:
        calls.append(partial(log_batch, client, run.info.run_id, metrics=points))
    if model.model_id not in {output.model_id for output in run.outputs.model_outputs}:
        calls.append(partial(client.log_outputs, run.info.run_id, [LoggedModelOutput(model.model_id, step)]))
    experiment.each(calls)
    client.finalize_logged_model(model.model_id, "READY")


def _described(paths: RunPaths, tags: Mapping[str, str]) -> list[Path]:
    names = [paths.result / "adapter" / "adapter_config.json"]
    names += [paths.result / "README.md"] if tags[KEPT_TAG] == "true" else []
    return [path for path in names if path.exists()]


def _dataset(run: Any) -> dict[str, str]:
    """What the figures of a model are of; nothing where the run's data are not known to MLflow."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    return {"dataset_name": inputs[0].dataset.name, "dataset_digest": inputs[0].dataset.digest} if inputs else {}

"""Trainings that start from trained weights (train.init_adapter)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import group_cases
import tiny_project
import tiny_sweep
import trained
from group_cases import RunInGroup, members
from hub_server import Hub
from ratchet.config.sweep import SweepParameter
from ratchet.config.train import Train
from ratchet.errors import DataError, HubError, SettingsError
from ratchet.models import adapter_format, adapters, loading
from ratchet.models.start_adapter import StartAdapter
from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.stages.project import Project
from ratchet.stages.train import train as train_stage
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, ChampionFile
from ratchet.training.run_spec import build_run_spec, pin_champion
from ratchet.tuning.study_session import StudySession

SOURCE = Train.model_validate(tiny_project.TRAIN.model_dump() | {"quantization": "none", "epochs": 0.5})


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    """Restore the settings that a training changes in its process."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project")


def train(layout: ProjectLayout, settings: Train) -> RunPaths:
    """Train a run in this process."""
    with members(layout, [settings]) as runs:
        assert group_cases.train_in_threads(runs, runs[0].paths.root / "record.json") == [0]
        return runs[0].paths


@pytest.fixture(scope="module")
def source(layout: ProjectLayout) -> RunPaths:
    return train(layout, SOURCE)


def started(reference: str, **changes: Any) -> Train:
    """Return settings that start there and learn next to nothing."""
    plain = {"learning_rate": 1e-12, "init_adapter": reference, "epochs": 0.1}
    return Train.model_validate(SOURCE.model_dump() | plain | changes)


def run_id(layout: ProjectLayout, settings: Train) -> str:
    return build_run_spec(layout, tiny_project.SETTINGS.model_copy(update={"train": settings})).run_id


def test_a_training_starts_from_a_run_a_checkpoint_or_a_saved_adapter(layout: ProjectLayout, source: RunPaths) -> None:
    expected, ids = group_cases.adapter(source), set[str]()
    kept = source.result / "checkpoints" / "best"
    for reference in (source.root.name, str(kept), str(source.result / "adapter")):
        found = train(layout, started(reference))
        for name, tensor in group_cases.adapter(found).items():
            assert torch.allclose(tensor, expected[name], atol=1e-8), name
        ids.add(found.root.name)
        shutil.rmtree(found.root)
    assert len(ids) == 2  # the run is its checkpoint; the file of the adapter has other bytes


def test_the_run_id_depends_on_the_weights_and_not_on_their_path(
    layout: ProjectLayout, source: RunPaths, tmp_path: Path
) -> None:
    kept, copy = source.result / "checkpoints" / "best", tmp_path / "copy"
    shutil.copytree(kept, copy)
    original = run_id(layout, started(str(kept)))
    assert run_id(layout, started(str(copy))) == original
    assert run_id(layout, started(None)) != original  # type: ignore[arg-type]
    tensors = load_file(copy / "trainable.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, copy / "trainable.safetensors")
    assert run_id(layout, started(str(copy))) != original


def test_a_study_depends_on_the_weights_and_not_on_their_path(
    layout: ProjectLayout, source: RunPaths, tmp_path: Path
) -> None:
    kept, copy = source.result / "checkpoints" / "best", tmp_path / "copy"
    shutil.copytree(kept, copy)

    space = {"train.learning_rate": SweepParameter(low=1e-3, high=1e-1, log=True)}

    def open_study(reference: Path) -> str:
        wanted = tiny_sweep.settings(space=space).model_copy(update={"train": started(str(reference))})
        with StudySession.open(layout, wanted) as session:
            return session.store.study

    assert open_study(kept) == open_study(copy)
    tensors = load_file(copy / "trainable.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, copy / "trainable.safetensors")
    with pytest.raises(SettingsError, match=r"train\.init_adapter: [0-9a-f]{12} -> [0-9a-f]{12}"):
        open_study(copy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 8}, "train.rank: found 8, but the weights in .* have 4; set train.rank: 4"),
        ({"alpha": 32}, "train.alpha: found 32.0, but"),
        ({"adapter": "dora"}, "train.adapter: found dora, but"),
        ({"alpha_pattern": {"q_proj": 99}}, r"train.alpha_pattern: (found|.*q_proj has the value 99)"),
        ({"target_modules": "mlp"}, "target_modules"),
    ],
)
@pytest.mark.parametrize("kind", ["checkpoint", "adapter"])
def test_weights_of_another_form_are_refused(
    layout: ProjectLayout, source: RunPaths, kind: str, changes: dict[str, Any], says: str
) -> None:
    where = source.result / ("checkpoints/best" if kind == "checkpoint" else "adapter")
    settings = started(str(where), **changes)
    if kind == "adapter" and "target_modules" in changes:  # known only when the weights are read
        with members(layout, [settings]) as runs:
            assert group_cases.train_in_threads(runs, runs[0].paths.root / "record.json") == [2]
            assert "does not fit train.target_modules" in str(group_cases.events_text(runs[0].paths))
        return
    with pytest.raises(SettingsError, match=says):
        run_id(layout, settings)


def test_an_adapter_in_a_checkpoint_of_deepspeed_is_read_and_an_incomplete_one_is_refused(tmp_path: Path) -> None:
    chosen = trained.settings()
    base = trained.write_base(tmp_path / "base", "llama")
    folder = trained.write_adapter(tmp_path / "checkpoint-7", base, chosen)
    (folder / "zero_to_fp32.py").write_text("raise SystemExit('this is not run')", encoding="utf-8")
    (folder / "latest").write_text("global_step7", encoding="utf-8")
    (folder / "global_step7").mkdir()
    (folder / "global_step7" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"a pickle that is not read")
    model = adapters.attach(loading.load(base, None, chosen, trained.CPU), chosen, "base")
    adapters.start_from(model, StartAdapter(folder))
    weights = folder / "adapter_model.safetensors"
    read = adapter_format.collect_tensors(model)
    assert all(torch.equal(tensor, read[name]) for name, tensor in load_file(weights).items())

    save_file({name: torch.empty(0) for name in load_file(weights)}, weights)
    with pytest.raises(
        SettingsError, match=r"lora_[AB]\.weight has no values; DeepSpeed ZeRO-3 saves an adapter like this"
    ):
        adapters.start_from(model, StartAdapter(folder))
    weights.unlink()
    with pytest.raises(DataError, match=r"found the states of DeepSpeed's ranks, but no adapter_model\.safetensors"):
        StartAdapter(folder).digest()


def test_weights_that_are_not_there_or_were_changed_are_refused(
    layout: ProjectLayout, source: RunPaths, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"neither such a run in .* nor such a directory"):
        run_id(layout, started("0123456789ab"))
    with pytest.raises(DataError, match=r"found neither trainable\.safetensors nor adapter_model\.safetensors"):
        run_id(layout, started(str(tmp_path)))
    other = tmp_path / "other"
    shutil.copytree(source.result / "checkpoints" / "best", other)
    identity = json.loads((other / "identity.json").read_bytes())
    identity["spec"]["base_digest"] = "0" * 64
    (other / "identity.json").write_text(json.dumps(identity))
    with pytest.raises(SettingsError, match="was trained on the base model with the digest 000000000000"):
        run_id(layout, started(str(other)))
    changed = tmp_path / "changed"
    shutil.copytree(source.result / "checkpoints" / "best", changed)
    run = RunInGroup(layout, started(str(changed), seed=9))
    tensors = load_file(changed / "trainable.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, changed / "trainable.safetensors")
    try:
        assert group_cases.train_in_threads([run], tmp_path / "record.json") == [2]
        assert "has changed since the start of this run" in str(group_cases.events_text(run.paths))
    finally:
        run.close()


def test_an_adapter_of_the_hub_is_pinned_to_its_commit(layout: ProjectLayout, source: RunPaths, hub: Hub) -> None:
    adapter = {path.name: path.read_bytes() for path in (source.result / "adapter").iterdir()}
    local = run_id(layout, started(str(source.result / "adapter")))
    commit = hub.add("ada/adapter", adapter, is_private=True)
    try:
        assert run_id(layout, started("ada/adapter")) == local  # the digest counts, not where the weights come from
        found = train(layout, started("ada/adapter"))
        expected = group_cases.adapter(source)
        assert all(torch.allclose(t, expected[name], atol=1e-8) for name, t in group_cases.adapter(found).items())
        shutil.rmtree(found.root)
        assert json.loads(layout.start_adapters.read_bytes())["commits"] == {"ada/adapter": commit}

        tensors = load_file(source.result / "adapter" / "adapter_model.safetensors")
        weights = save({name: tensor + 1 for name, tensor in tensors.items()})
        newer = hub.add("ada/adapter", {"adapter_model.safetensors": weights})
        asked = len(hub.requests)
        assert run_id(layout, started("ada/adapter")) == run_id(layout, started(f"ada/adapter@{commit}")) == local
        assert len(hub.requests) == asked  # known already
        assert run_id(layout, started(f"ada/adapter@{newer}")) != local
        assert run_id(layout, started("ada/adapter@main")) != local
        pins = json.loads(layout.start_adapters.read_bytes())["commits"]
        assert pins == {"ada/adapter": commit, "ada/adapter@main": newer}
    finally:
        layout.start_adapters.unlink(missing_ok=True)


def test_an_adapter_that_the_hub_does_not_have_is_refused(layout: ProjectLayout, hub: Hub) -> None:
    with pytest.raises(HubError, match=r"ada/none is no directory \(.*\), so it is treated as a hub id; .*404"):
        run_id(layout, started("ada/none"))
    hub.add("ada/pickles", {"adapter_model.bin": b"", "adapter_config.json": b"{}"})
    with pytest.raises(DataError, match=r"found neither trainable\.safetensors nor adapter_model\.safetensors"):
        run_id(layout, started("ada/pickles"))
    assert not layout.start_adapters.exists()


def promote(layout: ProjectLayout, adapter: Path, version: int) -> str:
    """Make an adapter the champion, as `ratchet promote` leaves it; return the RunId of a run that starts from it."""
    digest = f"{version}" * 64
    folder = layout.promoted_model(digest) / "adapter"
    shutil.copytree(adapter, folder)
    weights = {name: tensor + version for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(weights, folder / "adapter_model.safetensors")
    champion = Champion(version=version, model_digest=digest, adapter_digest=digest, run_id="0" * 12)
    ChampionFile(champion=champion).save(layout.champion)
    return run_id(layout, started(str(folder)))


def test_patterns_of_a_saved_adapter_equal_those_of_its_settings(layout: ProjectLayout) -> None:
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.v_proj": 4.0}}
    settings = SOURCE.model_copy(update={**patterns, "epochs": 0.1})
    run = train(layout, settings)
    saved, other = run.result / "adapter", started(str(run.result / "adapter"))
    assert run_id(layout, started(str(saved), **patterns))
    with pytest.raises(SettingsError, match=r"train.rank_pattern: model.*q_proj has the value 4, but 2 in "):
        run_id(layout, other)


def test_a_run_keeps_the_champion_that_it_began_with(
    layout: ProjectLayout, source: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pin(**changes: Any) -> str:
        chosen = tiny_project.SETTINGS.model_copy(update={"train": started("champion", **changes)})
        return build_run_spec(project, pin_champion(project, chosen)).run_id

    project = ProjectLayout(tmp_path / "project")
    shutil.copytree(layout.root, project.root)
    with pytest.raises(DataError, match=r"found champion, but .*champion\.json names none; run `ratchet promote`"):
        pin()
    adapter = source.result / "adapter"
    first = promote(project, adapter, 1)
    with pytest.raises(SettingsError, match=r"train.rank: found 8, but the weights in .* have 4; set train.rank: 4"):
        pin(rank=8)
    assert pin() == first
    assert "starts from the champion, version 1" in capsys.readouterr().err
    run = RunDirectory.open(project.runs, build_run_spec(project, tiny_project.SETTINGS.model_copy(
        update={"train": started("champion")})))  # fmt: skip
    run.close()
    assert run.paths.root.name == first

    second = promote(project, adapter, 2)
    assert second != first
    assert run_id(project, started("champion")) == first  # other commands mean the run that began
    assert pin() == first
    assert "resumes from the champion that it began with, version 1" in capsys.readouterr().err
    shutil.copytree(source.result, run.paths.result)  # the run is complete
    assert run_id(project, started("champion")) == first
    assert pin() == run_id(project, started("champion")) == second  # stage train runs again
    shutil.copytree(source.result, project.train)
    report = json.loads(project.train_report.read_bytes())
    for restored in (first, second):  # DVC restores the output of a run of before
        project.train_report.write_text(json.dumps(report | {"run_id": restored}), encoding="utf-8")
        assert run_id(project, started("champion")) == restored
        chosen = tiny_sweep.settings(name="champion").model_copy(update={"train": started("champion")})
        if restored == first:
            with pytest.raises(SettingsError, match="began with version 1, and version 2 is the champion now"):
                StudySession.open(project, chosen).__enter__()
        else:
            with StudySession.open(project, chosen) as session:
                assert session.identity["train"]["init_adapter"] == build_run_spec(project, chosen).train.init_adapter
    shutil.rmtree(project.promoted_model("2" * 64))
    assert run_id(project, started("champion")) == second  # a finished run is identified without the weights
    with pytest.raises(DataError, match="the champion, version 2, is not on this machine; copy"):
        pin()
    assert json.loads(project.start_adapters.read_bytes())["champions"].keys() == {first, second}


def test_other_settings_are_trained_where_those_of_params_yaml_have_no_champion(
    layout: ProjectLayout, source: RunPaths
) -> None:
    project, pipeline = (
        Project.from_parts(layout, tiny_project.SETTINGS.model_copy(update={"train": chosen}))
        for chosen in (SOURCE, started("champion"))
    )
    run = RunDirectory.open(layout.runs, build_run_spec(layout, project.settings))
    shutil.copytree(source.result, run.paths.result)  # the run is complete
    run.close()
    result = train_stage(project, lambda paths: [], lambda paths, page: None, pipeline)
    assert (result.was_trained_before, result.is_output, layout.train.exists()) == (True, False, False)
    shutil.rmtree(run.paths.root)


def test_settings_without_trained_weights_are_refused() -> None:
    for changes in ({"adapter": "adalora", "rank": 16}, {"initialization": "pissa"}):
        with pytest.raises(ValueError, match="init_adapter: trained weights have no state of"):
            started("there", **changes)

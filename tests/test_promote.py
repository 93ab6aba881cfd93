"""Promotion and rollback: who is champion is never in doubt, whatever dies in between."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet import digest, files, records
from ratchet.config import Settings
from ratchet.errors import BusyError, ChampionError, DamagedError, DataError, GateError, TrackingError
from ratchet.layout import Layout
from ratchet.lock import Lock
from ratchet.promote import KIND, promote, rollback, smoke_test
from ratchet.records import Bundle, Parity
from ratchet.records_gate import Reason, Verdict, read_champion
from ratchet.services.registry import Registry

SETTINGS = Settings()
NAME = SETTINGS.promote.model_name


def works(model: Path) -> None:
    """Stands for the smoke test where the model is a few bytes."""
    assert (model / "model.safetensors").exists()


def stage(layout: Layout, model: str, decision: str = "PROMOTE", model_files: dict[str, bytes] | None = None) -> str:
    """What the stages would leave for a model of this name; returns its digest."""
    contents = model_files or {"hf/model.safetensors": f"weights of {model}".encode(), "hf/config.json": b"{}"}
    model_digest = digest.of_files({name: digest.of_bytes(content) for name, content in contents.items()})
    shared = {"model_digest": model_digest, "adapter_digest": model * 64, "run_id": f"run-{model}"}
    with files.sealed_directory(layout.export, "export") as scratch:
        for name, content in contents.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(content)
        parity = Parity(rows=1, tokens=2, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0)
        Bundle(
            **shared, base_digest="b" * 64, data_digest="d" * 64, merge_base="original", dtype="float32",
            size_bytes=1, parity=parity,
        ).save(scratch / "bundle.json")  # fmt: skip
    judge(layout, model_digest, decision, model)
    files.write_json(layout.eval_report, {"of": model})
    return model_digest


def judge(layout: Layout, model_digest: str, decision: str, model: str) -> None:
    champion = read_champion(layout.champion).champion
    Verdict.model_validate({
        "decision": decision, "model_digest": model_digest, "adapter_digest": model * 64, "run_id": f"run-{model}",
        "is_champion": bool(champion and champion.model_digest == model_digest),
        "champion_digest": champion.model_digest if champion else None,
        "reasons": (Reason(rule="must_improve", metric="accuracy", outcome="fail", text="accuracy is worse"),),
    }).save(layout.verdict)  # fmt: skip


def promoted(layout: Layout, model: str) -> str:
    model_digest = stage(layout, model)
    promote(layout, SETTINGS)
    return model_digest


def line(layout: Layout) -> list[str]:
    """Champion and its predecessors, by model; checked against registry and model folders."""
    file = read_champion(layout.champion)
    registry = Registry(layout, NAME)
    assert registry.champion() == (file.champion.version if file.champion else None)
    for champion in ([file.champion] if file.champion else []) + list(file.previous):
        found = registry.version(champion.version)
        assert found is not None
        assert found.model_digest == champion.model_digest
        files.verify(layout.promoted_model(champion.model_digest), KIND)
    return [c.run_id.removeprefix("run-") for c in ([file.champion] if file.champion else []) + list(file.previous)]


def test_a_promoted_model_is_kept_registered_and_named(tracked_project: Layout) -> None:
    model_digest = stage(tracked_project, "a")
    text = promote(tracked_project, SETTINGS)
    assert "version 1" in text
    assert "experiments/champion.json" in text
    assert line(tracked_project) == ["a"]
    folder = tracked_project.promoted_model(model_digest)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
        "bundle.json", "verdict.json", "eval.json", "hf/model.safetensors", "hf/config.json", "manifest.json"
    }  # fmt: skip
    version = Registry(tracked_project, NAME).version(1)
    assert version is not None
    assert version.source == folder.as_uri()


def test_the_model_stays_when_the_stage_runs_again(tracked_project: Layout) -> None:
    a = promoted(tracked_project, "a")
    stage(tracked_project, "b")  # replaces the export that the kept model was linked from
    files.verify(tracked_project.promoted_model(a), KIND)


def test_promoting_the_champion_again_changes_nothing(tracked_project: Layout) -> None:
    promoted(tracked_project, "a")
    before = tracked_project.champion.read_bytes()
    judge(tracked_project, read_champion(tracked_project.champion).champion.model_digest, "HOLD", "a")  # type: ignore[union-attr]
    assert "is champion already" in promote(tracked_project, SETTINGS)
    assert tracked_project.champion.read_bytes() == before
    assert len(Registry(tracked_project, NAME).versions()) == 1


def test_there_and_back_by_promotion(tracked_project: Layout) -> None:
    for model, expected in (("a", ["a"]), ("b", ["b", "a"]), ("a", ["a", "b"]), ("c", ["c", "a", "b"])):
        promoted(tracked_project, model)
        assert line(tracked_project) == expected
    assert len(Registry(tracked_project, NAME).versions()) == 3


def test_rollback_returns_to_the_previous_and_forgets_the_bad_one(tracked_project: Layout) -> None:
    for model in ("a", "b", "c"):
        promoted(tracked_project, model)
    assert "version 2" in rollback(tracked_project, SETTINGS, None, works)
    assert line(tracked_project) == ["b", "a"]
    assert "already" in rollback(tracked_project, SETTINGS, 2, works)
    rollback(tracked_project, SETTINGS, 1, works)
    assert line(tracked_project) == ["a"]
    with pytest.raises(ChampionError, match="no previous champion"):
        rollback(tracked_project, SETTINGS, None, works)
    rollback(tracked_project, SETTINGS, 3, works)  # a version that was champion once may come back by name
    assert line(tracked_project) == ["c"]
    with pytest.raises(ChampionError, match=r"version 9 of .* not registered; known: 1, 2, 3"):
        rollback(tracked_project, SETTINGS, 9, works)


def test_rollback_refuses_a_model_that_is_damaged_gone_or_silent(tracked_project: Layout) -> None:
    a = promoted(tracked_project, "a")
    promoted(tracked_project, "b")

    def silent(model: Path) -> None:
        raise ChampionError(f"{model}: does not answer")

    with pytest.raises(ChampionError, match="does not answer"):
        rollback(tracked_project, SETTINGS, None, silent)
    weights = tracked_project.promoted_model(a) / "hf" / "model.safetensors"
    weights.unlink()
    weights.write_bytes(b"weights of x")
    with pytest.raises(ChampionError, match=r"model\.safetensors.*content differs"):
        rollback(tracked_project, SETTINGS, None, works)
    tracked_project.promoted_model(a).rename(tracked_project.root / "elsewhere")
    with pytest.raises(ChampionError, match="not sealed"):
        rollback(tracked_project, SETTINGS, None, works)
    assert line_of_file(tracked_project) == [2, 1]
    assert Registry(tracked_project, NAME).champion() == 2


def line_of_file(layout: Layout) -> list[int]:
    file = read_champion(layout.champion)
    return [c.version for c in ([file.champion] if file.champion else []) + list(file.previous)]


@pytest.mark.parametrize("decision", ["HOLD", "REJECT", "INVALID"])
def test_no_promotion_without_the_verdict(tracked_project: Layout, decision: str) -> None:
    stage(tracked_project, "a", decision)
    with pytest.raises(GateError, match=f"{decision}:\n  fail +accuracy is worse"):
        promote(tracked_project, SETTINGS)
    nothing_happened(tracked_project)


def nothing_happened(layout: Layout) -> None:
    assert not layout.champion.exists()
    assert not layout.models.exists()
    assert Registry(layout, NAME).versions() == []


def test_a_verdict_about_another_model(tracked_project: Layout) -> None:
    stage(tracked_project, "a")
    judge(tracked_project, "e" * 64, "PROMOTE", "e")
    with pytest.raises(GateError, match="is about model eeeeeeeeeeee"):
        promote(tracked_project, SETTINGS)
    nothing_happened(tracked_project)


def test_a_verdict_over_a_champion_that_was_replaced_since(tracked_project: Layout) -> None:
    promoted(tracked_project, "a")
    stage(tracked_project, "b")
    for_b = tracked_project.verdict.read_bytes()  # b was compared with a
    promoted(tracked_project, "c")
    stage(tracked_project, "b")
    tracked_project.verdict.write_bytes(for_b)
    with pytest.raises(GateError, match="by now; run `dvc repro`"):
        promote(tracked_project, SETTINGS)
    assert line(tracked_project) == ["c", "a"]


def test_a_damaged_export_or_a_stage_that_has_not_run(tracked_project: Layout) -> None:
    with pytest.raises(DataError, match="dvc repro gate"):
        promote(tracked_project, SETTINGS)
    stage(tracked_project, "a")
    (tracked_project.merged_model / "model.safetensors").write_bytes(b"WEIGHTS OF a")
    with pytest.raises(DamagedError, match="content differs"):
        promote(tracked_project, SETTINGS)
    nothing_happened(tracked_project)


def test_a_damaged_copy_of_the_model_is_made_again(tracked_project: Layout) -> None:
    a = stage(tracked_project, "a")
    folder = tracked_project.promoted_model(a)
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_bytes(b"half")
    promote(tracked_project, SETTINGS)
    assert line(tracked_project) == ["a"]


def test_a_dead_mlflow_promotes_nothing(project: Layout) -> None:
    stage(project, "a")
    project.mlruns.mkdir()
    project.mlflow_database.write_bytes(b"damaged" * 1000)
    with pytest.raises(TrackingError, match="not a database"):
        promote(project, SETTINGS)
    assert not project.champion.exists()


def test_a_fresh_clone_says_where_the_registry_is(tracked_project: Layout) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    tracked_project.mlruns.rename(tracked_project.root / "left on the other machine")
    for command in ("promote", "rollback"):
        with pytest.raises(ChampionError, match=r"names version 2 .*does not have.*copy it from"):
            run_command(command, tracked_project.root)
    assert not tracked_project.mlflow_database.exists()


def test_a_registry_begun_anew_is_not_taken_for_the_old_one(
    tracked_project: Layout, tmp_path: Path, mlflow_template: Path
) -> None:
    promoted(tracked_project, "a")
    clone = Layout(tmp_path / "clone")  # its registry has a version 1 and a champion too, but of another model
    clone.mlruns.mkdir(parents=True)
    clone.mlflow_database.write_bytes(mlflow_template.read_bytes())
    promoted(clone, "z")
    clone.champion.write_bytes(tracked_project.champion.read_bytes())
    stage(clone, "b")
    with pytest.raises(ChampionError, match=r"version 1 .*which the registry in .* does not have"):
        promote(clone, SETTINGS)
    with pytest.raises(ChampionError, match="does not have"):
        rollback(clone, SETTINGS, 1, works)


def test_disagreement_names_both_and_every_way_out_works(tracked_project: Layout) -> None:
    for model in ("a", "b", "c"):
        promoted(tracked_project, model)
    for choice, expected in ((1, ["a", "b"]), (3, ["c", "b", "a"])):
        state = tracked_project.champion.read_bytes()
        Registry(tracked_project, NAME).set_champion(1)  # by hand, in the MLflow UI
        stage(tracked_project, "d")
        with pytest.raises(ChampionError, match=r"names version 3 .*version 1.*`ratchet rollback 3` or .*rollback 1`"):
            promote(tracked_project, SETTINGS)
        with pytest.raises(ChampionError, match="names version 3"):
            rollback(tracked_project, SETTINGS, None, works)
        rollback(tracked_project, SETTINGS, choice, works)
        assert line(tracked_project) == expected
        tracked_project.champion.write_bytes(state)
        Registry(tracked_project, NAME).set_champion(3)


def test_an_alias_removed_by_hand_is_set_again(tracked_project: Layout) -> None:
    from mlflow import MlflowClient

    promoted(tracked_project, "a")
    MlflowClient(f"sqlite:///{tracked_project.mlflow_database}").delete_registered_model_alias(NAME, "champion")
    with pytest.raises(ChampionError, match=r"at no version.*choose: `ratchet rollback 1`"):
        promote(tracked_project, SETTINGS)
    rollback(tracked_project, SETTINGS, 1, works)
    assert line(tracked_project) == ["a"]


# --- interruptions ----------------------------------------------------------------------------------------------------

SEAMS: dict[str, tuple[Any, str]] = {
    "link": (files, "link_or_copy"),
    "seal": (files, "seal"),
    "publish": (files, "publish"),
    "version": (Registry, "ensure_version"),
    "alias": (Registry, "set_champion"),
    "file": (records.ChampionFile, "save"),
    "rename": (os, "fsync"),
}


def die_at(seam: str, when: str, command: str, root: Path) -> None:
    """In a process of its own: run the command, but be killed right before or after the seam is passed."""
    owner, name = SEAMS[seam]
    original: Callable[..., Any] = getattr(owner, name)

    def dying(*arguments: Any, **options: Any) -> None:
        if when == "after":
            original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)
    run_command(command, root)


def run_command(command: str, root: Path) -> None:
    if command == "promote":
        promote(Layout(root), SETTINGS)
    else:
        rollback(Layout(root), SETTINGS, None, works)


def killed(processes: Any, seam: str, when: str, command: str, layout: Layout) -> None:
    process = processes.Process(target=die_at, args=(seam, when, command, layout.root))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


POINTS = [
    ("link", "before"), ("link", "after"), ("seal", "before"), ("seal", "after"), ("publish", "before"),
    ("publish", "after"), ("version", "before"), ("version", "after"), ("alias", "before"), ("alias", "after"),
    ("rename", "before"), ("file", "before"), ("file", "after"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("seam", "when"), POINTS)
def test_a_promotion_killed_anywhere_is_finished_by_repeating_it(
    tracked_project: Layout, processes: Any, seam: str, when: str
) -> None:
    promoted(tracked_project, "a")
    stage(tracked_project, "b")
    killed(processes, seam, when, "promote", tracked_project)
    assert read_champion(tracked_project.champion).champion is not None  # readable at any moment
    assert Registry(tracked_project, NAME).champion() in (1, 2)
    text = promote(tracked_project, SETTINGS)
    assert ("already" in text) == ((seam, when) == ("file", "after"))
    assert line(tracked_project) == ["b", "a"]
    assert len(Registry(tracked_project, NAME).versions()) == 2
    assert {p.name for p in tracked_project.models.iterdir()} == {
        p.name for p in tracked_project.models.iterdir() if not p.name.startswith(files.PARTIAL)
    }


@pytest.mark.slow
def test_a_first_promotion_killed_between_alias_and_file(tracked_project: Layout, processes: Any) -> None:
    stage(tracked_project, "a")
    killed(processes, "alias", "after", "promote", tracked_project)
    stage(tracked_project, "b")  # somebody trains on before the promotion is finished
    with pytest.raises(ChampionError, match=r"names no champion.*version 1.*`ratchet rollback 1`"):
        promote(tracked_project, SETTINGS)
    rollback(tracked_project, SETTINGS, 1, works)
    assert line(tracked_project) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize(("seam", "when"), [("alias", "before"), ("alias", "after"), ("file", "before")])
def test_a_rollback_killed_anywhere_is_finished_by_repeating_it(
    tracked_project: Layout, processes: Any, seam: str, when: str
) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    killed(processes, seam, when, "rollback", tracked_project)
    assert "version 1" in rollback(tracked_project, SETTINGS, None, works)
    assert line(tracked_project) == ["a"]


def test_a_second_promotion_at_the_same_time_is_refused(tracked_project: Layout) -> None:
    stage(tracked_project, "a")
    with Lock(tracked_project.mlruns / "promote.lock", "promotion").acquire():
        for command in ("promote", "rollback"):
            with pytest.raises(BusyError, match=f"promotion is in use by process {os.getpid()}"):
                run_command(command, tracked_project.root)
    nothing_happened(tracked_project)


def promote_and_tell(root: Path, answers: Any) -> None:
    try:
        answers.put(promote(Layout(root), SETTINGS))
    except BusyError as error:
        answers.put(str(error))


@pytest.mark.slow
def test_promotions_that_race_leave_one_version(tracked_project: Layout, processes: Any) -> None:
    stage(tracked_project, "a")
    answers = processes.Queue()
    racers = [processes.Process(target=promote_and_tell, args=(tracked_project.root, answers)) for _ in range(3)]
    for racer in racers:
        racer.start()
    texts = [answers.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    assert sum("is champion now" in text for text in texts) == 1
    assert all("champion" in text or "in use" in text for text in texts)
    assert line(tracked_project) == ["a"]
    assert len(Registry(tracked_project, NAME).versions()) == 1


# --- the smoke test ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_loads_a_real_model_in_a_fresh_process_and_refuses_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from ratchet.model.smoke import main

    words = {word: i for i, word in enumerate(["<end>", "user", "assistant", "Hello", ":", "you"])}
    inner = Tokenizer(models.WordLevel(words, "you"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "you"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' assistant :' }}{% endif %}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            eos_token_id=0, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    good = tmp_path / "good"
    model.save_pretrained(good)
    tokenizer.save_pretrained(good)
    smoke_test(good)

    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    tokenizer.save_pretrained(broken)
    assert main([str(broken)]) == 1
    assert "not finite" in capsys.readouterr().err
    (broken / "model.safetensors").unlink()
    assert main([str(broken)]) == 1
    assert "OSError" in capsys.readouterr().err


def test_a_model_that_fails_the_smoke_test_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "python"  # stands for the interpreter, which needs ten seconds to say the same
    said.write_text("#!/bin/sh\necho first >&2; echo 'OSError: no weights' >&2; exit 1\n")
    said.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(said))
    with pytest.raises(
        ChampionError, match=r"model: does not load and answer \(OSError: no weights\); champion is unch"
    ):
        smoke_test(tmp_path / "model")

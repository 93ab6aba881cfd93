"""Tests of `ratchet push` with the hub's real client and a local server: one commit, resumed, never half a model."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import pushed_project
import tiny_project
from hub_server import OWNER, TOKEN, Fault, Hub
from ratchet.api import push as api_push
from ratchet.cli.push import format_push
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.config.settings import Settings
from ratchet.errors import GateError, HubError, SettingsError
from ratchet.registry import keys, ledger, signature
from ratchet.registry.hub_card import CardMetadata
from ratchet.stages.gate import gate
from ratchet.stages.project import Project
from ratchet.stages.push import PushOptions, PushResult, _require_judged_adapter, push
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import read_lines
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, Promotion

REPOSITORY = f"{OWNER}/support"
SETTINGS = pushed_project.SETTINGS
MERGED = PushOptions("merged")


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pushed_project.accepted(tmp_path_factory.mktemp("accepted") / "project").root


@pytest.fixture
def layout(accepted: Path, tmp_path: Path) -> ProjectLayout:
    subprocess.run(["cp", "-r", str(accepted), str(tmp_path / "project")], check=True)
    return ProjectLayout(tmp_path / "project")


def pushed(
    layout: ProjectLayout,
    options: PushOptions | None = None,
    repository: str = REPOSITORY,
    settings: Settings = SETTINGS,
) -> PushResult:
    return push(Project.from_parts(layout, settings), repository, options or PushOptions())


def run_push(
    layout: ProjectLayout, hub: Hub, *arguments: str, token: str | None = TOKEN, **more: str
) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in tiny_project.environment().items() if not k.startswith("HF_")}
    environment |= hub.environment(layout.root / "home", token) | more
    command = tiny_project.command("push", *arguments)
    return subprocess.run(command, cwd=layout.root, env=environment, capture_output=True, text=True, check=False)


def test_a_push_is_one_commit_with_card_signature_and_record(layout: ProjectLayout, hub: Hub, tmp_path: Path) -> None:
    metadata = CardMetadata(languages=("en", "de"), datasets=("org/requests",))
    result = pushed(layout, PushOptions(metadata=metadata))
    repository = hub.repositories[REPOSITORY]
    assert [commit.parent is None for commit in repository.commits] == [True, False]
    assert repository.files.keys() >= {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "model.sig", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert "config.json" not in repository.files
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert repository.files[name] == (layout.adapter / name).read_bytes()

    card = ModelCard(repository.files["README.md"].decode())
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", ["en", "de"], ["org/requests"])
    assert (card.data.library_name, card.data.base_model) == ("peft", None)  # the tiny base is not on the hub
    metric = EvaluationReport.load(layout.eval_report).scores["candidate"].metrics["perplexity"]
    found = next(entry for entry in card.data.eval_results or () if entry.metric_type == "perplexity")
    assert found.metric_value == metric.value
    assert found.metric_args == {"low": metric.low, "high": metric.high, "confidence": 0.95, "samples": metric.n}
    assert f"({metric.low:.4g} to {metric.high:.4g}" in str(found.metric_name).replace("95 % interval ", "")
    assert "FORCED" not in card.text
    quality, _, coverage = card.text.partition("## What was tested and what was not")
    assert "- Tested: instructions in quoted text (prompt injection)." in coverage
    assert "- Not tested: refusal of unsafe prompts." in coverage
    assert "| safety/injection" not in quality and "| safety/injection" in coverage.replace("\\_", "_")
    assert {entry.dataset_name for entry in card.data.eval_results or () if "safety/" in str(entry.metric_name)} == {
        "safety tests"
    }
    assert str(layout.root) not in card.content

    for name, data in repository.files.items():
        files.write_atomic(tmp_path / "download" / name, data)
    verdict = signature.verify_folder(tmp_path / "download", keys.read_keyring(layout.keyring))
    assert verdict.state == "trusted"
    [line] = read_lines(layout.pushes)
    assert line == json.loads(result.push.model_dump_json())
    assert (line["revision"], line["repository"], line["decision"]) == (
        repository.commits[-1].oid,
        REPOSITORY,
        "PROMOTE",
    )
    assert set(line["files"]) == set(repository.files)
    assert (line["forced"], line["signed_by"][:4]) == (None, "key ")
    text = format_push(result)
    assert f"is now in {hub.endpoint}/{REPOSITORY}, revision {line['revision']}" in text
    assert TOKEN not in text + layout.pushes.read_text()

    again = pushed(layout, PushOptions(metadata=metadata))
    assert (again.is_new, again.push) == (False, result.push)
    assert (len(repository.commits), len(hub.uploads), len(read_lines(layout.pushes))) == (2, 1, 1)
    assert not layout.push.exists()


def test_the_python_api_pushes_too(layout: ProjectLayout, hub: Hub) -> None:
    project = Project.from_parts(layout, SETTINGS)
    result = api_push(project, REPOSITORY, "gguf", is_private=True, license="mit", languages=["en"])
    repository = hub.repositories[REPOSITORY]
    assert repository.is_private
    assert repository.files.keys() == {"README.md", "model.sig", "support-Q8_0.gguf"}
    assert repository.files["support-Q8_0.gguf"] == (layout.export / "gguf" / "model-q8_0.gguf").read_bytes()
    card = ModelCard(repository.files["README.md"].decode())
    assert (card.data.license, card.data.library_name) == ("mit", None)
    assert [entry.metric_type for entry in card.data.eval_results or ()] == ["accuracy"]
    assert "llama-server --hf-repo ada/support --hf-file support-Q8_0.gguf" in card.text
    assert [note for note in result.notes if note.startswith("the card has no")] == [
        "the card has no datasets, because the data is not on the hub: --dataset ID, if it is"
    ]


def test_another_form_replaces_the_files_of_the_former_push(layout: ProjectLayout, hub: Hub) -> None:
    pushed(layout)
    pushed(layout, MERGED)
    found = hub.repositories[REPOSITORY].files
    expected = {p.name for p in layout.merged_model.iterdir()} | {"model.sig"}
    assert found.keys() == expected
    assert len(hub.repositories[REPOSITORY].commits) == 3
    assert [line["kind"] for line in read_lines(layout.pushes)] == ["adapter", "merged"]


def test_a_model_of_another_user_is_not_mixed_with_ours(layout: ProjectLayout, hub: Hub) -> None:
    hub.add(REPOSITORY, {"model.safetensors": b"theirs", "picture.png": b"a picture"})
    with pytest.raises(HubError, match=r"contains model\.safetensors, which this project did not push"):
        pushed(layout)
    hub.add(f"{OWNER}/pictures", {"picture.png": b"a picture"})
    pushed(layout, repository=f"{OWNER}/pictures")
    assert hub.repositories[f"{OWNER}/pictures"].files["picture.png"] == b"a picture"


def test_private_is_refused_for_a_public_repository(layout: ProjectLayout, hub: Hub) -> None:
    hub.add(REPOSITORY, {"notes.txt": b""})
    with pytest.raises(HubError, match="is public, but --private is set"):
        pushed(layout, PushOptions(is_private=True))
    assert hub.uploads == []


# ------------------------------------------------------------------------------------------------------------ the gate


def judged(layout: ProjectLayout, value: float) -> Settings:
    settings = SETTINGS.model_copy(
        update={"gate": Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=value),))}
    )
    gate(Project.from_parts(layout, settings))
    return settings


def test_a_model_that_the_gate_rejected_is_pushed_only_by_force(
    layout: ProjectLayout, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_ACTOR", "ada@example.org")
    settings = judged(layout, 0.9)
    with pytest.raises(
        GateError, match=r"the gate's decision about adapter [0-9a-f]{12} is REJECT(.|\n)*--force --reason"
    ):
        pushed(layout, settings=settings)
    for options, message in (
        (PushOptions(force=True), "--force needs a reason"),
        (PushOptions(reason="why"), "--reason is only used with --force"),
    ):
        with pytest.raises(SettingsError, match=message):
            pushed(layout, options, settings=settings)
    assert hub.repositories == {}
    result = pushed(layout, PushOptions(force=True, reason="the tests need *it*"), settings=settings)
    text = "FORCED by ada@example.org despite the gate's decision REJECT: the tests need"
    assert text in hub.repositories[REPOSITORY].files["README.md"].decode()
    assert any(text in warning for warning in result.warnings)
    [line] = read_lines(layout.pushes)
    assert line["forced"]["reason"] == "the tests need *it*"
    assert (line["decision"], line["forced"]["decision"], line["forced"]["actor"]) == (
        "REJECT", "REJECT", "ada@example.org",
    )  # fmt: skip


def test_a_verdict_that_todays_rules_do_not_give_does_not_count(layout: ProjectLayout, hub: Hub) -> None:
    stricter = SETTINGS.model_copy(
        update={"gate": Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=0.9),))}
    )
    with pytest.raises(GateError, match="has PROMOTE, but the current rules"):
        pushed(layout, settings=stricter)
    pushed(layout, PushOptions(force=True, reason="urgent"), settings=stricter)
    card = hub.repositories[REPOSITORY].files["README.md"].decode()
    assert "despite the lack of a current verdict about this adapter: urgent" in card
    assert "| Decision of the gate | none |" in card


def test_an_adapter_that_is_not_the_exported_model_is_not_pushed(layout: ProjectLayout, hub: Hub) -> None:
    bundle = ModelBundle.load(layout.bundle)
    assert bundle.merge is not None
    for changes in ({"adapters": {bundle.adapter_digest: 0.1}}, {"modules": ("q_proj",)}):
        with pytest.raises(SettingsError, match="only the exported model was judged; push --merged or --gguf"):
            _require_judged_adapter(bundle.model_copy(update={"merge": bundle.merge.model_copy(update=changes)}))
    _require_judged_adapter(bundle)


def test_a_verdict_about_another_adapter_does_not_count(layout: ProjectLayout, hub: Hub) -> None:
    document = json.loads(layout.verdict.read_bytes()) | {"adapter_digest": "f" * 64}
    with files.sealed_directory(layout.gate, "gate") as scratch:
        files.write_json(scratch / layout.verdict.name, document)
    with pytest.raises(GateError, match="is not about adapter"):
        pushed(layout)
    pushed(layout, PushOptions(force=True, reason="for a demonstration"))
    card = hub.repositories[REPOSITORY].files["README.md"].decode()
    assert "despite the lack of a current verdict about this adapter" in card


def test_a_champion_is_pushed_and_a_withdrawn_one_is_not(layout: ProjectLayout, hub: Hub) -> None:
    verdict = json.loads(layout.verdict.read_bytes())
    own: dict[str, Any] = {key: verdict[key] for key in ("model_digest", "adapter_digest", "run_id")}

    def entry(**changes: Any) -> Promotion:
        plain = own | {
            "id": "1", "time": "2026-01-01T00:00:00+00:00", "action": "promote", "actor": "ada", "version": 1,
            "previous_version": None, "decision": "PROMOTE", "previous": None,
        }  # fmt: skip
        return ledger.append_entry(layout.promotions, Promotion.model_validate(plain | changes))

    ledger_before = layout.promotions.read_bytes() if layout.promotions.exists() else b""
    head = entry(decision="HOLD", forced=True)
    ChampionFile(champion=Champion(version=1, **own), ledger=head.digest).save(layout.champion)
    with pytest.raises(GateError, match="is HOLD"):  # whatever the gate says when it compares it with itself
        pushed(layout)
    layout.promotions.write_bytes(ledger_before)
    head = entry()
    ChampionFile(champion=Champion(version=1, **own), ledger=head.digest).save(layout.champion)
    assert pushed(layout).push.decision == "PROMOTE"
    others = {"model_digest": "a" * 64, "adapter_digest": "b" * 64, "run_id": "0"}
    head = entry(id="2", action="rollback", version=2, previous_version=1, decision=None, **others)
    ChampionFile(champion=Champion(version=2, **others), ledger=head.digest).save(layout.champion)
    with pytest.raises(GateError, match="was rolled back on 2026-01-01"):
        pushed(layout, settings=SETTINGS)


# ----------------------------------------------------------------------------------------------- interruptions, faults


@pytest.mark.long
def test_a_killed_push_continues_and_the_repository_shows_all_or_nothing(
    layout: ProjectLayout, hub: Hub, started: list["subprocess.Popen[str]"]
) -> None:
    shards = sorted(layout.merged_model.glob("*.safetensors"))
    last = files.digests.hash_file(shards[-1])
    fault = hub.inject(Fault("PUT", f"lfs/{last}", "hold", times=1))
    environment = tiny_project.environment() | hub.environment(layout.root / "home")
    process = subprocess.Popen(
        tiny_project.command("push", REPOSITORY, "--merged"), cwd=layout.root, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    started.append(process)
    assert fault.held.wait(120)
    while len(hub.uploads) < len(shards) - 1:  # the other shards are uploaded beside it
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert hub.repositories[REPOSITORY].files == {}
    assert not layout.pushes.exists()
    done = run_push(layout, hub, REPOSITORY, "--merged")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(hub.uploads) == sorted(map(files.digests.hash_file, shards))  # each once
    repository = hub.repositories[REPOSITORY]
    assert len(repository.commits) == 2
    assert all(repository.files[shard.name] == shard.read_bytes() for shard in shards)
    assert len(read_lines(layout.pushes)) == 1


def test_a_commit_whose_answer_was_lost_is_found_again(layout: ProjectLayout, hub: Hub) -> None:
    hub.inject(Fault("POST", "/commit/", "lost", times=1))
    with pytest.raises(HubError, match="cannot be reached"):
        pushed(layout)
    assert not layout.pushes.exists()
    result = pushed(layout)
    assert (result.is_new, len(hub.repositories[REPOSITORY].commits), len(hub.uploads)) == (False, 2, 1)
    assert result.push.revision == hub.repositories[REPOSITORY].commits[-1].oid


def test_a_connection_that_breaks_leaves_nothing(
    layout: ProjectLayout, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client waits before each new attempt
    fault = hub.inject(Fault("PUT", "lfs/", "cut"))
    with pytest.raises(
        HubError,
        match=rf"{REPOSITORY}: the hub cannot be reached at {hub.endpoint} .*check HF_ENDPOINT and the network",
    ):
        pushed(layout)
    assert (hub.repositories[REPOSITORY].files, layout.pushes.exists()) == ({}, False)
    fault.times = 0
    hub.inject(Fault("PUT", "lfs/", "cut", times=2))  # the client itself tries again
    assert pushed(layout).is_new


@pytest.mark.parametrize(
    ("status", "message"),
    [(412, "another user has changed the repository"), (500, "the hub answers 500: as injected")],
)
def test_a_refused_commit_leaves_nothing(layout: ProjectLayout, hub: Hub, status: int, message: str) -> None:
    hub.inject(Fault("POST", "/commit/", "status", status))
    with pytest.raises(HubError, match=message):
        pushed(layout)
    assert (hub.repositories[REPOSITORY].files, layout.pushes.exists()) == ({}, False)


WRONG = "hf_WrongTokenOfNobody1234"
REFUSALS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "unreachable": (
        [REPOSITORY],
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
        "the hub cannot be reached at http://127.0.0.1:9",
    ),
    "no token": ([REPOSITORY], {"token": None}, "found no token of the hub; set HF_TOKEN, or run `hf auth login`"),
    "wrong token": ([REPOSITORY], {"token": WRONG}, "the hub answers 401: Invalid credentials in Authorization header"),
    "not yours": (["bob/support"], {}, "the hub answers 403: You don't have the rights to create a model under the"),
    "public, not yours": (["bob/public"], {}, "the hub answers 403: You don't have the rights to write to bob/public"),
    "not an id": (["support"], {}, "expected OWNER/NAME, such as your-name/support"),
    "license": ([REPOSITORY, "--license", "nonsense"], {}, '"license" must be one of'),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("unreachable", "wrong token", "not an id") else pytest.mark.long)
        for case in REFUSALS
    ],
)
def test_a_refused_push_says_why_once(layout: ProjectLayout, hub: Hub, case: str) -> None:
    arguments, more, message = REFUSALS[case]
    hub.add("bob/public", {"model.safetensors": b"of bob"})
    done = run_push(layout, hub, *arguments, "-q", **more)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ratchet push: ")
    assert message in done.stderr
    assert [line[:8] for line in done.stderr.splitlines() if not line.startswith("See ")] == ["ratchet "], done.stderr
    assert WRONG not in done.stdout + done.stderr
    assert all(not repository.files for name, repository in hub.repositories.items() if name != "bob/public")
    assert (hub.uploads, layout.pushes.exists()) == ([], False)


def test_a_token_of_the_own_login_is_used_and_not_shown(layout: ProjectLayout, hub: Hub) -> None:
    home = layout.root / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    done = run_push(layout, hub, REPOSITORY, "--json", token=None)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["push"]["revision"] == hub.repositories[REPOSITORY].commits[-1].oid
    shown = done.stdout + done.stderr + layout.pushes.read_text()
    assert TOKEN not in shown
    assert not any(TOKEN.encode() in data for data in hub.repositories[REPOSITORY].files.values())


def test_an_adapter_of_a_private_directory_is_not_published(layout: ProjectLayout, hub: Hub) -> None:
    card = json.loads(layout.base_card.read_bytes()) | {"source": "/home/ada/secret-base", "revision": None}
    files.write_json(layout.base_card, card)
    with pytest.raises(SettingsError, match="names the base as /home/ada/secret-base, which no other machine has"):
        pushed(layout)
    assert hub.repositories == {}

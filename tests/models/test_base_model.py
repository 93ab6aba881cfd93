"""Tests base models from a directory and from the hub's cache, pinned by content."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

import tiny_project
from ratchet.config.base import Base
from ratchet.errors import BaseModelError
from ratchet.models import base_model
from ratchet.stages import base
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty hub cache, without access to the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def pinned(layout: ProjectLayout, wanted: Base) -> BaseCard:
    base.base(Project.from_parts(layout, tiny_project.SETTINGS.model_copy(update={"base": wanted})))
    return BaseCard.load(layout.base_card)


def test_a_directory_is_pinned_by_content_and_stays_where_it_is(layout: ProjectLayout, built: Path) -> None:
    shutil.copytree(built, layout.root / "models" / "mine")
    card = pinned(layout, Base(source="models/mine"))
    assert card.architecture == "LlamaForCausalLM"
    assert card.revision is None
    assert base_model.locate(layout, card) == layout.root / "models" / "mine"
    assert not layout.tiny_model.exists()
    base_model.verify_files(base_model.locate(layout, card), card.files)
    (layout.root / "models" / "mine" / "config.json").write_text("{}")
    with pytest.raises(BaseModelError, match=r"config\.json: changed since the base was pinned"):
        base_model.verify_files(base_model.locate(layout, card), card.files)


def test_equal_models_have_equal_digests_in_any_directory(layout: ProjectLayout, built: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(built, layout.root / name)
    (layout.root / "b" / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    a, b = pinned(layout, Base(source="a")), pinned(layout, Base(source="b"))
    assert a.digest == b.digest
    assert (a.licence, b.licence) == (None, "mit")


def test_a_hub_id_is_resolved_to_its_commit(layout: ProjectLayout, built: Path, cache: Path) -> None:
    """The test uses the real hub client, on a cache in the client's own layout; cached models need no network."""
    repository = cache / "models--user--some-model"
    shutil.copytree(built, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    card = pinned(layout, Base(source="user/some-model", revision="main"))
    assert card.revision == COMMIT
    assert card.digest == pinned(layout, Base(source=str(built))).digest
    assert base_model.locate(layout, card) == repository / "snapshots" / COMMIT


def test_an_unavailable_hub_id_lists_cached_models(layout: ProjectLayout, cache: Path) -> None:
    wanted = Base(source="user/nothing", revision="main")
    with pytest.raises(BaseModelError, match=r"nothing at main: the hub cannot be reached .*no model is cached in "):
        pinned(layout, wanted)
    for name in ("models--a--one", "models--b--two", "datasets--c--three"):
        (cache / name / "snapshots" / COMMIT).mkdir(parents=True)
        (cache / name / "snapshots" / COMMIT / "config.json").write_text("{}")
    with pytest.raises(BaseModelError, match=r"cached models: a/one \(0123456789ab\); b/two \(0123456789ab\); check"):
        pinned(layout, wanted)


def test_an_invalid_hub_id_is_refused(layout: ProjectLayout) -> None:
    with pytest.raises(BaseModelError, match="not a valid hub id"):
        pinned(layout, Base(source="some body/no thing", revision="main"))


def test_weights_in_other_formats_are_no_part_of_a_model(layout: ProjectLayout, built: Path) -> None:
    before = pinned(layout, Base(source=str(built)))
    for name in ("more", "original"):
        shutil.copytree(built, layout.root / name)
    shutil.copyfile(built / base_model.WEIGHTS, layout.root / "more" / "consolidated.safetensors")
    (layout.root / "more" / "pytorch_model.bin").write_bytes(b"a pickle")
    after = pinned(layout, Base(source="more"))
    assert (after.digest, after.parameters) == (before.digest, before.parameters)
    (layout.root / "original" / base_model.WEIGHTS).rename(layout.root / "original" / "consolidated.safetensors")
    with pytest.raises(BaseModelError, match=r"transformers does not read consolidated\.safetensors"):
        pinned(layout, Base(source="original"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not an index of weights"),
        ("[]", "not an index of weights"),
        ('{"weight_map": {"a": "../b"}}', "not a file in the directory"),
        (
            '{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}',
            r"1 of 2 shards missing, first model-00002-of-00002\.safetensors",
        ),
    ],
    ids=["cut", "list", "elsewhere", "missing shard"],
)
def test_an_index_that_does_not_name_the_files(built: Path, tmp_path: Path, index: str, words: str) -> None:
    shutil.copytree(built, tmp_path / "sharded")
    (tmp_path / "sharded" / base_model.INDEX).write_text(index)
    with pytest.raises(BaseModelError, match=words):
        base_model.fingerprint(tmp_path / "sharded")


def test_the_same_texts_and_seed_give_the_same_tiny_base(tmp_path: Path, built: Path) -> None:
    layout = tiny_project.write(tmp_path / "elsewhere")
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    assert base_model.fingerprint(layout.tiny_model) == base_model.fingerprint(built)

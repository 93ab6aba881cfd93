"""Tests of semantic duplicates, with a model that gives synonyms the same vector."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import tiny_project
from ratchet.cli.main import main
from ratchet.config.base import Base
from ratchet.config.prepare import Prepare, SemanticDuplicateSettings
from ratchet.config.settings import Settings
from ratchet.data.semantic_duplicates import Embedder, choose_bits, cluster_semantic_duplicates
from ratchet.stages import base
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

pytest.importorskip("sentence_transformers")
SYNONYMS = [("buy", "purchase", "acquire"), ("parcel", "package", "shipment"), ("lost", "missing", "vanished")]
WORDS = [f"word{n}" for n in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a static model as model2vec does, which sentence-transformers reads."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    vocabulary = {word: n for n, word in enumerate(["[UNK]", *WORDS, *(w for group in SYNONYMS for w in group)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.random.default_rng(0).standard_normal((len(vocabulary), 64)).astype(np.float32)
    vectors[0] = 0
    for group in SYNONYMS:
        for word in group[1:]:
            vectors[vocabulary[word]] = vectors[vocabulary[group[0]]] + 0.02 * vectors[vocabulary[word]]
    folder = tmp_path_factory.mktemp("model") / "static"
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=vectors)], device="cpu").save(str(folder))
    return folder


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=8)) for _ in range(count)]


def test_rows_of_the_same_meaning_are_dropped_with_examples_and_other_rows_stay(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tiny_project.write(tmp_path / "base")
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    project = ProjectLayout(tmp_path / "project")
    for folder in (project.raw, project.tasks):
        folder.mkdir(parents=True)
    shutil.copytree(model, project.raw / "model")
    shared = sentences(20, seed=1)
    prompts = [f"{group[k]} {text}" for text in shared for group in SYNONYMS[:1] for k in range(3)] + sentences(
        60, seed=2
    )
    rows = [{"prompt": prompt, "response": "ok"} for prompt in prompts]
    (project.raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (project.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")

    def run(**changes: Any) -> DatasetCard:
        chosen: dict[str, Any] = {
            "sources": ("data/raw/rows.jsonl",), "deduplication": {"jaccard_threshold": None},
            "limits": {"semantic_duplicate": None}, "semantic_duplicates": {"model": "data/raw/model"},
        }  # fmt: skip
        settings = Settings(base=Base(source=str(layout.tiny_model)), prepare=Prepare(**(chosen | changes)))
        tiny_project.save(project, settings)
        if not project.base_card.exists():
            base.base(Project.from_parts(project, settings))
        prepare(Project.from_parts(project, settings))
        return DatasetCard.load(project.dataset_card)

    card = run()
    assert card.dropped["semantic_duplicate"].count == 40 and card.rows_out == 80
    report = card.semantic_duplicates
    assert report is not None and report.clusters == 20 and report.across_splits > 0
    assert {word for cluster in report.largest for word in cluster.texts[0].split()} & {*SYNONYMS[0]}
    page = project.dataset_page.read_text(encoding="utf-8")
    assert "The same meaning" in page and "20 clusters" in page
    assert run() == card
    (project.raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]), encoding="utf-8")
    assert run().digest == card.digest  # the order of the rows does not matter
    assert run(semantic_duplicates={}).rows_out == 120
    (project.raw / "model" / "pytorch_model.bin").write_bytes(b"\x80")
    tiny_project.save(project, Project(project.root).settings.model_copy(update={"prepare": Prepare(
        sources=("data/raw/rows.jsonl",), semantic_duplicates={"model": "data/raw/model"},  # type: ignore[arg-type]
    )}))  # fmt: skip
    assert main(["--project", str(project.root), "prepare"]) == 2
    assert "pytorch_model.bin, which may be a pickle" in capsys.readouterr().err


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9, 0.95, 0.99])
def test_nineteen_of_twenty_pairs_at_the_threshold_are_found(threshold: float, tmp_path: Path) -> None:
    """Embeddings of exactly this cosine, among others; the embedder is replaced by a table of vectors."""
    draw, pairs = np.random.default_rng(3), 400
    first = draw.standard_normal((pairs, 64))
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    other = draw.standard_normal((pairs, 64))
    other -= (other * first).sum(axis=1, keepdims=True) * first
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    cosine = threshold + 0.002
    vectors = np.concatenate([first, cosine * first + np.sqrt(1 - cosine**2) * other]).astype(np.float16)

    class Table(Embedder):
        def __init__(self) -> None:
            pass

        def embed(self, texts: Any) -> Any:
            return vectors[[int(text) for text in texts]]

    clusters = cluster_semantic_duplicates(
        np.arange(2 * pairs),
        lambda rows: rows,
        str,
        Table(),
        SemanticDuplicateSettings(model="m", threshold=threshold),
        tmp_path,
    )
    found = {(cluster.kept, *cluster.dropped) for cluster in clusters}
    assert all(b - a == pairs for a, b in found)  # verified: no other pair is that similar
    assert len(found) > 0.92 * pairs
    assert choose_bits(0.7) < choose_bits(threshold) or threshold == 0.7


@pytest.mark.parametrize("content", [{}, {"modules.json": "[]"}, {"modules.json": "[", "model.safetensors": "x"}])
def test_a_folder_that_is_no_model_is_refused(content: dict[str, str], tmp_path: Path, model: Path) -> None:
    from ratchet.errors import DataError

    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"prepare\.semantic_duplicates\.model: data/raw/m "):
        Embedder(tmp_path, "data/raw/m")

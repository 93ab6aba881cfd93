"""Tests lineage and bill of materials: contents, no secrets, and equal bytes for equal inputs."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import ComponentType

from ratchet.config.evaluate import Evaluate
from ratchet.config.export import Export
from ratchet.config.prepare import Prepare, SourceSettings
from ratchet.config.promote import HookSettings, Promote
from ratchet.config.settings import Settings
from ratchet.registry import keys, lineage, pickle_scan, signature
from ratchet.registry.lineage import ModelOrigin
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard, DroppedRows, LengthDistribution, NearDuplicateReport
from ratchet.storage.records.training import TrainReport

ROW = "a row of the data that is private"
BASE = BaseCard(
    source="Some-Org/Model-1B", revision="ABCDEF0123", digest="b" * 64, files={"config.json": "c" * 64},
    architecture="LlamaForCausalLM", parameters=7, licence="apache-2.0",
)  # fmt: skip
TRAINED = TrainReport(
    run_id="0123456789ab", adapter_digest="a" * 64, base_digest="b" * 64, data_digest="d" * 64, steps=7,
    planned_steps=9, best_step=6, kept_step=6, validation_loss={6: 1.0}, final_train_loss=1.0, trained_tokens=70,
    input_tokens=700, trainable_parameters=10, total_parameters=1000,
)  # fmt: skip
LENGTHS = LengthDistribution(least=1, median=2, p95=3, greatest=4, total=5, trained=6)
DATA = DatasetCard(
    digest="d" * 64, sources={"data/raw/rows.jsonl": "e" * 64}, base_digest="b" * 64, task="text", rows_in=9,
    rows_out=8, dropped={"empty": DroppedRows(count=1, examples=(ROW,))},
    splits={"train": 6, "validation": 1, "test": 1},
    lengths={"train": LENGTHS}, labels={ROW: 3}, notes=(ROW,),
    near_duplicates=NearDuplicateReport(threshold=0.8, shingle_words=3, clusters=0, across_splits=0, largest=()),
)  # fmt: skip
SETTINGS = Settings(export=Export(data_licence="CC-BY-4.0"))


def origin(folder: Path) -> ModelOrigin:
    folder.mkdir(exist_ok=True)
    return ModelOrigin(BASE, TRAINED, DATA, pickle_scan.scan_directory(folder), "f" * 64)


def write_bill(path: Path, base: BaseCard = BASE, data_licence: str | None = "CC-BY-4.0") -> str:
    return lineage.write_sbom(path, "tickets", "9" * 64, base, DATA, data_licence)


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the bill of materials of the plain contents."""
    path = tmp_path_factory.mktemp("bill") / "sbom.json"
    assert write_bill(path) == digests.hash_file(path)
    return path


def test_the_lineage_names_everything_that_a_model_came_from(tmp_path: Path) -> None:
    found = lineage.build_lineage(SETTINGS, origin(tmp_path / "base"), "1" * 64)
    assert (found.base, found.data_digest, found.data_rows) == (BASE, DATA.digest, DATA.splits)
    assert (found.run_id, found.kept_step, found.recipe) == (TRAINED.run_id, 6, "f" * 64)
    assert (found.data_licence, found.sbom_digest) == ("CC-BY-4.0", "1" * 64)
    assert set(found.settings) == {"base", "prepare", "train", "evaluate", "export", "gate"}
    assert Settings.model_validate_json(json.dumps(found.settings)).train == SETTINGS.train
    assert found.code.startswith(version("ratchet-llm"))


SECRETS = {
    "https://ann:hunter22@example.org/x.jsonl": "https://***@example.org/x.jsonl",
    "s3://hunter22@bucket/rows": "s3://***@bucket/rows",
    "https://e.org/f?X-Amz-Signature=hunter22&page=2": "https://e.org/f?X-Amz-Signature=***&page=2",
    "https://e.org/f?sv=1&sig=hunter22": "https://e.org/f?sv=1&sig=***",
    "https://e.org/f?access_token=hunter22#x": "https://e.org/f?access_token=***#x",
    "hf_hunter22hunter22hunter22": "***",
    "use ghp_hunter22hunter22hunter22!": "use ***!",
    "eyJhunter22x.eyJhunter22y.hunter22": "***",
    "/home/hunter22/bases/qwen2/": "***/qwen2",
    "~/bases/qwen2": "***/qwen2",
}
HARMLESS = (
    "https://example.org/a@b.jsonl", "data/raw/rows.jsonl", "Qwen/Qwen2.5-1.5B-Instruct", "q_proj|k_proj",
    "https://e.org/f?page=2&monkey=1", "ann@example.org", "hf_dataset", "sk-learn", "a key=value pair",
)  # fmt: skip


def test_texts_like_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    for text, wanted in SECRETS.items():
        assert lineage.mask_secrets(text) == wanted
    for text in HARMLESS:
        assert lineage.mask_secrets(text) == text
    secret = next(iter(SECRETS))
    settings = SETTINGS.model_copy(update={"prepare": Prepare(sources=(SourceSettings.model_construct(files=secret),))})
    found = lineage.build_lineage(settings, origin(tmp_path / "base"), "1" * 64)
    assert found.settings["prepare"]["sources"][0]["files"] == SECRETS[secret]


def test_no_secret_and_no_row_enters_a_bundle(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SIGSTORE_ID_TOKEN", "RATCHET_SIGNING_PASSWORD", "MY_SECRET"):
        monkeypatch.setenv(name, "hunter22")
    address = "https://ann:hunter22@example.org/rows.jsonl"
    settings = SETTINGS.model_copy(
        update={
            "prepare": Prepare(sources=(SourceSettings.model_construct(files=address),)),
            "evaluate": Evaluate(),
            "promote": Promote(hooks=(HookSettings(webhook="https://example.org/hook?token=hunter22"),)),
        }
    )
    folder = tmp_path / "bundle"
    folder.mkdir()
    bill = write_bill(folder / "sbom.json")
    lineage.build_lineage(settings, origin(tmp_path / "base"), bill).save(folder / "bundle-lineage.json")
    signature.sign_folder(folder, keys.load_signer(project))
    private = project.private_key.read_text().splitlines()[1]
    for path in folder.iterdir():
        text = path.read_text()
        assert not any(secret in text for secret in ("hunter22", ROW, private, str(tmp_path))), path.name


def test_the_bill_names_libraries_base_and_data(bill: Path) -> None:
    value = json.loads(bill.read_text())
    assert (value["bomFormat"], value["specVersion"], value["version"]) == ("CycloneDX", "1.6", 1)
    bom = Bom.from_json(value)  # type: ignore[attr-defined]
    assert bom.validate()
    parts = {part.bom_ref.value: part for part in bom.components}
    torch = parts[next(ref for ref in parts if ref.startswith("pkg:pypi/torch@"))]
    assert (torch.type, torch.version) == (ComponentType.LIBRARY, version("torch"))
    assert torch.licenses
    for direct in ("peft", "ratchet-llm", "ruamel-yaml", "scikit-learn", "huggingface-hub"):
        assert any(ref.startswith(f"pkg:pypi/{direct}@") for ref in parts), direct
    assert any(ref.startswith("pkg:pypi/joblib@") for ref in parts)  # a dependency of scikit-learn
    assert not any(ref.startswith(("pkg:pypi/pytest@", "pkg:pypi/mypy@")) for ref in parts)  # not needed at run time
    assert parts["base"].type == ComponentType.MACHINE_LEARNING_MODEL
    assert parts["base"].purl.to_string() == "pkg:huggingface/Some-Org/Model-1B@abcdef0123"
    assert [one.id for one in parts["base"].licenses] == ["Apache-2.0"]
    assert parts["data"].type == ComponentType.DATA
    assert [one.id for one in parts["data"].licenses] == ["CC-BY-4.0"]
    subject = bom.metadata.component
    assert (subject.type, subject.name, subject.version) == (ComponentType.MACHINE_LEARNING_MODEL, "tickets", "9" * 12)
    needed = {one["ref"]: one.get("dependsOn", []) for one in value["dependencies"]}
    assert {"base", "data"} < set(needed["model"])
    assert any(ref.startswith("pkg:pypi/joblib@") for name in needed if "scikit-learn@" in name for ref in needed[name])


def test_equal_contents_give_equal_bytes_and_others_another_serial_number(bill: Path, tmp_path: Path) -> None:
    write_bill(tmp_path / "same.json")
    assert (tmp_path / "same.json").read_bytes() == bill.read_bytes()
    assert b"timestamp" not in bill.read_bytes()
    changed = BASE.model_copy(update={"licence": "my own terms", "revision": None, "source": "../models/mine"})
    write_bill(tmp_path / "other.json", changed, None)
    other = json.loads((tmp_path / "other.json").read_bytes())
    assert other["serialNumber"] != json.loads(bill.read_bytes())["serialNumber"]
    parts = {part["bom-ref"]: part for part in other["components"]}
    assert parts["base"]["licenses"] == [{"license": {"name": "my own terms"}}]
    assert "purl" not in parts["base"]
    assert "licenses" not in parts["data"]

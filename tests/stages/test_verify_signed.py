"""Tests of `ratchet verify` on signed directories: promoted models, their copies, exports and formats."""

import json
import shutil
from pathlib import Path

import pytest

import promoted_models
from ratchet.cli.verify import format_verification
from ratchet.errors import DataError, ProjectError, SettingsError
from ratchet.registry import keys, model_store, signature
from ratchet.registry.deployment import release
from ratchet.stages.deploy import DeployOptions, deploy
from ratchet.stages.project import Project
from ratchet.stages.verify import verify
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact, ModelBundle

FORMATS = ("hf", "gguf/q8_0", "gguf/f16", "onnx/int8")


def promote_fake_model(layout: ProjectLayout) -> Path:
    return layout.promoted_model(promoted_models.promote_fake_model(layout, "a", FORMATS).model_digest)


def seal_again(folder: Path, kind: str = "model") -> None:
    """Seal the directory again, as any program with write access can."""
    (folder / files.MANIFEST).unlink()
    files.seal_directory(folder, kind)


def said(*paths: Path, **options: Path) -> tuple[bool, list[str]]:
    report = verify(paths, **options)
    return report.is_intact, format_verification(report).splitlines()


@pytest.fixture(autouse=True)
def outside_of_any_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    monkeypatch.setenv("RATCHET_ACTOR", "ada")
    (tmp_path / "outside").mkdir()
    monkeypatch.chdir(tmp_path / "outside")


def own(layout: ProjectLayout) -> str:
    return str(keys.own_fingerprint(layout))


def test_a_signed_model_is_intact_and_its_signer_is_named(project: ProjectLayout) -> None:
    folder = promote_fake_model(project)
    whole, lines = said(project.root)
    assert whole
    assert lines[0].startswith(f"ok  {folder}  model  ")
    assert lines[1:] == [f"ok  {folder}/model.sig  signature  signed by key {own(project)[:16]} (trusted)"]


def test_a_model_without_a_trusted_signature_is_not_intact(project: ProjectLayout) -> None:
    folder = promote_fake_model(project)
    signed = (folder / signature.SIGNATURE).read_bytes()
    (folder / signature.SIGNATURE).unlink()
    seal_again(folder)
    whole, lines = said(folder)
    assert not whole
    assert lines[1] == f"UNSIGNED {folder}: found no signature (model.sig); promote the model again"
    (folder / signature.SIGNATURE).write_bytes(signed)
    seal_again(folder)
    assert said(folder)[0]
    name = own(project)
    keys.revoke_trust(project, name, "stolen")
    whole, lines = said(folder)
    assert not whole
    problem = f"signed by key {name[:16]}, which is revoked (stolen); promote the model again"
    assert lines[1] == f"REVOKED {folder}: model.sig: {problem}"
    project.keyring.unlink()
    whole, lines = said(folder)
    assert not whole
    problem = f"signed by key {name[:16]}, which this project does not trust"
    assert lines[1].startswith(f"UNTRUSTED {folder}: model.sig: {problem}")


def test_a_flipped_byte_is_named_and_a_new_seal_does_not_hide_a_change(project: ProjectLayout) -> None:
    folder = promote_fake_model(project)
    weights = folder / "gguf" / "model-q8_0.gguf"
    content = weights.read_bytes()
    weights.write_bytes(content.swapcase())
    damaged = f"DAMAGED {folder}: gguf/model-q8_0.gguf: content differs from the manifest (SHA-256)"
    assert said(folder) == (False, [damaged])
    weights.write_bytes(content)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "model.safetensors").write_bytes(b"another")
    seal_again(folder)
    whole, lines = said(folder)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {folder}: adapter/model.safetensors: was added after the model was signed")


def test_a_copy_is_verified_with_the_named_or_the_enclosing_project_or_a_key(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy of tuesday"
    shutil.copytree(promote_fake_model(project), copy)
    name = own(project)[:16]
    whole, lines = said(copy)
    assert not whole
    assert lines[1].startswith(f"UNTRUSTED {copy}: claims to be signed by key {name}, but no project says")
    assert "--project DIR" in lines[1]
    assert "--public-key FILE" in lines[1]
    assert said(copy, project=project.root)[0]
    public = tmp_path / "key.pem"
    public.write_text(keys.read_keyring(project.keyring).keys[0].public)
    whole, lines = said(copy, public_key=public)
    assert whole
    assert lines[1].endswith(f"signed by key {name} (trusted)")
    stranger = ProjectLayout(tmp_path / "stranger")
    public.write_text(keys.create_key_pair(stranger).public)
    whole, lines = said(copy, public_key=public)
    assert not whole
    assert lines[1].startswith(f"UNTRUSTED {copy}: model.sig: signed by key {name}")
    with pytest.raises(ProjectError, match="no Ratchet project"):
        said(copy, project=tmp_path / "outside")
    with pytest.raises(SettingsError, match="expected a public key in PEM format"):
        said(copy, public_key=copy / "bundle.json")
    monkeypatch.chdir(project.experiments)
    assert said(copy)[0]


def exported(layout: ProjectLayout, told: ModelBundle) -> Path:
    with files.sealed_directory(layout.export, "export") as scratch:
        promoted_models.write_fake_export(scratch, "a", FORMATS)
        told.save(scratch / "bundle.json")
    return layout.export


def test_the_formats_of_an_export_are_the_measured_ones(project: ProjectLayout) -> None:
    told = promoted_models.promote_fake_model(project, "a", FORMATS)

    def of_formats(*formats: ExportArtifact) -> tuple[bool, list[str]]:
        changes = {"artifacts": formats, "model_digest": model_store.model_digest(formats)}
        return said(exported(project, told.model_copy(update=changes)))

    made = told.artifacts
    assert of_formats(*made)[0]
    for form in made:
        whole, lines = of_formats(
            *(one.model_copy(update={"digest": "0" * 64}) if one is form else one for one in made)
        )
        assert not whole
        named = f"{model_store.artifact_path(form)}: differs from format {form.name} in bundle.json"
        assert lines[1].startswith(f"DAMAGED {project.export}: {named}")
    _, lines = of_formats(*made, made[2].model_copy(update={"name": "gguf/bf16", "type": "bf16"}))
    assert "gguf/model-bf16.gguf: missing; format gguf/bf16 is in bundle.json" in lines[1]
    _, lines = said(exported(project, told.model_copy(update={"model_digest": "0" * 64})))
    assert "bundle.json: model_digest does not match the digests of its formats" in lines[1]
    earlier = {"artifacts": (), "model_digest": "m" * 64}  # bundle.json of an export by an earlier version
    assert said(exported(project, told.model_copy(update=earlier)))[0]


@pytest.mark.parametrize(("field", "file"), [("evaluation", "eval.json"), ("verdict", "verdict.json")])
def test_evaluation_and_verdict_are_the_ones_of_the_bundle(project: ProjectLayout, field: str, file: str) -> None:
    told = promoted_models.promote_fake_model(project, "a", FORMATS)
    folder = project.promoted_model("f" * 64)
    with files.sealed_directory(folder, "model") as scratch:
        promoted_models.write_fake_export(scratch, "a", FORMATS)
        told.model_copy(update={field: "0" * 64}).save(scratch / "bundle.json")
        signature.sign_folder(scratch, keys.load_signer(project))
    whole, lines = said(folder)
    assert not whole
    assert f"{file}: differs from its digest in bundle.json" in lines[1]


def test_an_invalid_bundle_is_damage(project: ProjectLayout) -> None:
    folder = project.promoted_model("f" * 64)
    with files.sealed_directory(folder, "model") as scratch:
        (scratch / "bundle.json").write_text(json.dumps({"model_digest": 1}))
    whole, lines = said(folder)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {folder}: bundle.json: not a ModelBundle")
    with pytest.raises((DataError, SettingsError)):
        verify([folder / "nothing"])


def test_a_deployment_is_compared_with_the_signed_model(project: ProjectLayout, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / release.OWNER).write_text("{}")
    assert said(served) == (True, [f"ok  {served}  deployment  nothing is deployed in it yet"])
    (served / release.OWNER).unlink()
    promote_fake_model(project)
    deploy(Project.from_parts(project, promoted_models.SETTINGS), served, DeployOptions(smoke_test=False))
    target = (served / "current").resolve()
    whole, lines = said(served, project=project.root)
    assert whole
    assert lines[0].startswith(f"ok  {target}  release  ")
    assert lines[1] == f"ok  {target}/model.sig  signature  signed by key {own(project)[:16]} (trusted)"
    assert said(target, project=project.root) == (True, lines)
    assert said(target)[1][1].startswith(f"UNTRUSTED {target}: claims to be signed by key ")

    (target / "gguf" / "model-q8_0.gguf").write_bytes(b"another model")
    seal_again(target, release.KIND)
    whole, lines = said(served, project=project.root)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {target}: gguf/model-q8_0.gguf: differs from the signed file")

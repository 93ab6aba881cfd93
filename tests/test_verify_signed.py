"""`ratchet verify` of what is signed: promoted models, copies of them elsewhere, exports and their forms."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet import digest, files
from ratchet.bundle import artifacts, keyring, keys, signature
from ratchet.deployment import place, release
from ratchet.deployment.release import Release
from ratchet.errors import DataError, SettingsError
from ratchet.layout import Layout
from ratchet.records_export import Artifact, Bundle, Closeness, Parity
from ratchet.verify import verify

CLOSENESS = Closeness(
    rows=1, positions=1, max_difference=0, mean_difference=0, kl=0, max_kl=0, greedy_agreement=1, perplexity=1,
    reference_perplexity=1,
)  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "hf": {"kind": "hf", "type": "float32", "files": {"hf/config.json": b"{}", "hf/model.safetensors": b"weights"}},
    "gguf/q8_0": {"kind": "gguf", "type": "q8_0", "files": {"gguf/model-q8_0.gguf": b"GGUF"}},
    "gguf/f16": {"kind": "gguf", "type": "f16", "files": {"gguf/model-f16.gguf": b"GGUF f16"}},
    "onnx/int8": {"kind": "onnx", "type": "int8", "files": {"onnx/int8/model.onnx": b"o", "onnx/int8/a/b": b"x"}},
}


def artifact(name: str) -> Artifact:
    """A form as export records it: the digest of its files, by their names in its own place."""
    form = FORMS[name]
    place = artifacts.place(Artifact.model_construct(name=name, kind=form["kind"], type=form["type"]))
    inner = {
        file.removeprefix(f"{place}/") if file != place else Path(file).name: digest.of_bytes(content)
        for file, content in form["files"].items()
    }
    return Artifact(
        name=name, kind=form["kind"], type=form["type"], digest=digest.of_files(inner), size_bytes=1, runtime="r",
        closeness=CLOSENESS, task=None, texts_tokenised=1, texts=1, tokens_per_second=1, threads=1,
    )  # fmt: skip


def bundle(**changes: Any) -> Bundle:
    forms = tuple(map(artifact, FORMS))
    parity = Parity(rows=1, tokens=2, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0)
    plain: dict[str, Any] = {
        "model_digest": artifacts.model_digest(forms), "adapter_digest": "a" * 64, "base_digest": "b" * 64,
        "data_digest": "d" * 64, "run_id": "r", "merge_base": "original", "dtype": "float32", "size_bytes": 1,
        "parity": parity, "artifacts": forms,
    }  # fmt: skip
    return Bundle(**plain | changes)


def fill(folder: Path, told: Bundle) -> None:
    for form in FORMS.values():
        for name, content in form["files"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    told.save(folder / "bundle.json")


def promoted(layout: Layout, sign: bool = True, **changes: Any) -> Path:
    folder = layout.promoted_model("f" * 64)
    with files.sealed_directory(folder, "model") as scratch:
        fill(scratch, bundle(**changes))
        if sign:
            signature.sign(scratch, keys.signer(layout))
    return folder


def said(*paths: Path, **options: Path) -> tuple[bool, list[str]]:
    whole, text = verify(paths, **options)
    return whole, text.splitlines()


@pytest.fixture(autouse=True)
def outside_of_any_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)
    (tmp_path / "outside").mkdir()
    monkeypatch.chdir(tmp_path / "outside")


def own(layout: Layout) -> str:
    return str(keys.own_fingerprint(layout))


def test_a_signed_model_is_whole_and_its_signer_is_named(project: Layout) -> None:
    folder = promoted(project)
    whole, lines = said(project.root)
    assert whole
    assert lines[0].startswith(f"ok  {folder}  model  ")
    assert lines[1:] == [f"ok  {folder}/model.sig  signature  signed by key {own(project)[:16]} (trusted)"]


def test_what_is_not_signed_or_by_nobody_who_is_trusted_is_not_whole(project: Layout, tmp_path: Path) -> None:
    folder = promoted(project, sign=False)
    whole, lines = said(folder)
    assert not whole
    assert lines[1] == f"UNSIGNED {folder}: not signed (no model.sig); promote the model again"
    promoted(project)
    name = own(project)
    keys.revoke(project, name, "stolen")
    whole, lines = said(folder)
    assert not whole
    assert lines[1] == f"REVOKED {folder}: model.sig: signed by key {name[:16]}, which is revoked: stolen"
    project.keyring.unlink()
    whole, lines = said(folder)
    assert not whole
    assert lines[1].startswith(f"UNTRUSTED {folder}: model.sig: signed by key {name[:16]}, which is not trusted here")


def test_a_flipped_byte_is_named(project: Layout) -> None:
    folder = promoted(project)
    (folder / "gguf" / "model-q8_0.gguf").write_bytes(b"GGUG")
    whole, lines = said(folder)
    assert not whole
    assert lines == [f"DAMAGED {folder}: gguf/model-q8_0.gguf: content differs from the manifest (SHA-256)"]


def test_a_new_seal_on_other_bytes_does_not_help(project: Layout) -> None:
    """Whoever can write the folder can write its manifest, and bundle.json; not its signature."""
    folder = promoted(project)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "model.safetensors").write_bytes(b"another")
    (folder / files.MANIFEST).unlink()
    files.seal(folder, "model")
    whole, lines = said(folder)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {folder}: adapter/model.safetensors: was added after the model was signed")


def test_a_copy_elsewhere_is_judged_by_the_named_project_or_key(project: Layout, tmp_path: Path) -> None:
    copy = tmp_path / "copy of tuesday"
    shutil.copytree(promoted(project), copy)
    name = own(project)[:16]
    whole, lines = said(copy)
    assert not whole
    assert lines[1].startswith(f"UNTRUSTED {copy}: says that it is signed by key {name}, and no project here says")
    assert "--project DIR" in lines[1]
    assert "--public-key FILE" in lines[1]
    assert said(copy, project=project.root)[0]
    public = tmp_path / "key.pem"
    public.write_text(keyring.read(project.keyring).keys[0].public)
    whole, lines = said(copy, public_key=public)
    assert whole
    assert lines[1].endswith(f"signed by key {name} (trusted)")
    stranger = Layout(tmp_path / "stranger")
    public.write_text(keys.make(stranger).public)
    whole, lines = said(copy, public_key=public)
    assert not whole
    assert lines[1].startswith(f"UNTRUSTED {copy}: model.sig: signed by key {name}")
    with pytest.raises(SettingsError, match="no Ratchet project"):
        said(copy, project=tmp_path / "outside")
    with pytest.raises(SettingsError, match="holds no public key"):
        said(copy, public_key=copy / "bundle.json")


def test_inside_a_project_its_own_keys_count(project: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(promoted(project), copy)
    monkeypatch.chdir(project.experiments)
    assert said(copy)[0]


def exported(layout: Layout, told: Bundle) -> Path:
    with files.sealed_directory(layout.export, "export") as scratch:
        fill(scratch, told)
    return layout.export


def test_the_forms_of_an_export_are_those_that_were_measured(project: Layout) -> None:
    assert said(exported(project, bundle()))[0]
    assert said(exported(project, bundle(artifacts=(), model_digest="m" * 64)))[0]  # of an earlier version


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_another_is_named(project: Layout, name: str) -> None:
    forms = [artifact(one) for one in FORMS]
    other = tuple(f.model_copy(update={"digest": "0" * 64}) if f.name == name else f for f in forms)
    whole, lines = said(exported(project, bundle(artifacts=other, model_digest=artifacts.model_digest(other))))
    assert not whole
    place = artifacts.place(artifact(name))
    assert lines[1].startswith(f"DAMAGED {project.export}: {place}: form {name} of bundle.json is not the one that was")


def test_a_form_that_is_missing_and_another_model_digest_are_named(project: Layout) -> None:
    absent = artifact("gguf/f16").model_copy(update={"name": "gguf/bf16", "type": "bf16"})
    forms = (*map(artifact, FORMS), absent)
    lines = said(exported(project, bundle(artifacts=forms, model_digest=artifacts.model_digest(forms))))[1]
    assert "gguf/model-bf16.gguf: form gguf/bf16 of bundle.json is missing" in lines[1]
    lines = said(exported(project, bundle(model_digest="0" * 64)))[1]
    assert "bundle.json: its model_digest is not that of its forms" in lines[1]


@pytest.mark.parametrize(("field", "file"), [("evaluation", "eval.json"), ("verdict", "verdict.json")])
def test_what_speaks_for_a_model_is_what_its_bundle_names(project: Layout, field: str, file: str) -> None:
    folder = promoted(project, **{field: "0" * 64})
    whole, lines = said(folder)
    assert not whole
    assert f"{file}: is not the one that bundle.json names" in lines[1]


def test_a_bundle_that_is_none_is_damage(project: Layout) -> None:
    folder = project.promoted_model("f" * 64)
    with files.sealed_directory(folder, "model") as scratch:
        (scratch / "bundle.json").write_text(json.dumps({"model_digest": 1}))
    whole, lines = said(folder)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {folder}: bundle.json: not a Bundle")
    with pytest.raises((DataError, SettingsError)):
        verify([folder / "nothing"])


def released(layout: Layout, root: Path, other: bytes | None = None) -> Path:
    """A directory that one form was deployed into, by the records that deployment writes."""
    folder = promoted(layout)
    told = Bundle.load(folder / "bundle.json")
    form = artifact("gguf/q8_0")
    names = ("bundle.json", "gguf/model-q8_0.gguf", signature.SIGNATURE)
    record = Release(
        version=1, model_name="m", model_digest=told.model_digest, form=form.name, artifact_digest=form.digest,
        signature=digest.of_file(folder / signature.SIGNATURE), signed_by=own(layout), origins={n: n for n in names},
    )  # fmt: skip
    target = root / "releases" / record.name
    with files.sealed_directory(target, release.KIND) as scratch:
        for name in names:
            (scratch / name).parent.mkdir(exist_ok=True)
            swapped = other if other is not None and name.endswith(".gguf") else None
            (scratch / name).write_bytes(swapped or (folder / name).read_bytes())
        record.save(scratch / release.RECORD)
    (root / place.OWNER).write_text("{}")
    return target


def test_what_was_deployed_is_compared_with_what_was_signed(project: Layout, tmp_path: Path) -> None:
    target = released(project, tmp_path / "served")
    whole, lines = said(tmp_path / "served", project=project.root)
    assert whole
    assert lines[0].startswith(f"ok  {target}  release  ")
    assert lines[1] == f"ok  {target}/model.sig  signature  signed by key {own(project)[:16]} (trusted)"
    assert said(target, project=project.root) == (True, lines)
    assert said(target)[1][1].startswith(f"UNTRUSTED {target}: says that it is signed by key ")


def test_a_release_that_was_sealed_anew_on_other_bytes_is_damaged(project: Layout, tmp_path: Path) -> None:
    target = released(project, tmp_path / "served", other=b"another model")
    whole, lines = said(tmp_path / "served", project=project.root)
    assert not whole
    assert lines[1].startswith(f"DAMAGED {target}: gguf/model-q8_0.gguf: not as it was signed")


def test_a_directory_without_releases_is_whole(project: Layout, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / place.OWNER).write_text("{}")
    assert said(tmp_path / "served") == (True, [f"ok  {tmp_path / 'served'}  deployment  nothing is deployed in it"])

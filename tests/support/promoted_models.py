"""Promoted models in a project in the state after a promotion: sealed and signed directory, ledger, champion file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.config.settings import Settings
from ratchet.registry import keys, ledger, model_store, signature
from ratchet.registry.deployment import server_files
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import DistributionDistance, ExportArtifact, ExportProbe, MergeParity, ModelBundle
from ratchet.storage.records.gate import Champion, ForcedPromotion, Promotion, read_champion

SETTINGS = Settings()
NAME = SETTINGS.promote.model_name
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "dtype": "float32"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def distance() -> DistributionDistance:
    return DistributionDistance(
        rows=1, positions=1, max_difference=0, mean_difference=0, kl=0.001, max_kl=0, greedy_agreement=1, perplexity=2,
        reference_perplexity=2,
    )  # fmt: skip


def artifact(root: Path, name: str, probes: Sequence[ExportProbe] = ()) -> ExportArtifact:
    """Describe the format with this name in a directory, as an export does."""
    kind, _, type_ = name.partition("/")
    where = root / (f"gguf/model-{type_}.gguf" if kind == "gguf" else name)
    own = [where] if where.is_file() else sorted(p for p in where.rglob("*") if p.is_file())
    start = where.parent if where.is_file() else where
    return ExportArtifact(
        name=name, kind=kind, type=type_ or "float32", probes=tuple(probes), runtime="some runtime 1", threads=1,  # type: ignore[arg-type]
        digest=digests.hash_tree(start, [p.relative_to(start).as_posix() for p in own]),
        size_bytes=sum(p.stat().st_size for p in own), distance=distance(), task=None, texts_tokenised=1, texts=1,
        tokens_per_second=1.0,
    )  # fmt: skip


def write_fake_export(root: Path, model: str, formats: Sequence[str] = ("hf", "gguf/q8_0")) -> None:
    """Write formats with fake contents. This suffices if no server is started."""
    hf = {"config.json": json.dumps(CONFIG), "model.safetensors": f"weights of {model}", "README.md": f"# {model}\n"}
    hf |= {
        "chat_template.jinja": CHATML,
        "tokenizer_config.json": "{}",
        "generation_config.json": '{"eos_token_id": 3}',
    }
    hf["tokenizer.json"] = '{"added_tokens": [{"id": 3, "content": "<|im_end|>"}]}'
    contents = {f"hf/{name}": content for name, content in hf.items()}
    for form in formats:
        if form.startswith("gguf/"):
            contents[f"gguf/model-{form[5:]}.gguf"] = f"{form} of {model}"
        elif form.startswith("onnx/"):
            contents |= {f"{form}/model.onnx": f"{form} of {model}", f"{form}/tokenizer.json": "{}"}
    for name, content in contents.items():
        files.make_directory((root / name).parent)
        (root / name).write_text(content, encoding="utf-8")


def store_fake_model(
    layout: ProjectLayout,
    source: Path,
    formats: Sequence[str],
    probes: Mapping[str, Sequence[ExportProbe]] = {},
    forced: ForcedPromotion | None = None,
) -> ModelBundle:
    """Store the formats in `source` as the sealed and signed directory of a promoted model."""
    made = [artifact(source, form, probes.get(form, ())) for form in formats]
    own = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    parity = MergeParity(rows=1, tokens=2, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0)
    bundle = ModelBundle(
        model_digest=model_store.model_digest(made), adapter_digest="a" * 64, base_digest="b" * 64,
        data_digest="d" * 64,
        run_id="run", merge_base="dequantized", dtype="float32", size_bytes=1, parity=parity, artifacts=tuple(made),
    )  # fmt: skip
    with files.sealed_directory(layout.promoted_model(bundle.model_digest), model_store.KIND) as scratch:
        for name in own:
            files.link_or_copy(source / name, scratch / name)
        extra = server_files.build_model_files(source, bundle, NAME, forced) | {
            "sbom.json": b"{}\n",
            "verdict.json": b"{}\n",
        }
        for name, content in (extra | model_store.forced_marker(forced)).items():
            files.make_directory((scratch / name).parent)
            files.write_atomic(scratch / name, content)
        bundle.save(scratch / "bundle.json")
        signature.sign_folder(scratch, keys.load_signer(layout))
    return bundle


def make_champion(layout: ProjectLayout, model_digest: str, action: Any = "promote", reason: str | None = None) -> int:
    """Make a stored model the champion, as promotion and rollback do after they set the alias. Return its version."""
    entries, before = ledger.read_entries(layout.promotions), read_champion(layout.champion)
    known = {e.model_digest: e.version for e in entries}
    version = known.get(model_digest, len(known) + 1)
    champion = Champion(version=version, model_digest=model_digest, adapter_digest="a" * 64, run_id="run")
    added = ledger.append_entry(
        layout.promotions,
        Promotion(
            id=f"event{len(entries)}", time="2026-01-01T00:00:00+00:00", action=action, actor="ada", version=version,
            model_digest=model_digest, adapter_digest="a" * 64, run_id="run", reason=reason, previous=None,
            previous_version=before.champion.version if before.champion else None,
        ),
    )  # fmt: skip
    ledger.update_champion(before, action, champion, False, added.digest).save(layout.champion)
    return version


def promote_fake_model(
    layout: ProjectLayout,
    model: str,
    formats: Sequence[str] = ("hf", "gguf/q8_0"),
    forced: ForcedPromotion | None = None,
) -> ModelBundle:
    """Store a fake model and make it champion."""
    source = layout.root / "made" / model
    write_fake_export(source, model, formats)
    bundle = store_fake_model(layout, source, formats, forced=forced)
    make_champion(layout, bundle.model_digest)
    return bundle

"""Stage base: resolve and pin the base model, or pre-train the tiny base. Its output is a Hugging Face directory."""

import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ratchet.config.base import Base
from ratchet.config.settings import Settings
from ratchet.data import splits, tokenization
from ratchet.data.conversation import Conversation, SourceRow, extract_text, missing_part_reason
from ratchet.data.sources import SourceReader, require_watched_path
from ratchet.errors import DataError
from ratchet.models import base_model
from ratchet.registry import pickle_scan
from ratchet.reports import dvc_files
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files
from ratchet.storage.layout import CHAT_TEMPLATE_FILE, ProjectLayout
from ratchet.storage.records.base import BaseCard

SAMPLE_CONVERSATION = Conversation(
    [{"role": "user", "content": "Which day is it?"}, {"role": "assistant", "content": "Monday."}]
)
"""Conversation that tests the chat template in this stage, so that its errors do not appear minutes later in another
stage."""


def base(project: Project, on_progress: Callable[[str], None] = ignore_progress) -> BaseCard:
    """Run the stage.

    Args:
        project: sections base and export of its settings apply.
        on_progress: receives lines while the tiny base is built.

    Raises:
        BaseModelError: the source cannot be found, contains a pickle that would run code, or lacks config, weights,
            tokenizer or chat template.
        DataError: no text to pre-train the tiny base on.
        SettingsError: a format of section export cannot represent this model.
        LockHeldError: another process runs this stage.
    """
    from ratchet.exporters import inputs  # loads transformers

    layout, settings = project.layout, project.settings
    with project.lock("base"), files.sealed_directory(layout.base, "base") as scratch:
        model, revision = _obtain_model(layout, settings, scratch, on_progress)
        card = _build_card(model, settings.base, revision, converted=model.parent == scratch)
        template = _find_project_template(layout, settings)
        origin = f"{settings.base.chat_template or model} (trial conversation)"
        tokenizer = base_model.load_tokenizer(model, template, card.added_tokens, card.remote_code)
        tokenization.encode_conversation(tokenizer, SAMPLE_CONVERSATION, origin)
        inputs.require_exportable(model, settings, layout.root)  # before the training, which may take days
        if template:
            shutil.copyfile(template, scratch / CHAT_TEMPLATE_FILE)
        card.save(scratch / layout.base_card.name)
        dvc_files.write_metrics(scratch, {"base_parameters": card.parameters})
    return card


def _obtain_model(
    layout: ProjectLayout, settings: Settings, scratch: Path, progress: Callable[[str], None]
) -> tuple[Path, str | None]:
    """Return directory and commit of the model. A model that is built, or converted from pickles, is in `scratch`.

    Before any downloaded file is opened, all are scanned for pickles that would run code.
    """
    target = scratch / layout.tiny_model.name
    if settings.base.source == base_model.TINY:
        from ratchet.models import loading, tiny_model

        loading.use_threads(settings.machine.threads)
        tiny_model.build(_read_tiny_texts(layout, settings), target, settings.base.tiny, progress)
        return target, None
    model, revision = base_model.fetch(layout, settings.base)
    pickle_scan.scan_directory(model).save(scratch / pickle_scan.RECORD)
    if not settings.base.convert_pickles or base_model.list_weight_files(model):
        return model, revision
    from ratchet.models import model_spec, weights

    has_remote_code = settings.base.trust_remote_code is not None
    progress(f"converting the pickles of {settings.base.source} to safetensors")
    tied_names = weights.tied_names(model_spec.load(model, has_remote_code))
    weights.convert_pickles(model, target, tied_names, has_remote_code)
    return target, revision


def _build_card(model: Path, settings: Base, revision: str | None, converted: bool) -> BaseCard:
    """Check the model for problems that would stop a later stage, and hash its files."""
    from ratchet.models import model_spec, weights

    has_remote_code = settings.trust_remote_code is not None
    config = base_model.read_config(model)
    quantization = base_model.detect_stored_quantization(config, str(model))
    if has_remote_code:
        base_model.require_pinned_code(model)
    spec = model_spec.load(model, has_remote_code)
    spec.require_causal()
    base_model.list_model_files(model, has_remote_code)
    unused_tensors = weights.check_stored_tensors(model, spec, quantization)
    weights.require_finite(model)
    file_digests = base_model.fingerprint(model, has_remote_code)
    # The same files with other added tokens are another base.
    digest = digests.hash_files(file_digests)
    if settings.added_tokens:
        digest = digests.hash_json({"files": digest, "added_tokens": settings.added_tokens})
    is_tiny = settings.source == base_model.TINY
    return BaseCard(
        source=settings.source,
        revision=revision,
        digest=digest,
        files=file_digests,
        architecture=str((config.get("architectures") or [spec.class_name])[0]),
        parameters=spec.parameters,
        licence="Apache-2.0" if is_tiny else _read_licence(model / "README.md"),
        added_tokens=settings.added_tokens,
        remote_code=has_remote_code,
        converted=converted and not is_tiny,
        quantization=quantization,
        unused_tensors=unused_tensors,
    )


def _find_project_template(layout: ProjectLayout, settings: Settings) -> Path | None:
    """Return the path of the project's own chat template, or None."""
    name = settings.base.chat_template
    if name is None:
        return None
    path = require_watched_path(layout.root, name, ("data/raw", "data/text"), "base.chat_template")
    if not path.is_file():
        raise DataError(f"base.chat_template: {name}: no such file")
    return path


def _read_licence(model_card: Path) -> str | None:
    """Return `license:` of the model card's front matter."""
    if not model_card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", model_card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    licence = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return licence[1] if licence else None


def _read_tiny_texts(layout: ProjectLayout, settings: Settings) -> list[str]:
    """Return texts for the tiny base: plain text and prompts of training rows; never labels, validation or test rows.

    For task `text` each answer is also a text.
    """
    texts: dict[str, None] = {}
    for path in sorted(layout.text.glob("*.txt")) if layout.text.is_dir() else []:
        try:
            texts |= dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 (byte {error.start}); convert it, e.g. with iconv") from None
    sources = SourceReader(layout.root, settings.prepare)
    row_texts = []
    with closing(splits.SplitAssigner(settings.prepare, sources.teacher_sources)) as assigner:
        for row in sources.rows():
            if isinstance(row, SourceRow) and missing_part_reason(row) is None and assigner.find_problem(row) is None:
                assigner.add(row)
                answers = [extract_text(m) for m in row.conversation.messages if m["role"] == "assistant"]
                row_texts.append([row.conversation.prompt, *(answers if settings.prepare.task == "text" else [])])
        assigner.check()
        assigned = assigner.assign()
    if empty := [name for code, name in enumerate(splits.SPLITS) if not (assigned == code).any()]:
        raise DataError(f"prepare.split: no row falls into {empty[0]}, which needs at least one: add rows, or raise it")
    for code, own_texts in zip(assigned, row_texts, strict=True):
        if code == splits.TRAIN:
            texts |= dict.fromkeys(own_texts)
    nonempty = [text for text in texts if text]
    if not nonempty:
        raise DataError(f"{layout.text}: no text to pre-train the tiny base on; put .txt files there")
    return nonempty

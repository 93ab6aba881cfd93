"""Renders model cards: the README.md of an adapter, of an exported model, and of either on the hub.

The front matter is in the format of the Hugging Face hub
(https://huggingface.co/docs/hub/model-cards#model-card-metadata). Equal inputs give equal bytes: a card contains no
local paths, no times, and nothing else that differs between repetitions.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ratchet.config.export import Export
from ratchet.config.train import Train
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import AdapterAnalysis, TrainReport

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_METHODS = {
    "lora": "LoRA (Hu et al. 2021)",
    "dora": "DoRA: directions by LoRA, and magnitudes (Liu et al. 2024)",
    "adalora": "AdaLoRA: ranks allocated by importance (Zhang et al. 2023)",
}
_INITIALIZATIONS = {
    "gaussian": "A normal, B zero",
    "orthogonal": "random matrices whose product is zero",
    "eva": "A from principal components of the layers' inputs, EVA (Paischer et al. 2024)",
    "loftq": "best approximation of the error of the 4-bit weights, LoftQ (Li et al. 2023)",
    "pissa": "principal singular vectors of the weights, PiSSA (Meng et al. 2024); saved at twice the rank",
}
_MAX_LISTED = 12
"""Maximum number of modules or tokens that a card lists by name; for the others it gives their number."""


@dataclass(frozen=True)
class Publication:
    """Additional contents of the card of a published model."""

    name: str
    """Name in the index of results."""
    results: tuple["EvalResult", ...] = ()
    library: str | None = None
    """Library that loads a merged model; None: several can."""
    licence: str | None = None
    """Licence of the model; None: that of the base."""
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    """Hub ids."""
    notices: tuple[str, ...] = ()
    """Paragraphs below the title."""
    usage: tuple[str, ...] = ()
    """Lines of the section about the use of the model."""


def render_for_adapter(
    base: BaseCard, train: Train, report: TrainReport, analysis: AdapterAnalysis | None = None,
    publication: Publication | None = None,
) -> str:  # fmt: skip
    """Render the card of a trained adapter, which is in the directory `adapter` next to the card or on the hub."""
    tags = [train.adapter, *(["qlora"] if train.quantization != "none" else [])]
    tables = {
        "The adapter": _adapter_rows(train, report),
        "The base": _base_rows(base, train, report),
        "Training": _training_rows(train, report),
    }
    title = f"An adapter for {_base_display_name(base).replace('The ', 'the ', 1)}"
    front_matter = format_front_matter(base, "adapter", tags, "peft", publication)
    usage = publication.usage if publication is not None else _adapter_usage(base, train)
    return _render(front_matter, title, tables, [*_training_effects(analysis), *usage], publication)


def render_for_model(
    base: BaseCard, train: Train, report: TrainReport, export: Export, analysis: AdapterAnalysis | None = None,
    publication: Publication | None = None,
) -> str:  # fmt: skip
    """Render the card of a merged model."""
    is_unquantized = train.quantization == "none" and base.quantization is None
    merged_into = "base" if is_unquantized else f"{export.merge_base} base"
    model_rows = {
        "Weights": f"{export.dtype}, the adapter merged into the {merged_into}; sums in float32",
        "Adapter, SHA-256": f"`{report.adapter_digest}`",
    }
    library = publication.library if publication is not None else "transformers"
    return _render(
        format_front_matter(base, "finetune", [train.adapter], library, publication),
        f"{_base_display_name(base)}, fine-tuned",
        {
            "The model": model_rows, "The adapter": _adapter_rows(train, report),
            "The base": _base_rows(base, train, report), "Training": _training_rows(train, report),
        },
        [*_training_effects(analysis), *(publication.usage if publication is not None else _MODEL_USAGE)],
        publication,
    )  # fmt: skip


def _render(
    front_matter: str, title: str, tables: Mapping[str, Mapping[str, str]], sections: Sequence[str],
    publication: Publication | None,
) -> str:  # fmt: skip
    lines = [front_matter, f"# {title}", ""]
    for notice in publication.notices if publication is not None else ():
        lines += [notice, ""]
    for heading, rows in tables.items():
        lines += [f"## {heading}", "", "| | |", "|---|---|", *(f"| {key} | {rows[key]} |" for key in rows), ""]
    return "\n".join([*lines, *sections]).rstrip() + "\n"


def format_front_matter(
    base: BaseCard | None, relation: str, tags: Sequence[str], library: str | None = None,
    publication: Publication | None = None,
) -> str:  # fmt: skip
    """Return the hub's metadata as YAML between two lines of dashes.

    Args:
        base: the base; its address is given if it is on the hub.
        relation: relation to the base: `adapter` or `finetune`.
        library: library that loads the model; None: several can.
        publication: further metadata.
    """
    from huggingface_hub import ModelCardData  # takes 0.2 s that other commands save

    has_address = base is not None and base.revision is not None
    more = publication or Publication("")
    licence, other = _license_fields(more.licence or (base.licence if base is not None else None))
    data = ModelCardData(
        library_name=library, pipeline_tag="text-generation", license=licence, license_name=other,
        base_model=base.source if base is not None and has_address else None,
        base_model_relation=relation if has_address else None,
        language=list(more.languages) or None, datasets=list(more.datasets) or None,
        tags=[*tags, "ratchet"], model_name=more.name or None, eval_results=list(more.results) or None,
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n"


def _license_fields(licence: str | None) -> tuple[str | None, str | None]:
    """Return the licence in the hub's format: a lowercase identifier, or `other` and an arbitrary name."""
    if licence is None:
        return None, None
    lowercase = licence.lower()
    return (lowercase, None) if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", lowercase) else ("other", licence)


def _base_display_name(base: BaseCard) -> str:
    if base.revision is not None:
        return base.source.rsplit("/", 1)[-1]
    return "The tiny base" if base.source == "tiny" else base.architecture


def _base_rows(base: BaseCard, train: Train, report: TrainReport) -> dict[str, str]:
    source = f"[{base.source}](https://huggingface.co/{base.source})" if base.revision else "not from the hub"
    rows = {"Model": f"{source}, {base.architecture}, {base.parameters:,} weights"}
    if base.revision:
        rows["Revision"] = f"`{base.revision}`"
    rows["Files, SHA-256"] = f"`{base.digest}`"
    rows["Licence"] = base.licence or "the base declares none"
    rows["Quantization in training"] = _describe_quantization(base, train, report)
    if base.added_tokens:
        tokens = _list_names([json.dumps(token, ensure_ascii=False)[1:-1] for token in base.added_tokens])
        rows["Added tokens"] = f"{len(base.added_tokens)}: {tokens}; their embedding rows were trained"
    return {key: _escape_cell(text) for key, text in rows.items()}


def _list_names(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:_MAX_LISTED])
    return f"{listed} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else listed


def _describe_quantization(base: BaseCard, train: Train, report: TrainReport) -> str:
    if train.quantization == "none":
        return "not quantized"
    constants = "quantized too (double quantization)" if train.double_quantization else "in float32"
    return (
        f"{train.quantization.upper()}, 4 bits in {train.quantization_storage} tensors: "
        f"{report.quantized_parameters:,} of {base.parameters:,} weights; constants {constants}"
    )


def _adapter_rows(train: Train, report: TrainReport) -> dict[str, str]:
    scale = "alpha / sqrt(rank), rsLoRA" if train.use_rslora else "alpha / rank"
    rows = {"Method": _METHODS[train.adapter], "Rank": f"{train.rank}{_format_pattern(train.rank_pattern)}"}
    if train.adapter == "adalora":
        rows["Rank"] = f"{train.rank} at first, {train.adalora.target_rank} on average at the end"
    rows["Alpha"] = f"{train.alpha:g}{_format_pattern(train.alpha_pattern)}; updates are multiplied by {scale}"
    if description := _INITIALIZATIONS.get(train.initialization):
        rows["Initialized as"] = description
    if train.init_adapter is not None:
        rows["Started from"] = f"trained weights, `{train.init_adapter}`"
    targets = [train.target_modules] if isinstance(train.target_modules, str) else train.target_modules
    rows["Targets"] = ", ".join(f"`{target}`" for target in targets)
    share = report.trainable_parameters / report.total_parameters
    rows["Trained weights"] = f"{report.trainable_parameters:,} of {report.total_parameters:,} ({share:.2%})"
    rows["Adapter dtype"] = train.adapter_dtype
    return {key: _escape_cell(text) for key, text in rows.items()}


def _format_pattern(pattern: Mapping[str, float]) -> str:
    return "".join(f"; {key}: {value:g}" for key, value in sorted(pattern.items()))


def _describe_schedule(train: Train) -> str:
    floor = train.final_learning_rate_share
    end = f" to {floor:g} of it" if floor and train.schedule != "constant" else ""
    warmup = f"{train.warmup_ratio:g} of the" if train.warmup_steps is None else f"{train.warmup_steps:,}"
    return f"{train.schedule}{end}, after a warm-up of {warmup} steps"


def _training_rows(train: Train, report: TrainReport) -> dict[str, str]:
    rows = {
        "Steps": f"{report.steps:,} of {report.planned_steps:,}; the weights are those of step {report.kept_step:,}",
        "Rows per step": f"{train.batch_size:,}{' pairs' if train.rows_per_example == 2 else ''}",
        "Learning rate": f"{train.learning_rate:g}, {_describe_schedule(train)}",
        "Optimizer": f"{train.optimizer}, weight decay {train.weight_decay:g}",
        "Tokens": f"{report.trained_tokens:,} trained, {report.input_tokens:,} read",
    }
    if train.objective != "sft":
        rows = {"Objective": f"{train.objective.upper()}, beta {train.beta:g}"} | rows
    if train.loraplus_lr_ratio != 1:
        rows["Learning rate"] += f"; matrices B at {train.loraplus_lr_ratio:g} times that, LoRA+ (Hayou et al. 2024)"
    if report.kept_step in report.validation_loss:
        rows["Validation loss"] = f"{report.validation_loss[report.kept_step]:.4f} {train.loss_unit}"
    rows["Data, SHA-256"] = f"`{report.data_digest}`"
    rows["Run"] = f"`{report.run_id}`"
    return {key: _escape_cell(text) for key, text in rows.items()}


def _escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _training_effects(analysis: AdapterAnalysis | None) -> Iterator[str]:
    if analysis is None or not analysis.modules:
        return
    modules = list(analysis.modules.values())
    effective, rank = median(module.effective_rank for module in modules), median(module.rank for module in modules)
    ratios = [module.update_ratio for module in modules]
    yield from ("## Effects of training", "")
    yield (
        f"{len(modules)} modules have an adapter. The median update is {median(ratios):.2%} of a module's weights, the "
        f"largest {max(ratios):.2%} (Frobenius norms). The effective rank (Roy and Vetterli 2007) is {effective:.1f} "
        f"of {rank:g}."
    )
    if analysis.unchanged_modules:
        unchanged = analysis.unchanged_modules
        yield f"{len(unchanged)} of them hardly changed: {_list_names(unchanged)}."
    yield ""


def _adapter_usage(base: BaseCard, train: Train) -> Iterator[str]:
    yield from ("## Use", "", "```python", "from peft import PeftModel")
    if base.added_tokens:
        yield "from tokenizers import AddedToken"
    yield from (f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if base.added_tokens else ''}", "")
    source = (
        json.dumps(base.source) + f", revision={json.dumps(base.revision)}" if base.revision else '"PATH OF THE BASE"'
    )
    yield f"base = AutoModelForCausalLM.from_pretrained({source})"
    if base.added_tokens:
        yield f"tokenizer = AutoTokenizer.from_pretrained({source})"
        added = json.dumps(list(base.added_tokens))
        yield f"tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in {added}])"
        yield "if len(tokenizer) > base.get_input_embeddings().num_embeddings:  # never shrink"
        yield "    base.resize_token_embeddings(len(tokenizer))"
    yield from ('model = PeftModel.from_pretrained(base, "adapter")', "```", "")
    if train.quantization != "none":
        yield (
            f"The adapter was trained on the base in {train.quantization.upper()}: on unquantized weights its answers "
            "differ slightly."
        )


_MODEL_USAGE = (
        "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'tokenizer = AutoTokenizer.from_pretrained("PATH OF THIS DIRECTORY")',
        'model = AutoModelForCausalLM.from_pretrained("PATH OF THIS DIRECTORY", dtype="auto")', "```",
    )  # fmt: skip

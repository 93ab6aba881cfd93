"""Model cards: the README.md of an adapter and of an exported model, from facts alone.

Front matter is what the Hugging Face hub reads (https://huggingface.co/docs/hub/model-cards#model-card-metadata). Equal
facts give equal bytes: a card holds no path of a machine, no time, and nothing that differs from one repetition to the
next.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ratchet.config.export import Export
from ratchet.config.train import Train
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis

_METHODS = {
    "lora": "LoRA (Hu et al. 2021)",
    "dora": "DoRA: directions by LoRA, and magnitudes (Liu et al. 2024)",
    "adalora": "AdaLoRA: ranks shared out by importance (Zhang et al. 2023)",
}
_LISTED = 12
"""Modules or tokens that are named one by one; of more, the number is given."""


def render_for_adapter(
    base: BaseCard, train: Train, report: TrainReport, analysed: AdapterAnalysis | None = None
) -> str:
    """The card of an adapter as training leaves it, in the directory `adapter` beside the card."""
    return _render(
        _front_matter(base, "peft", "adapter", [train.adapter, *(["qlora"] if train.quantization != "none" else [])]),
        _adapter_title(base),
        {
            "The adapter": _adapter_rows(train, report),
            "The base": _base_rows(base, train, report),
            "Training": _training_rows(train, report),
        },
        [*_training_effects(analysed), *_adapter_usage(base, train)],
    )


def render_for_model(
    base: BaseCard, train: Train, report: TrainReport, export: Export, analysed: AdapterAnalysis | None = None
) -> str:
    """The card of a merged model."""
    whole = train.quantization == "none" and base.quantization is None
    into = "base" if whole else f"{export.merge_base} base"
    made = {
        "Weights": f"{export.dtype}, the adapter merged into the {into}; sums in float32",
        "Adapter, SHA-256": f"`{report.adapter_digest}`",
    }
    return _render(
        _front_matter(base, "transformers", "finetune", [train.adapter]),
        f"{_base_display_name(base)}, fine-tuned",
        {
            "The model": made, "The adapter": _adapter_rows(train, report), "The base": _base_rows(base, train, report),
            "Training": _training_rows(train, report),
        },
        [*_training_effects(analysed), *_model_usage()],
    )  # fmt: skip


def _render(front: str, title: str, tables: Mapping[str, Mapping[str, str]], rest: Sequence[str]) -> str:
    lines = [front, f"# {title}", ""]
    for heading, rows in tables.items():
        lines += [f"## {heading}", "", "| | |", "|---|---|", *(f"| {key} | {rows[key]} |" for key in rows), ""]
    return "\n".join([*lines, *rest]).rstrip() + "\n"


def _front_matter(base: BaseCard, library: str, relation: str, tags: Sequence[str]) -> str:
    """YAML between two lines of dashes. Texts are written as JSON strings, which YAML reads as what they are."""
    front: dict[str, object] = {"library_name": library, "pipeline_tag": "text-generation"}
    if base.revision is not None:
        front |= {"base_model": base.source, "base_model_relation": relation}
    if base.licence is not None:
        front |= _license_fields(base.licence)
    front["tags"] = [*tags, "ratchet"]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""])


def _license_fields(declared: str) -> dict[str, object]:
    """As the hub wants it: an identifier in small letters, or `other` and a name (which may hold anything)."""
    written = declared.lower()
    if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", written):
        return {"license": written}
    return {"license": "other", "license_name": declared}


def _base_display_name(base: BaseCard) -> str:
    if base.revision is not None:
        return base.source.rsplit("/", 1)[-1]
    return "The tiny base" if base.source == "tiny" else base.architecture


def _adapter_title(base: BaseCard) -> str:
    name = _base_display_name(base)
    return f"An adapter for {name[0].lower() + name[1:] if name.startswith('The ') else name}"


def _base_rows(base: BaseCard, train: Train, report: TrainReport) -> dict[str, str]:
    source = f"[{base.source}](https://huggingface.co/{base.source})" if base.revision else "not from the hub"
    rows = {"Model": f"{source}, {base.architecture}, {base.parameters:,} weights"}
    if base.revision:
        rows["Revision"] = f"`{base.revision}`"
    rows["Files, SHA-256"] = f"`{base.digest}`"
    rows["Licence"] = base.licence or "the base declares none"
    rows["Held in training as"] = _describe_quantization(base, train, report)
    if base.added_tokens:
        shown = ", ".join(f"`{json.dumps(token, ensure_ascii=False)[1:-1]}`" for token in base.added_tokens[:_LISTED])
        more = f" and {len(base.added_tokens) - _LISTED} more" if len(base.added_tokens) > _LISTED else ""
        rows["Added tokens"] = f"{len(base.added_tokens)}: {shown}{more}; their rows of the embeddings were learned"
    return {key: _escape_cell(text) for key, text in rows.items()}


def _describe_quantization(base: BaseCard, train: Train, report: TrainReport) -> str:
    if train.quantization == "none":
        return "not quantised"
    constants = "quantised too (double quantisation)" if train.double_quantization else "in float32"
    return (
        f"{train.quantization.upper()}, 4 bits in {train.quantization_storage} tensors: "
        f"{report.quantized_parameters:,} of {base.parameters:,} weights; constants {constants}"
    )


def _adapter_rows(train: Train, report: TrainReport) -> dict[str, str]:
    scale = "alpha / sqrt(rank), rsLoRA" if train.rank_stabilized else "alpha / rank"
    rows = {"Method": _METHODS[train.adapter], "Rank": f"{train.rank}{_format_pattern(train.rank_pattern)}"}
    if train.adapter == "adalora":
        rows["Rank"] = f"{train.rank} at first, {train.adalora.target_rank} on average at the end"
    rows["Alpha"] = f"{train.alpha:g}{_format_pattern(train.alpha_pattern)}; updates are multiplied by {scale}"
    if train.initialization == "pissa":
        rows["Begun as"] = (
            "principal singular vectors of the weights, PiSSA (Meng et al. 2024); saved at twice the rank"
        )
    targets = [train.targets] if isinstance(train.targets, str) else train.targets
    rows["Targets"] = ", ".join(f"`{target}`" for target in targets)
    share = report.trainable_parameters / report.total_parameters
    rows["Weights that learned"] = f"{report.trainable_parameters:,} of {report.total_parameters:,} ({share:.2%})"
    rows["Their type"] = train.adapter_dtype
    return {key: _escape_cell(text) for key, text in rows.items()}


def _format_pattern(pattern: Mapping[str, float]) -> str:
    return "".join(f"; {key}: {value:g}" for key, value in sorted(pattern.items()))


def _training_rows(train: Train, report: TrainReport) -> dict[str, str]:
    rows = {
        "Steps": f"{report.steps:,} of {report.planned_steps:,}; the weights are those of step {report.kept_step:,}",
        "Rows a step": f"{train.batch_rows:,}",
        "Learning rate": f"{train.learning_rate:g}, {train.schedule}, after a warm-up of {train.warmup:g} of the steps",
        "Optimizer": f"{train.optimizer}, weight decay {train.weight_decay:g}",
        "Tokens": f"{report.trained_tokens:,} learned from, {report.input_tokens:,} read",
    }
    if train.rate_ratio != 1:
        rows["Learning rate"] += f"; matrices B at {train.rate_ratio:g} times that, LoRA+ (Hayou et al. 2024)"
    if report.kept_step in report.validation_loss:
        rows["Validation loss"] = f"{report.validation_loss[report.kept_step]:.4f} nats per answer token"
    rows["Data, SHA-256"] = f"`{report.data_digest}`"
    rows["Run"] = f"`{report.run_id}`"
    return {key: _escape_cell(text) for key, text in rows.items()}


def _escape_cell(text: str) -> str:
    """Text that stays in its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _training_effects(analysed: AdapterAnalysis | None) -> Iterator[str]:
    if analysed is None or not analysed.modules:
        return
    modules = list(analysed.modules.values())
    ratios = [module.update_ratio for module in modules]
    yield from ("## What training did", "")
    yield (
        f"{len(modules)} modules have an adapter. The update is {median(ratios):.2%} of a module's weights at the "
        f"median, {max(ratios):.2%} at most (Frobenius norms). {_format_ranks(modules)}"
    )
    if analysed.still:
        names = ", ".join(f"`{name}`" for name in analysed.still[:_LISTED])
        more = f" and {len(analysed.still) - _LISTED} more" if len(analysed.still) > _LISTED else ""
        yield f"{len(analysed.still)} of them barely moved: {names}{more}."
    yield ""


def _format_ranks(modules: Sequence[ModuleAnalysis]) -> str:
    effective = median(module.effective_rank for module in modules)
    return f"Its effective rank (Roy and Vetterli 2007) is {effective:.1f} of {median(m.rank for m in modules):g}."


def _adapter_usage(base: BaseCard, train: Train) -> Iterator[str]:
    yield from ("## Use", "", "```python", "from peft import PeftModel")
    if base.added_tokens:
        yield "from tokenizers import AddedToken"
    yield from (f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if base.added_tokens else ''}", "")
    where = (
        json.dumps(base.source) + f", revision={json.dumps(base.revision)}" if base.revision else '"PATH OF THE BASE"'
    )
    yield f"base = AutoModelForCausalLM.from_pretrained({where})"
    if base.added_tokens:
        yield f"tokenizer = AutoTokenizer.from_pretrained({where})"
        added = json.dumps(list(base.added_tokens))
        yield f"tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in {added}])"
        yield "if len(tokenizer) > base.get_input_embeddings().num_embeddings:  # never make them fewer"
        yield "    base.resize_token_embeddings(len(tokenizer))"
    yield from ('model = PeftModel.from_pretrained(base, "adapter")', "```", "")
    if train.quantization != "none":
        yield (
            f"It was trained against the base in {train.quantization.upper()}: on weights that are not quantised it "
            "answers a little differently."
        )


def _model_usage() -> Iterator[str]:
    yield from (
        "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'tokenizer = AutoTokenizer.from_pretrained("PATH OF THIS DIRECTORY")',
        'model = AutoModelForCausalLM.from_pretrained("PATH OF THIS DIRECTORY", dtype="auto")', "```",
    )  # fmt: skip

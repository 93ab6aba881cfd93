"""Describes a model's layers from its module graph on the meta device, without loading weights.

The role of a layer follows from its position: the first name or class, from the inside out, that indicates attention,
an MLP or a state-space mixer decides. A layer next to an attention, directly in a decoder layer, belongs to the MLP
(fc1 of OPT). Linear attention (Gated DeltaNet, RWKV) counts as attention. Projections of state-space mixers (Mamba)
have the role `other`, because their fused kernels would skip an adapter, as have layers of vision and audio towers.
Layers with this role are adapted only if the settings name them.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ratchet.errors import BaseModelError, first_line
from ratchet.models import base_model
from ratchet.models.device import Model

Kind = Literal["linear", "conv1d", "embedding", "experts"]
"""Kinds of layers that peft can adapt. `conv1d` is GPT-2's linear layer with a transposed weight; `experts` is a
parameter that holds the matrices of many experts as one tensor of three dimensions."""
Role = Literal["attention", "mlp", "router", "embedding", "head", "other"]

_TOWER_NAME = re.compile(r"vision|visual|image|audio|speech|multi_modal|mm_projector", re.IGNORECASE)
_RECURRENCE_NAME = re.compile(r"mamba|ssm|mlstm|recurrent_block|(^|[a-z])Mixer$")
_ATTENTION_NAME = re.compile(r"attn|attention|^mha$", re.IGNORECASE)
_MLP_NAME = re.compile(r"(mlp|feed_?forward|moe|experts?|moe_?block)$|ffn|^ff$|denserelu", re.IGNORECASE)
_ROLE_PATTERNS: dict[Role, re.Pattern[str]] = {
    "attention": _ATTENTION_NAME,
    "other": _RECURRENCE_NAME,
    "mlp": _MLP_NAME,
}
_ATTENTION_LEAF = re.compile(
    r"([qkvo]_proj|w?_?(qkv|q|k|v)(_proj)?|query|key|value|query_key_value|c_attn)", re.IGNORECASE
)
_MLP_LEAF = re.compile(r"c?_?fc_?\w*|lin(ear)?_?\d?|dense_?\d?|w\d|wi\w*|wo|ff\w*|output|intermediate", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"router", re.IGNORECASE)


@dataclass(frozen=True)
class LayerSpec:
    """A matrix that can have an adapter, or equal-shaped matrices of several experts."""

    name: str
    """Full name of the module; for experts, of the parameter."""
    kind: Kind
    role: Role
    inputs: int
    outputs: int
    count: int
    """Number of matrices: the number of experts, otherwise 1."""
    bias: bool


@dataclass(frozen=True)
class ModelSpec:
    """Structure of a model, without weights."""

    config: Any
    layers: tuple[LayerSpec, ...]
    others: dict[str, str]
    """Classes of modules that are not layers, by name: norms, activations, whole blocks."""
    parameters: int
    """Number of weights; tied weights count once."""
    tied_head: bool
    is_causal: bool
    """True if the model predicts the next token from the tokens before it."""
    class_name: str
    remote_code: bool = False
    directory: Path | None = field(default=None, compare=False)

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding, including padding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def context_length(self) -> int | None:
        """Maximum length of a text in tokens; None if the config does not state it."""
        return base_model.find_context_length(self.config.to_dict())

    def model(self, dtype: torch.dtype, attention: Literal["auto", "sdpa", "eager"] = "auto") -> Model:
        """Build the model on the meta device in evaluation mode, with the dtypes that loaded weights have."""
        model = _build_on_meta(self.config, dtype, attention, self.remote_code)
        for name, fixed_dtype in _fixed_dtypes(model, dtype):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(fixed_dtype)
        return model.eval()

    def require_causal(self) -> None:
        """Raise BaseModelError if the model is not a causal language model."""
        if not self.is_causal:
            kind = "an encoder-decoder" if getattr(self.config, "is_encoder_decoder", False) else "not a decoder"
            raise BaseModelError(
                f"base.source: {self.class_name} ({self.config.model_type}) is {kind}; expected a causal language "
                "model, such as Llama, Qwen or Mistral"
            )


def load(path: Path, remote_code: bool = False) -> ModelSpec:
    """Return the spec of a model directory, or of a config file with any name.

    Raises BaseModelError if the config is missing, or transformers does not know the model.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_config(file, remote_code)
    try:
        model = _build_on_meta(config, torch.float32, "auto", remote_code)
    except Exception as error:  # the class computes with values from the file and may raise any error
        raise BaseModelError(f"{file}: transformers cannot build the model: {first_line(error)}") from error
    return describe(model, remote_code, file.parent)


def from_config(config: Any) -> ModelSpec:
    """Build the spec of an existing config."""
    return describe(_build_on_meta(config, torch.float32, "auto", remote_code=False))


def describe(model: Model, remote_code: bool = False, directory: Path | None = None) -> ModelSpec:
    """Build the spec of an existing model: without adapters, on any device; 4-bit weights are counted as stored."""
    config = model.config
    # Encoders have causal classes too; for them, `is_decoder` of the config decides.
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    return ModelSpec(
        config=config,
        layers=list_layers(model),
        others={
            name: type(module).__name__
            for name, module in model.named_modules()
            if name and not isinstance(module, nn.Embedding | nn.Linear | Conv1D)
        },
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied_head=has_tied_head(model),
        is_causal=not is_encoder and not getattr(config, "is_encoder_decoder", False),
        class_name=type(model).__name__,
        remote_code=remote_code,
        directory=directory,
    )


def list_layers(model: Model) -> tuple[LayerSpec, ...]:
    """Return every layer in module order. The model has no adapters; it may be in 4 bits, on any device."""
    head = model.get_output_embeddings()
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            size, width = module.num_embeddings, module.embedding_dim
            layers.append(LayerSpec(name, "embedding", "embedding", size, width, 1, bias=False))
        elif isinstance(module, nn.Linear | Conv1D):
            role = "head" if module is head else _classify_role(name, classes, model)
            has_bias = module.bias is not None
            if isinstance(module, Conv1D):
                inputs, outputs = module.weight.shape
                layers.append(LayerSpec(name, "conv1d", role, inputs, outputs, 1, has_bias))
            else:  # transformers records the original class of a 4-bit layer
                kind: Kind = "conv1d" if getattr(module, "source_cls", None) is Conv1D else "linear"
                layers.append(LayerSpec(name, kind, role, module.in_features, module.out_features, 1, has_bias))
        else:
            layers += _expert_specs(name, module, classes, model)
    return tuple(layers)


def has_tied_head(model: Model) -> bool:
    """Return True if the output layer and the embedding of a model are one tensor."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _expert_specs(name: str, module: nn.Module, classes: dict[str, str], model: Model) -> Iterator[LayerSpec]:
    """Yield the fused experts among a module's own parameters.

    transformers stores them as [experts, outputs, inputs], or as [experts, inputs, outputs] if the module has
    `is_transposed`; peft uses the same attribute.
    """
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return
    parameters = dict(module.named_parameters(recurse=False))
    for parameter_name, parameter in parameters.items():
        if parameter.ndim != 3:
            continue
        count, outputs, inputs = parameter.shape
        if getattr(module, "is_transposed", False):
            inputs, outputs = outputs, inputs
        full_name = f"{name}.{parameter_name}"
        role = _classify_role(full_name, classes, model)
        yield LayerSpec(full_name, "experts", role, inputs, outputs, count, bias=f"{parameter_name}_bias" in parameters)


def _classify_role(name: str, classes: dict[str, str], model: Model) -> Role:
    segments = name.split(".")
    if any(_TOWER_NAME.search(segment) for segment in segments):
        return "other"
    if any(_ROUTER_NAME.search(segment) for segment in segments):
        return "router"
    if segments[-1] == "gate" or segments[-1].endswith("expert_gate"):  # a router if its module has experts
        parent = model.get_submodule(".".join(segments[:-1]))
        if any("expert" in part for part, _ in (*parent.named_children(), *parent.named_parameters(recurse=False))):
            return "router"
    for depth in range(len(segments) - 1, 0, -1):
        names = segments[depth - 1], classes[".".join(segments[:depth])]
        for role, pattern in _ROLE_PATTERNS.items():
            if any(pattern.search(text) for text in names):
                return role
    if _ATTENTION_LEAF.fullmatch(segments[-1]):
        return "attention"
    return "mlp" if _is_sibling_of_attention(segments, classes) else "other"


def _is_sibling_of_attention(segments: list[str], classes: dict[str, str]) -> bool:
    """Return True if a layer with an MLP-like name is in a numbered block that has an attention as another child."""
    depths = [depth for depth in range(1, len(segments)) if segments[depth - 1].isdigit()]
    if not depths or not _MLP_LEAF.fullmatch(segments[depths[-1]]):
        return False
    block = ".".join(segments[: depths[-1]]) + "."
    return any(_ATTENTION_NAME.search(name[len(block) :].split(".")[0]) for name in classes if name.startswith(block))


def _build_on_meta(config: Any, dtype: torch.dtype, attention: str, remote_code: bool) -> Model:
    """Build the model as transformers loads it; encoder-decoders have their own class."""
    auto_class: Any = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    options = {} if attention == "auto" else {"attn_implementation": attention}
    with torch.device("meta"), use_plain_linears(config):  # from_config modifies the config
        model = auto_class.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=remote_code, **options)
    model.config.use_cache = False
    return model


@contextmanager
def use_plain_linears(config: Any) -> Iterator[None]:
    """Build Falcon models with plain `nn.Linear` layers, which compute the same as Falcon's own class.

    transformers quantizes only layers of the exact class `nn.Linear`, so it would quantize no layer of a Falcon.
    """
    if config.model_type != "falcon":
        yield
        return
    from transformers.models.falcon import modeling_falcon

    original = modeling_falcon.FalconLinear
    modeling_falcon.FalconLinear = nn.Linear
    try:
        yield
    finally:
        modeling_falcon.FalconLinear = original


def _fixed_dtypes(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    """Yield name and dtype of the parameters that transformers loads in another dtype than `dtype`."""
    from transformers.core_model_loading import build_glob_alternation

    dtype_plan = model._get_dtype_plan(dtype)
    if dtype_plan:
        pattern, group_patterns, _ = build_glob_alternation(list(dtype_plan))
        for name, _ in model.named_parameters():
            if (match := pattern.search(name)) and match.lastgroup:
                yield name, dtype_plan[group_patterns[match.lastgroup]]


def _read_config(file: Path, remote_code: bool) -> Any:
    """Parse the config with the class of its model type. Custom code runs only if the settings allow it."""
    if not file.is_file():
        raise BaseModelError(f"{file}: no such file; expected a model directory with a config.json, or a config file")
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise BaseModelError(f"{file}: not JSON ({error}); restore the model's original config.json") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise BaseModelError(f"{file}: model_type is missing; expected the config of a transformers model")
    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING and not (remote_code and "auto_map" in raw):
        if "auto_map" in raw:
            advice = "set base.trust_remote_code to the value of base.source to run the model's own code"
        else:
            advice = "install a newer transformers"
        raise BaseModelError(f"{file}: the installed transformers does not know model_type {model_type}; {advice}")
    if not remote_code and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not raw.get("is_encoder_decoder"):
        raise BaseModelError(
            f"{file}: model_type {model_type} ({', '.join(raw.get('architectures') or ('no class named',))}) is not a "
            "causal language model; use one such as Llama, Qwen or Mistral"
        )
    source = file.parent if file.name == "config.json" else file
    try:
        return AutoConfig.from_pretrained(str(source), local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # the class computes with values from the file and may raise any error
        raise BaseModelError(f"{file}: transformers cannot read it: {' '.join(str(error).split())[:300]}") from error


# Modules that compute hidden states: the body and its blocks (decoder layers).


def find_body(model: Model) -> Model:
    """Return the module that computes hidden states; the whole model if body and head cannot be separated.

    Args:
        model: model without adapters (`get_base_model`).
    """
    body = model.get_decoder()
    # Some classes (ModernBERT) return a part of the head as their decoder, which is a module without children.
    return body if any(True for _ in body.children()) else model


def find_blocks(model: Model) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of decoder layers; both are empty if other lists look the same.

    The blocks are the highest list in the decoder whose members have submodules. Lists of experts are deeper; lists of
    projections or rotations (Gemma 3n, Granite with sliding windows) have members without submodules. If two such lists
    are at the same level (XLM: attentions and feed-forward parts; HRM: stacks run in turn), neither holds the blocks.

    Args:
        model: model with or without adapters; the returned name is the name in this model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    lists = _highest_module_lists(find_body(base)) or _highest_module_lists(base)
    if len(lists) != 1:
        return "", nn.ModuleList()
    return next(name for name, module in model.named_modules() if module is lists[0]), lists[0]


def _highest_module_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Return the lists whose members have submodules, on the highest level that has any."""
    level = [module]
    while level:
        stacks = [
            item
            for item in level
            if isinstance(item, nn.ModuleList) and len(item) and all(list(member.children()) for member in item)
        ]
        if stacks:
            return stacks
        level = [child for item in level for child in item.children()]
    return []

"""What a model is made of, read off its module graph on the meta device: no weight is ever loaded.

Roles come from where a layer stands, not from a table of models. Of the names and classes around a layer the innermost
that says attention or MLP decides; a layer that stands in a decoder layer beside an attention belongs to the MLP (as
fc1 and fc2 of OPT do). Linear attention (Gated DeltaNet in `linear_attn`, RWKV's `attention`) counts as attention. The
projections of state-space mixers (Mamba) are `other`, in no group: their fused kernels read weights past the layer,
where an adapter would be left out, so only who names them gets them. So are vision and audio towers.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ratchet.errors import BaseModelError, first_line
from ratchet.models.device import Model

Kind = Literal["linear", "conv1d", "embedding", "experts"]
"""What peft can put an adapter on. `conv1d` is GPT-2's linear layer with a transposed weight; `experts` is a parameter
that holds the matrices of many experts as one tensor of three dimensions."""
Role = Literal["attention", "mlp", "router", "embedding", "head", "other"]


@dataclass(frozen=True)
class LayerSpec:
    """A matrix of the model that an adapter could stand beside, or as many of one shape as there are experts."""

    name: str
    """Full name of the module; of experts, that of the parameter."""
    kind: Kind
    role: Role
    inputs: int
    outputs: int
    count: int
    """Matrices: the number of experts, else 1."""
    bias: bool


@dataclass(frozen=True)
class ModelSpec:
    """A model without its weights."""

    config: Any
    layers: tuple[LayerSpec, ...]
    others: dict[str, str]
    """Modules that are no layers, and their classes: norms, activations, whole blocks."""
    parameters: int
    """Weights, each once; tied ones once."""
    tied_head: bool
    is_causal: bool
    """Whether it is trained to predict the next token from those before it."""
    class_name: str
    remote_code: bool = False
    directory: Path | None = field(default=None, compare=False)

    @property
    def embedding_rows(self) -> int:
        """Tokens that it has an embedding for, padding included."""
        return int(self.config.get_text_config().vocab_size)

    def model(self, dtype: torch.dtype, attention: Literal["auto", "sdpa", "eager"] = "auto") -> Model:
        """The model on the meta device, in evaluation mode, each weight of the type that it has when loaded."""
        model = _build_on_meta(self.config, dtype, attention, self.remote_code)
        for name, wanted in _fixed_dtypes(model, dtype):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(wanted)
        return model.eval()

    def require_causal(self) -> None:
        """Raises BaseModelError, naming the class, when the model is no causal language model."""
        if not self.is_causal:
            kind = "an encoder-decoder" if getattr(self.config, "is_encoder_decoder", False) else "no decoder"
            raise BaseModelError(
                f"base.source: {self.class_name} ({self.config.model_type}) is {kind}; training is for causal language "
                "models, which predict each token from those before it: take one such as Llama, Qwen or Mistral"
            )


def load(path: Path, remote_code: bool = False) -> ModelSpec:
    """Read the blueprint off a model directory or a bare config file, of any name.

    Raises:
        BaseModelError: there is none, or transformers knows no such model.
    """
    file = path / "config.json" if path.is_dir() else path
    written = _read_config(file)
    config = _parse_config(file, written, remote_code)
    try:
        model = _build_on_meta(config, torch.float32, "auto", remote_code)
    except Exception as error:  # a class's own arithmetic with figures of the file: it may raise anything
        raise BaseModelError(f"{file}: transformers builds no model of it: {first_line(error)}") from error
    return describe(model, remote_code, file.parent)


def from_config(config: Any) -> ModelSpec:
    """The blueprint of a config that is at hand."""
    return describe(_build_on_meta(config, torch.float32, "auto", remote_code=False))


def describe(model: Model, remote_code: bool = False, directory: Path | None = None) -> ModelSpec:
    """The blueprint of a model without adapters that is at hand, on any device; not of one in 4 bits."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return ModelSpec(
        config=model.config,
        layers=list_layers(model),
        others=list_other_modules(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied_head=head is not None and embedding is not None and head.weight is embedding.weight,
        is_causal=_is_causal(model),
        class_name=type(model).__name__,
        remote_code=remote_code,
        directory=directory,
    )


def list_layers(model: Model) -> tuple[LayerSpec, ...]:
    """Every layer of a model without adapters, on any device, in 4 bits or not; in the order of its modules."""
    head = model.get_output_embeddings()
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            size, width = module.num_embeddings, module.embedding_dim
            found.append(LayerSpec(name, "embedding", "embedding", size, width, 1, bias=False))
        elif isinstance(module, nn.Linear | Conv1D):
            role = "head" if module is head else _classify_role(name, classes, model)
            found.append(_matrix_spec(name, module, role))
        else:
            found += _expert_specs(name, module, classes, model)
    return tuple(found)


def list_other_modules(model: Model) -> dict[str, str]:
    """Names and classes of all modules that are no layers."""
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.Embedding | nn.Linear | Conv1D)
    }


def _matrix_spec(name: str, module: nn.Module, role: Role) -> LayerSpec:
    bias = module.bias is not None
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return LayerSpec(name, "conv1d", role, inputs, outputs, 1, bias)
    # transformers notes on a 4-bit layer what it was made from.
    kind: Kind = "conv1d" if getattr(module, "source_cls", None) is Conv1D else "linear"
    linear = cast(nn.Linear, module)
    return LayerSpec(name, kind, role, linear.in_features, linear.out_features, 1, bias)


def _expert_specs(name: str, module: nn.Module, classes: dict[str, str], model: Model) -> Iterator[LayerSpec]:
    """Fused experts among a module's own parameters. transformers stores them as [experts, outputs, inputs], or, where
    the module says `is_transposed`, as [experts, inputs, outputs]; peft goes by the same word."""
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return
    own = dict(module.named_parameters(recurse=False))
    for leaf, parameter in own.items():
        if parameter.ndim != 3:
            continue
        count, outputs, inputs = parameter.shape
        if getattr(module, "is_transposed", False):
            inputs, outputs = outputs, inputs
        full = f"{name}.{leaf}"
        role = _classify_role(full, classes, model)
        yield LayerSpec(full, "experts", role, inputs, outputs, count, bias=f"{leaf}_bias" in own)


_TOWER = re.compile(r"vision|visual|image|audio|speech|multi_modal|mm_projector", re.IGNORECASE)
_RECURRENCE = re.compile(r"mamba|ssm|mlstm|recurrent_block|(^|[a-z])Mixer$")
_ATTENTION = re.compile(r"attn|attention|^mha$", re.IGNORECASE)
_MLP = re.compile(r"(mlp|feed_?forward|moe|experts?|moe_?block)$|ffn|^ff$|denserelu", re.IGNORECASE)
_WORDS: dict[Role, re.Pattern[str]] = {"attention": _ATTENTION, "other": _RECURRENCE, "mlp": _MLP}
_ATTENTION_LEAF = re.compile(
    r"([qkvo]_proj|w?_?(qkv|q|k|v)(_proj)?|query|key|value|query_key_value|c_attn)", re.IGNORECASE
)
_MLP_LEAF = re.compile(r"c?_?fc_?\w*|lin(ear)?_?\d?|dense_?\d?|w\d|wi\w*|wo|ff\w*|output|intermediate", re.IGNORECASE)
_ROUTER = re.compile(r"router", re.IGNORECASE)


def _classify_role(name: str, classes: dict[str, str], model: Model) -> Role:
    segments = name.split(".")
    if any(_TOWER.search(segment) for segment in segments):
        return "other"
    if _is_router(segments, model):
        return "router"
    for depth in range(len(segments) - 1, 0, -1):
        said = segments[depth - 1], classes[".".join(segments[:depth])]
        for role, word in _WORDS.items():
            if any(word.search(text) for text in said):
                return role
    if _ATTENTION_LEAF.fullmatch(segments[-1]):
        return "attention"
    return "mlp" if _is_sibling_of_attention(segments, classes) else "other"


def _is_router(segments: list[str], model: Model) -> bool:
    """A `router`, or a `gate` (`shared_expert_gate`) in a module that has experts."""
    if any(_ROUTER.search(segment) for segment in segments):
        return True
    if segments[-1] != "gate" and not segments[-1].endswith("expert_gate"):
        return False
    beside = model.get_submodule(".".join(segments[:-1]))
    return any("expert" in name for name, _ in (*beside.named_children(), *beside.named_parameters(recurse=False)))


def _is_sibling_of_attention(segments: list[str], classes: dict[str, str]) -> bool:
    """Whether a layer with a name of an MLP's is in a numbered block that has an attention as another child."""
    numbered = [depth for depth in range(1, len(segments)) if segments[depth - 1].isdigit()]
    if not numbered or not _MLP_LEAF.fullmatch(segments[numbered[-1]]):
        return False
    block = ".".join(segments[: numbered[-1]]) + "."
    return any(_ATTENTION.search(name[len(block) :].split(".")[0]) for name in classes if name.startswith(block))


def _is_causal(model: Model) -> bool:
    """Encoders have classes for causal models too, which only say `is_decoder` when they are meant so."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return False
    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return not encoder or bool(getattr(config, "is_decoder", True))


def _build_on_meta(config: Any, dtype: torch.dtype, attention: str, remote_code: bool) -> Model:
    """The model in transformers' own way, which is how it is loaded; encoder-decoders as what they are."""
    made: Any = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    wanted = {} if attention == "auto" else {"attn_implementation": attention}
    with torch.device("meta"), use_plain_linears(config):  # from_config writes into the config that it is given
        model = made.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=remote_code, **wanted)
    model.config.use_cache = False
    return model


@contextmanager
def use_plain_linears(config: Any) -> Iterator[None]:
    """While a Falcon is made, its own class of linear layers is the plain one, which computes the same.

    transformers puts into 4 bits what is exactly a `nn.Linear`, so of a Falcon as it comes it would store nothing so.
    """
    if config.model_type != "falcon":
        yield
        return
    from transformers.models.falcon import modeling_falcon

    own = modeling_falcon.FalconLinear
    modeling_falcon.FalconLinear = nn.Linear
    try:
        yield
    finally:
        modeling_falcon.FalconLinear = own


def _fixed_dtypes(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    """Parameters that transformers loads in another type than `dtype`, whatever it is asked for."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, by_group, _ = build_glob_alternation(list(plan))
        for name, _ in model.named_parameters():
            if (found := pattern.search(name)) and found.lastgroup:
                yield name, plan[by_group[found.lastgroup]]


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise BaseModelError(f"{file}: no such file; give a model directory with a config.json, or a config file")
    try:
        written = json.loads(file.read_bytes())
    except ValueError as error:
        raise BaseModelError(f"{file}: not JSON ({error}); bring the model's original config.json") from None
    if not isinstance(written, dict) or not isinstance(written.get("model_type"), str):
        raise BaseModelError(f"{file}: no model_type in it, so it is no config of a transformers model")
    return written


def _parse_config(file: Path, written: dict[str, Any], remote_code: bool) -> Any:
    """The config in the class of its model type. Only code that was asked for by name is run."""
    kind = written["model_type"]
    if kind not in CONFIG_MAPPING and not (remote_code and "auto_map" in written):
        brings = "it brings code of its own" if "auto_map" in written else "a newer transformers may"
        todo = "repeat base.source in base.trust_remote_code to let that run" if "auto_map" in written else "update it"
        raise BaseModelError(f"{file}: this transformers knows no model_type {kind}; {brings}: {todo}")
    if not remote_code and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not written.get("is_encoder_decoder"):
        raise BaseModelError(
            f"{file}: model_type {kind} ({', '.join(written.get('architectures') or ('no class named',))}) is no "
            "causal language model; training is for those: take one such as Llama, Qwen or Mistral"
        )
    place = file.parent if file.name == "config.json" else file
    try:
        return AutoConfig.from_pretrained(str(place), local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # as above
        raise BaseModelError(f"{file}: transformers cannot read it: {first_line(error)}") from error


# Which modules of a model are its decoder layers (blocks): what hidden states go through one after the other.


def find_body(whole: Model) -> Model:
    """What makes hidden states of tokens; the whole model where that cannot be told from its head.

    Args:
        whole: without adapters around it (`get_base_model`).
    """
    body = whole.get_decoder()
    # A plain module is what some classes (ModernBERT) call their decoder: a part of the head.
    return body if any(True for _ in body.children()) else whole


def find_blocks(model: Model) -> tuple[str, nn.ModuleList]:
    """The blocks and their name in the model; none where they cannot be told from other lists of modules.

    Of the decoder's lists whose members have modules in them, they are the one that stands highest. Experts stand
    lower; lists of projections or rotations (Gemma 3n, Granite with sliding windows) have plain members. Where two
    stand equally high (XLM: attentions, feed-forward parts; HRM: stacks run in turn), there is no one after the other.

    Args:
        model: with adapters or without; the name is the one that it has in this model.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    stacks = _highest_module_lists(find_body(whole)) or _highest_module_lists(whole)
    if len(stacks) != 1:
        return "", nn.ModuleList()
    return next(name for name, module in model.named_modules() if module is stacks[0]), stacks[0]


def _highest_module_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Lists whose members have modules in them, of the highest level that has one."""
    level = [module]
    while level:
        if found := [one for one in level if isinstance(one, nn.ModuleList) and _is_block_stack(one)]:
            return found
        level = [child for one in level for child in one.children()]
    return []


def _is_block_stack(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(any(True for _ in one.children()) for one in modules)

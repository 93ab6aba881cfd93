"""Section export of params.yaml: how the adapter becomes models that can be handed on."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ratchet.config.fields import Name, PositiveCount, Section, convert_to_tuple, parse_number
from ratchet.config.units import parse_bytes
from ratchet.errors import SettingsError

PlainType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4"]
"""Types of GGUF tensors that are written here, by the quantiser of the `gguf` package."""
ToolType = Literal["q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"]
"""Those that llama.cpp's own llama-quantize makes of an F32 file."""
GgufType = PlainType | ToolType
OnnxType = Literal["fp32", "int8"]


def _convert_to_lower_case(value: Any) -> Any:
    value = convert_to_tuple(value)
    return tuple(one.lower() if isinstance(one, str) else one for one in value) if isinstance(value, tuple) else value


def _require_distinct_types(types: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [one for i, one in enumerate(types) if one in types[:i]]:
        raise ValueError(f"{twice[0]} is named twice")
    return types


def _parse_size(value: Any) -> Any:
    value = parse_number(value)
    try:
        return parse_bytes(value, "it") if isinstance(value, str) else value
    except SettingsError as error:
        raise ValueError(str(error).removeprefix("it: ")) from None


class AdditionalAdapterSettings(Section):
    """A further adapter of the same base that is merged, too."""

    adapter: Name
    """Directory of a saved adapter, relative to the project, such as mlruns/models/0123456789abcdef/adapter."""
    weight: Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)] = 1.0
    """Its update is multiplied by this."""


class GgufSettings(Section):
    """Files for llama.cpp, Ollama and LM Studio."""

    types: Annotated[
        tuple[GgufType, ...], BeforeValidator(_convert_to_lower_case), AfterValidator(_require_distinct_types)
    ] = ()
    """f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 ...; q4_k_m and the like need llama.cpp's tools (machine.llama_cpp)."""


class OnnxSettings(Section):
    """Directories for onnxruntime."""

    types: Annotated[
        tuple[OnnxType, ...], BeforeValidator(_convert_to_lower_case), AfterValidator(_require_distinct_types)
    ] = ()
    """fp32, and int8 (matrices and token embedding in 8 bits, a scale for each 32 numbers)."""


class Export(Section):
    """How the adapter becomes a model of its own, in which formats, and how each is compared with what was trained."""

    merge_base: Literal["auto", "dequantized", "original"] = "auto"
    """Weights that the adapter is added to: trained against, before quantisation, or whichever is measured closer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the merged model is stored; the merge itself is computed in float32."""
    weight: Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)] = 1.0
    """The adapter's update is multiplied by this before it is added."""
    also: Annotated[tuple[AdditionalAdapterSettings, ...], BeforeValidator(convert_to_tuple)] = ()
    """Further adapters of the same base, each with its weight: updates are summed."""
    modules: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Merge the updates of these modules only: names or regular expressions, as train.targets; empty: all."""
    shard_size: Annotated[int, BeforeValidator(_parse_size), Field(gt=0)] = 4_000_000_000
    """Largest file of the merged model, in bytes, or such as 4GB; a single tensor may be larger."""
    gguf: GgufSettings = GgufSettings()
    """Files for llama.cpp, each run in it."""
    onnx: OnnxSettings = OnnxSettings()
    """Directories for onnxruntime, each run in it."""
    parity_rows: PositiveCount = 32
    """Test rows on which every exported form is compared with base + adapter, token by token."""
    parity_positions: PositiveCount = 256
    """Answer positions at which whole distributions are compared, shared by the rows: long answers are thinned."""
    task_rows: PositiveCount = 200
    """Test rows that every exported form answers; the answers are scored as the evaluation scores them."""
    data_licence: Name | None = None
    """Licence of the data, as you declare it; stands in bundle.json and the model card."""

    @property
    def is_plain(self) -> bool:
        """Whether exactly the trained adapter is merged, as a whole."""
        return self.weight == 1 and not self.also and not self.modules

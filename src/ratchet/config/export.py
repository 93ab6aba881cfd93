"""Section `export` of params.yaml: how the adapter is merged, and in which formats the model is written."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ratchet.config.fields import (
    Name,
    Names,
    Number,
    PositiveCount,
    Section,
    convert_to_tuple,
    parse_number,
    parse_size,
)

BuiltInGgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4"]
"""GGUF types that Ratchet writes itself, with the quantizer of the `gguf` package."""
LlamaCppGgufType = Literal["q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"]
"""GGUF types that llama.cpp's llama-quantize makes from an F32 file."""
GgufType = BuiltInGgufType | LlamaCppGgufType
BitsAndBytesType = Literal["int8"]
OnnxType = Literal["fp32", "fp16", "int8"]
MergeMethod = Literal["linear", "ties", "dare_linear", "dare_ties"]


def _convert_to_lower_case(value: Any) -> Any:
    value = convert_to_tuple(value)
    if not isinstance(value, tuple):
        return value
    return tuple(name.lower() if isinstance(name, str) else name for name in value)


def _require_distinct(types: tuple[str, ...]) -> tuple[str, ...]:
    if duplicates := [name for i, name in enumerate(types) if name in types[:i]]:
        raise ValueError(f"expected each type once, but {duplicates[0]} is named twice")
    return types


class AdditionalAdapterSettings(Section):
    """Another adapter of the same base to merge."""

    adapter: Name
    """Directory of a saved adapter, relative to the project, such as mlruns/models/0123456789abcdef/adapter."""
    weight: Number = 1.0
    """Factor of its update."""
    prepared_data: Name | None = None
    """Prepared data of its own project (its experiments/data), on which its loss is compared. null: this project's."""


class GgufSettings(Section):
    """GGUF files for llama.cpp, Ollama and LM Studio."""

    types: Annotated[
        tuple[GgufType, ...], BeforeValidator(_convert_to_lower_case), AfterValidator(_require_distinct)
    ] = ()
    """f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, ...; q4_k_m and the like need llama.cpp (machine.llama_cpp)."""


class BitsAndBytesSettings(Section):
    """Quantized Hugging Face directories for transformers and vLLM."""

    types: Annotated[
        tuple[BitsAndBytesType, ...], BeforeValidator(_convert_to_lower_case), AfterValidator(_require_distinct)
    ] = ()
    """int8: LLM.int8, with 8-bit matrices and one scale per row."""


class OnnxSettings(Section):
    """ONNX models for onnxruntime."""

    types: Annotated[
        tuple[OnnxType, ...], BeforeValidator(_convert_to_lower_case), AfterValidator(_require_distinct)
    ] = ()
    """fp32, fp16 (matrices), and int8 (8-bit matrices and token embedding, with one scale per 32 numbers)."""


class Export(Section):
    """How the adapter is merged, and in which formats the model is written and checked."""

    merge_base: Literal["auto", "dequantized", "original"] = "auto"
    """Base weights to merge into: dequantized (as in training), original, or `auto`: the one measured closer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the stored merged weights. The merge itself is computed in float32."""
    weight: Number = 1.0
    """Factor of the adapter's update."""
    additional_adapters: Annotated[tuple[AdditionalAdapterSettings, ...], BeforeValidator(convert_to_tuple)] = ()
    """More adapters of the same base, each with a weight; the updates are combined by merge_method."""
    merge_method: MergeMethod = "linear"
    """How the updates of several adapters are combined: linear (added), ties, dare_linear or dare_ties."""
    density: Annotated[float, Field(gt=0, lt=1), BeforeValidator(parse_number)] = 0.5
    """Share of the entries of each update that ties and dare keep."""
    modules: Names = ()
    """Merge only these modules: names or regular expressions, as in train.target_modules. Empty: all."""
    max_shard_size: Annotated[int, Field(gt=0), BeforeValidator(parse_size)] = 4_000_000_000
    """Maximum size of a weight file, in bytes or such as 4GB. A single tensor may exceed it."""
    gguf: GgufSettings = GgufSettings()
    """GGUF files to write; each is run with llama.cpp and compared."""
    bitsandbytes: BitsAndBytesSettings = BitsAndBytesSettings()
    """Quantized Hugging Face directories to write; each is run with transformers and compared."""
    onnx: OnnxSettings = OnnxSettings()
    """ONNX models to write; each is run with onnxruntime and compared."""
    parity_rows: PositiveCount = 32
    """Test rows on which each exported format is compared token by token with base + adapter."""
    parity_positions: PositiveCount = 256
    """Answer positions, over all rows, at which whole next-token distributions are compared."""
    task_rows: PositiveCount = 200
    """Test rows that each exported format answers; the answers are scored as in stage evaluate."""
    data_licence: Name | None = None
    """Licence of the data, as written to bundle.json and the model card. null: not stated."""

    @model_validator(mode="after")
    def _check_merge_method(self) -> "Export":
        if self.merge_method != "linear" and not self.additional_adapters:
            raise ValueError(
                f"merge_method: found {self.merge_method} for a single adapter; expected additional_adapters, or linear"
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the trained adapter alone is merged, fully and with weight 1."""
        return self.weight == 1 and not self.additional_adapters and not self.modules

"""What MLflow wants to find in a registered version's folder, so that `mlflow models serve` works on it.

    MLmodel  requirements.txt  python_env.yaml  conda.yaml  components/tokenizer/

The flavor is `mlflow.transformers` on the folder's own `hf/`: the serving process needs mlflow, torch and transformers,
neither Ratchet nor peft. All of it is signed with the model, since MLmodel says what is imported. Classes are named as
transformers' own Auto classes on purpose: a name that transformers does not have makes MLflow trust code that came with
the model (mlflow/transformers/model_io.py). No `source_model_name` for a like reason: MLflow would ask a hub for it.
Answers are the likeliest ones, as every form was compared, unless a request says `do_sample`: transformers' pipeline
would draw at temperature 0.7 where nobody said anything. The flavor writes prompts by the chat template and has them
tokenised as any text: `add_special_tokens` is off, or the first token would be there twice.

MLflow 3.17 writes a file `registered_model_meta` (name and version) into a version's folder when it opens it from a
local disk (store/artifact/models_artifact_repo.py): files.FOREIGN. Nothing reads it; seal and signature leave it out.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

MLMODEL = "MLmodel"
TASK = "llm/v1/chat"
SERVED_BY = ("mlflow", "torch", "transformers", "accelerate")
_TOKENIZER = "components/tokenizer"
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_NO_TOKENIZER = ("config.json", "generation_config.json", "README.md")


def files_of(directory: Path) -> dict[str, bytes]:
    """The files, by their names in the folder of the promoted model.

    Args:
        directory: Hugging Face directory of the merged model; its tokenizer's files are copied to where MLflow looks.
    """
    found = {
        f"{_TOKENIZER}/{path.name}": path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _NO_TOKENIZER
    }
    requirements = [f"{name}=={version(name).partition('+')[0]}" for name in SERVED_BY]
    found["requirements.txt"] = ("\n".join(requirements) + "\n").encode()
    found["python_env.yaml"] = _yaml({"python": platform.python_version(), "dependencies": ["-r requirements.txt"]})
    found["conda.yaml"] = _yaml({
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={platform.python_version()}", "pip", {"pip": requirements}],
    })  # fmt: skip
    return found | {MLMODEL: _yaml(_model())}


def _model() -> dict[str, Any]:
    return {
        "flavors": {
            "transformers": {
                "task": "text-generation", "instance_type": "TextGenerationPipeline", "inference_task": TASK,
                "pipeline_model_type": "AutoModelForCausalLM", "model_binary": "hf", "components": ["tokenizer"],
                "tokenizer_type": "AutoTokenizer", "transformers_version": version("transformers"), "code": None,
            },
            "python_function": {
                "loader_module": "mlflow.transformers", "python_version": platform.python_version(),
                "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
                "config": {"do_sample": False, "add_special_tokens": False},
            },
        },
        "metadata": {"task": TASK},
        "mlflow_version": version("mlflow"),
        "signature": _signature(),
    }  # fmt: skip


def _signature() -> dict[str, Any]:
    """Of MLflow's chat task, as far as the flavor obeys it: it takes `stop`, and does nothing with it."""
    texts = {key: {"type": "string", "required": True} for key in ("role", "content")}
    inputs = [
        {"name": "messages", "type": "array", "items": {"type": "object", "properties": texts}, "required": True},
        {"name": "max_tokens", "type": "long", "required": False},
        {"name": "do_sample", "type": "boolean", "required": False},
        {"name": "temperature", "type": "double", "required": False},
        {"name": "top_p", "type": "double", "required": False},
    ]
    outputs = [{"name": name, "type": "string", "required": True} for name in ("id", "object", "model")]
    return {"inputs": json.dumps(inputs), "outputs": json.dumps(outputs), "params": None}


def _yaml(value: Any) -> bytes:
    """JSON, which is YAML."""
    return (json.dumps(value, indent=2) + "\n").encode()

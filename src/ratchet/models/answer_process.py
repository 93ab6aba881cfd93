"""`python -m ratchet.models.answer_process DIR`: answers prompts greedily with a Hugging Face directory.

Standard input: a JSON list of {"question", "prompt" (token ids), "tokens" (how many, at most)}; standard output: a line
of JSON, a list of {"prompt" (ids that the directory's own tokenizer makes of the question), "answer" (ids)}. Exit 1
with one line of what is wrong. No code that lies in the directory is run, and no hub is asked.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def generate_answers(directory: Path, asked: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Load model and tokenizer from disk alone, and answer each prompt token by token.

    Raises:
        OSError, ValueError: transformers cannot load the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True).eval()
    ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    found = []
    with torch.inference_mode():
        for one in asked:
            messages = [{"role": "user", "content": one["question"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            found.append(
                {"prompt": list(prompt), "answer": _decode_greedily(model, one["prompt"], one["tokens"], stops)}
            )
    return found


def _decode_greedily(model: Any, prompt: list[int], most: int, stops: set[int]) -> list[int]:
    """The likeliest token, again and again; settings in generation_config.json that draw or penalise are not asked."""
    import torch

    ids, kept, found = torch.tensor([prompt]), None, list[int]()
    while len(found) < most and not (found and found[-1] in stops):
        out = model(input_ids=ids, past_key_values=kept, use_cache=True)
        kept = out.past_key_values
        found.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([found[-1:]])
    return found


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ratchet.models.answer_process")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(words)
    try:
        found = generate_answers(options.directory, json.load(sys.stdin), options.threads)
    except Exception as error:  # whatever it is, the model cannot be served: the caller needs the reason, not our trace
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

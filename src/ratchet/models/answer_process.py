"""Answers prompts greedily with a Hugging Face or ONNX directory, in a separate process.

Run as `python -m ratchet.models.answer_process DIR [--threads N] [--onnx | --smoke-test]`.
Standard input: a JSON list of {"question", "prompt" (token ids), "tokens" (maximum number of new tokens)}.
Standard output: one line of JSON, a list of {"prompt" (token ids from the directory's own tokenizer for the question),
"answer" (token ids)}. On failure, the process writes one line to standard error and exits with code 1.
With --onnx, the process imports neither torch nor transformers, and "prompt" is null, because it renders no chat
template.
With --smoke-test, the process reads no input: it answers one fixed prompt and prints one line with the answer.
The process never executes code in the directory and never contacts the hub.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ratchet.errors import DamagedFileError

SMOKE_PROMPT = "Hello"
SMOKE_TOKENS = 8


def generate_answers(directory: Path, requests: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Load model and tokenizer from local files, and answer the prompt of each request token by token.

    Raises OSError, ValueError if transformers cannot load the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True).eval()
    eos_token_id = model.generation_config.eos_token_id
    stop_ids = set(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])
    answers = []
    with torch.inference_mode():
        for request in requests:
            messages = [{"role": "user", "content": request["question"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            # Greedy decoding; sampling and penalties in generation_config.json are ignored.
            ids, cache, answer = torch.tensor([request["prompt"]]), None, list[int]()
            while len(answer) < request["tokens"] and not (answer and answer[-1] in stop_ids):
                output = model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                answer.append(int(output.logits[0, -1].argmax()))
                ids = torch.tensor([answer[-1:]])
            answers.append({"prompt": list(prompt), "answer": answer})
    return answers


def generate_onnx_answers(directory: Path, requests: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Answer each prompt with the graph in the directory. Raises DamagedFileError if the directory cannot be opened."""
    from ratchet.models.runtimes import onnx

    with onnx.open_runtime(directory, threads) as runtime:
        # The lengths of the verified answers are given, so no end token is needed.
        return [
            {"prompt": None, "answer": runtime.generate(request["prompt"], request["tokens"], ())}
            for request in requests
        ]


def run_smoke_test(directory: Path) -> str:
    """Load model and tokenizer from local files, answer one prompt greedily and return the answer.

    Raises:
        DamagedFileError: a logit is not finite, or the model generated nothing.
        OSError, ValueError: transformers cannot load the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True).eval()
    conversation = [{"role": "user", "content": SMOKE_PROMPT}]
    prompt = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        logits = model(**prompt).logits
        if not torch.isfinite(logits).all():
            raise DamagedFileError(f"{directory}: logits are not finite; export the model again")
        answer = model.generate(**prompt, max_new_tokens=SMOKE_TOKENS, do_sample=False)
    new_tokens = answer[0, prompt["input_ids"].shape[1] :]
    if not len(new_tokens):
        raise DamagedFileError(f"{directory}: the model generated nothing; export it again")
    return str(tokenizer.decode(new_tokens))


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m ratchet.models.answer_process")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--onnx", action="store_true")
    mode.add_argument("--smoke-test", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.smoke_test:
            print(f"answers {run_smoke_test(options.directory)!r}")
            return 0
        generate = generate_onnx_answers if options.onnx else generate_answers
        answers = generate(options.directory, json.load(sys.stdin), options.threads)
    except Exception as error:  # after any failure the caller needs the reason, not a traceback
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())

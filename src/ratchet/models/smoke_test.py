"""Checks in a separate process that a saved model loads and answers.

Run as `python -m ratchet.models.smoke_test DIR`. Exit code 0: one line with the answer. Exit code 1: one line with the
reason.
"""

import sys
from pathlib import Path

from ratchet.errors import DamagedFileError

PROMPT = "Hello"
NEW_TOKENS = 8


def run_smoke_test(directory: Path) -> str:
    """Load model and tokenizer from local files and answer one prompt greedily; return the answer.

    Raises:
        DamagedFileError: a logit is not finite, or the model generated nothing.
        OSError, ValueError: transformers cannot load the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True).eval()
    conversation = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        logits = model(**prompt).logits
        if not torch.isfinite(logits).all():
            raise DamagedFileError(f"{directory}: logits are not finite; export the model again")
        answer = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    new = answer[0, prompt["input_ids"].shape[1] :]
    if not len(new):
        raise DamagedFileError(f"{directory}: the model generated nothing; export it again")
    return str(tokenizer.decode(new))


def main(arguments: list[str]) -> int:
    """Run the command; `arguments` holds the directory."""
    try:
        print(f"answers {run_smoke_test(Path(arguments[0]))!r}")
    except (
        Exception
    ) as error:  # on any failure the model cannot be served; the caller needs the reason, not a traceback
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

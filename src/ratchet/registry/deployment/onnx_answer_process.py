"""Answers prompts greedily with an ONNX directory in onnxruntime, in a separate process.

Run as `python -m ratchet.registry.deployment.onnx_answer_process DIR [--threads N]`. Input and output are as in
`ratchet.models.answer_process`, but "prompt" is null, because no chat template is rendered here.
"""

import argparse
import json
import sys
from pathlib import Path

from ratchet.models.runtimes import onnx


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m ratchet.registry.deployment.onnx_answer_process")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        with onnx.open_runtime(options.directory, options.threads) as runtime:
            requests = json.load(sys.stdin)
            # The verified answers give the lengths, so no end token is needed.
            answers = [
                {"prompt": None, "answer": runtime.generate(one["prompt"], one["tokens"], ())} for one in requests
            ]
    except Exception as error:  # the caller needs the reason in one line, not a traceback
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())

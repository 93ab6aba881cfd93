"""`python -m ratchet.registry.deployment.onnx_answers DIR`: an ONNX directory in onnxruntime answers prompts greedily.

Reads and writes what `ratchet.models.answer_process` does; "prompt" is null, for no chat template is rendered here.
"""

import argparse
import json
import sys
from pathlib import Path

from ratchet.models.runtimes import onnx


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ratchet.registry.deployment.onnx_answers")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(words)
    try:
        with onnx.open_runtime(options.directory, options.threads) as runtime:
            asked = json.load(sys.stdin)
            # answers that were verified tell how long they are, so nothing has to end them
            found = [{"prompt": None, "answer": runtime.generate(one["prompt"], one["tokens"], ())} for one in asked]
    except Exception as error:  # whatever it is, the model cannot be served: the caller needs the reason, not our trace
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

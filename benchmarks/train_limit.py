"""Computes the minimum operations of a training, and measures this machine's rate of matrix products.

    python benchmarks/train_limit.py '{"shape": "30M", "tokens": 1024, "threads": 1, "seconds": 3}'     prints FLOP/s

Useful FLOPs of a step; a product of [m, k] and [k, n] counts as 2 m k n:

- frozen linear layers of the blocks with P weights: 2 P per token forward, 2 P for the gradient of their inputs. They
  have no weight gradient. Queries, keys and values of the first block need no gradient of their inputs, the embeddings;
- LoRA with p weights: 6 p per token (forward, gradient of inputs, gradient of weights);
- in the last block, all layers except keys and values count only at trained positions;
- head, vocabulary x width: 4 times this product per trained position, and nothing at other positions;
- attention, for each row of n tokens and each layer: scores and values are 4 n² width forward, half of it with a causal
  mask, and twice as much backward: 6 n² width. Each row of a pack counts separately.

Padding, masked squares, recomputed activations, softmax, norms and the optimizer do not count, because they can be
saved. The rate is that of `torch.mm` in float32 on the same shapes, as Ratchet lets torch compute it (by oneDNN where
that is faster): `tokens` rows by every linear layer, forward and transposed, in the proportion in which a step has
them.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence

from train_projects import SHAPES

LAYERS_OF_BLOCK, KEYS_AND_VALUES = 7, (1, 2)
"""Number of linear layers of a block, and the positions of keys and values among them, in the order of
`linear_layers`."""
DENSE_BFLOAT16 = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "L40S": 362e12}
"""Peak FLOP/s of GPUs in dense bfloat16 products (NVIDIA's data sheets). A key is a word of torch's name for the
GPU."""


def linear_layers(shape: str) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of each linear layer of the blocks of one of SHAPES."""
    found = SHAPES[shape]
    width, inner = found["hidden_size"], found["intermediate_size"]
    keys = width // found["num_attention_heads"] * found["num_key_value_heads"]
    for _ in range(found["num_hidden_layers"]):
        yield from ((width, width), (width, keys), (width, keys), (width, width))
        yield from ((width, inner), (width, inner), (inner, width))


def useful_flops(shape: str, rank: int, lengths: Sequence[int], trained_tokens: int) -> float:
    """Return the FLOPs of one epoch over rows of these lengths, with an adapter on all linear layers of the blocks."""
    found, layers = SHAPES[shape], list(linear_layers(shape))
    frozen = sum(inputs * outputs for inputs, outputs in layers)
    first = sum(inputs * outputs for inputs, outputs in layers[:3])
    adapters = rank * sum(inputs + outputs for inputs, outputs in layers)
    looked_at = [layer for place, layer in enumerate(layers[-LAYERS_OF_BLOCK:]) if place not in KEYS_AND_VALUES]
    saved = sum(4 * inputs * outputs + 6 * rank * (inputs + outputs) for inputs, outputs in looked_at)
    attention = 6 * found["hidden_size"] * found["num_hidden_layers"] * sum(int(n) ** 2 for n in lengths)
    head = 4 * found["vocab_size"] * found["hidden_size"] * trained_tokens
    all_tokens = int(sum(lengths))
    blocks = (4 * frozen - 2 * first + 6 * adapters) * all_tokens - saved * (all_tokens - trained_tokens)
    return float(blocks + attention + head)


def rate(shape: str, tokens: int, threads: int, seconds: float) -> tuple[float, float]:
    """Return the FLOP/s of float32 products on this machine, measured for at least this many seconds: by wall-clock
    time and by CPU time."""
    import torch

    from ratchet.models import cpu_products

    cpu_products.use_onednn()
    torch.set_num_threads(threads)
    layers = sorted(set(linear_layers(shape)))
    weights = [torch.randn(outputs, inputs) for inputs, outputs in layers]
    states = [torch.randn(tokens, inputs) for inputs, _ in layers]
    gradients = [torch.randn(tokens, outputs) for _, outputs in layers]
    counts = [list(linear_layers(shape)).count(layer) for layer in layers]
    once = sum(4 * tokens * inputs * outputs * n for (inputs, outputs), n in zip(layers, counts, strict=True))
    flops, begun, begun_cpu_s = 0, 0.0, 0.0
    while not begun or time.perf_counter() - begun < seconds:
        for weight, state, gradient, count in zip(weights, states, gradients, counts, strict=True):
            for _ in range(count):
                torch.mm(state, weight.t())
                torch.mm(gradient, weight)
        if begun:
            flops += once
        else:
            # the first round, which touches memory, does not count
            begun, begun_cpu_s = time.perf_counter(), time.process_time()
    return flops / (time.perf_counter() - begun), flops / (time.process_time() - begun_cpu_s)


def peak_of_gpu(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by torch's name for it, or None if the GPU is not in the table."""
    words = name.replace("-", " ").split()
    return next((peak for word, peak in DENSE_BFLOAT16.items() if word in words), None)


if __name__ == "__main__":
    print(json.dumps(rate(**json.loads(sys.argv[1]))))

"""The last block computed where it is looked at: nothing but the head reads its output, and that at some positions.

Keys and values of the last block are needed everywhere, for learned positions attend to all before them. Its queries,
what it makes of the attention, and its feed-forward layers are needed at learned positions alone, forward and back.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.model.blocks import blocks_of
from ratchet.model.device import Model

QUERIES, KEYS, OUTPUTS = {"q_proj"}, {"k_proj", "v_proj"}, {"o_proj", "out_proj", "dense"}
"""Names of linear layers of an attention, whatever comes between them."""
FEED_FORWARD = {"mlp", "feed_forward"}
LINEAR = {
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "c_proj",
    "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3",
}  # fmt: skip
"""Names of layers of a feed-forward part that takes each position by itself; one with experts has others."""
BETWEEN = {"act", "act_fn", "activation", "activation_fn", "dropout", "resid_dropout"}
WORTH_SHARE = 0.9
"""Share of learned positions from which on picking them costs what it saves."""


@contextmanager
def picked(model: Model, places: Tensor, shape: torch.Size) -> Iterator[None]:
    """A model whose last block gives what it always does at some places, and anything elsewhere.

    The backward pass belongs into it: a block that is recomputed has to be computed in the same way.

    Args:
        model: without adapters around it: its body is run in here.
        places: int64 [wanted], ascending, each once: row x positions of a row + position.
        shape: rows and positions of a row.
    """
    with ExitStack() as stack:
        if 0 < len(places) <= WORTH_SHARE * shape.numel():
            for module in _by_position(model):
                around = _Places(places, shape)
                stack.callback(module.register_forward_pre_hook(around.before).remove)
                stack.callback(module.register_forward_hook(around.behind).remove)
        yield


def _by_position(model: Model) -> Iterator[nn.Module]:
    """Parts of the last block that take each position by itself; none of a class that is not transformers' own, for
    such may run its blocks several times (Ouro), and the last one's output would be read at all positions."""
    _, blocks = blocks_of(model)
    if not len(blocks) or not type(model).__module__.startswith("transformers."):
        return
    for name, part in blocks[-1].named_children():
        inner = {name for name, _ in part.named_children()}
        if name in FEED_FORWARD and inner & LINEAR and inner <= LINEAR | BETWEEN:
            yield part
        elif inner >= QUERIES | KEYS and inner & OUTPUTS:
            yield from (layer for name, layer in part.named_children() if name in QUERIES | OUTPUTS)


class _Places:
    """Around a module: its input at the places only, its output where it belongs with zeros elsewhere."""

    def __init__(self, places: Tensor, shape: torch.Size) -> None:
        self.places, self.shape = places, shape
        self._picked = False

    def before(self, _module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._picked = bool(inputs) and inputs[0].shape[:-1] == self.shape
        if not self._picked:
            return inputs
        return (inputs[0].flatten(0, 1).index_select(0, self.places).unsqueeze(0), *inputs[1:])

    def behind(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if not self._picked:
            return output
        whole = output.new_zeros(self.shape.numel(), output.shape[-1])
        return whole.index_copy(0, self.places, output[0]).view(*self.shape, -1)

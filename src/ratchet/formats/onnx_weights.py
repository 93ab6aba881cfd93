"""The weights of a merged model, in float32, one at a time."""

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from ratchet.formats.onnx_trace import Traced
from ratchet.model import quantized, weights


class Weights:
    """Reads a parameter from the model's files when it is asked for.

    Where the files name their tensors otherwise than the model's class does, which old checkpoints do, the model is
    loaded as a whole, for only transformers knows what became of each.
    """

    def __init__(self, directory: Path, traced: Traced) -> None:
        reader = weights.Reader(directory)
        names: dict[str, list[str]] = {name: [] for name in traced.weights}
        for name, first in traced.names.items():
            names[first].append(name)
        self._stored: dict[str, Any] = {}
        stored = reader.tensors()
        for first, all_names in names.items():
            place = next((name for name in all_names if name in stored), None)
            if place is not None and tuple(stored[place].get_shape()) == traced.weights[first]:
                self._stored[first] = stored[place]
        self.streamed = len(self._stored) == len(names)
        if not self.streamed:
            model = quantized.load_plain(directory, torch.float32, torch.device("cpu"))
            self._stored = dict(model.named_parameters())

    def array(self, name: str) -> NDArray[Any]:
        """One parameter."""
        found: NDArray[Any] = self._stored[name][...].detach().to(torch.float32).numpy()
        return found

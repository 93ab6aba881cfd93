"""Base models, adapters, merging and scoring: the room of torch, transformers and peft."""

import logging
import warnings

# Said at import, by whichever module comes first, and of no use to anybody here: bitsandbytes would like to fetch a CPU
# kernel from the hub (quantized.py says why we do not want it); peft reads a name that transformers 5 deprecates.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)

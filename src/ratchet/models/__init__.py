"""Models in memory: loading, quantization, adapters, loss, scoring, decoding."""

import logging
import warnings

# Libraries print two messages when they are imported, by whichever module comes first, that no user can act on:
# bitsandbytes tries to fetch a CPU kernel from the hub (loading.py says why it is not wanted), and peft reads a name
# that transformers 5 deprecates.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)

"""Models in memory: loading, quantization, adapters, loss, scoring, decoding."""

import logging
import warnings

# Two libraries print messages on import that users cannot act on: bitsandbytes tries to fetch a CPU kernel from the hub
# (loading.py explains why Ratchet does not use it), and peft reads an attribute that transformers 5
# deprecates.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)

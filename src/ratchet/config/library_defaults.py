"""Environment variables that torch and its libraries read when they are loaded."""

import os


def set_library_defaults() -> None:
    """Set them for this process and its workers; a variable that is set already keeps its value.

    Call it before torch is imported.
    """
    # Threads that wait for each other sleep. On two idle processors a step then takes 1.7 times as long as with threads
    # that spin (the default of libgomp), but with one busy process next to it, spinning takes 40 times as long
    # (docs/performance.md, "Threads that wait").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN and ideep keep 1024 kernels by default, one for each shape of a 16-bit product: with batches of many
    # lengths, a model of 0.1M parameters held 550 MB after 57 steps. With 32 kernels it is 35 MB at the same speed.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "32")
    os.environ.setdefault("TQDM_DISABLE", "1")  # Ratchet reports progress itself

"""The training process: worker, trainer, train step, checkpoints, distributed training, profiler."""

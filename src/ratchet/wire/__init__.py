"""What ranks send each other once a step, and how it is made smaller: hooks as torch's DistributedDataParallel has."""

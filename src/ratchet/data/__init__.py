"""From source files to prepared rows: readers, schemas, deduplication, splits, chat templates, tokens, batches."""

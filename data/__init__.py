"""From a corpus to batches: corpora, tokenizers, token files, order, packing, loaders. Knows no model and no torch."""

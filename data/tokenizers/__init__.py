"""The kinds of tokenizers, and training one. `data/tokenizer.py` says what they have in common, and loads any."""

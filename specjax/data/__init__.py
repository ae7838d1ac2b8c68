"""Text to batches: sources and their split (text), tokenizers (tokenizer), windows and batches (pipeline)."""

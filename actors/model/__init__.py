"""A causal language model from transformers over paged KV: shared by target and draft."""

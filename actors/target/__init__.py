"""The target: one shard of the served model, its KV, and row statistics of its logits."""

"""From logits to samples and row statistics: one law for any batch, shard and device."""

"""What checkpoints say about themselves: config files and headers, and their plain meaning."""

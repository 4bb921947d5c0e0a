"""The life of a step on the wire: what is said, who carries it, where drafts come from."""

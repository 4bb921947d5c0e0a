"""The engine: target, draft and verifier."""

"""KV blocks as the verifier sees them: ids, reference counts, prefix hashes. No tensors here."""

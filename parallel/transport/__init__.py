"""How frames travel between the verifier and the workers."""

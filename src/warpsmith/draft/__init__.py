"""Proposers of trees: who guesses the next tokens, so that one forward pass can decide several."""

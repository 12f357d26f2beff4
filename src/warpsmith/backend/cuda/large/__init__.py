"""The activations-first forward pass: for K-quants, and for models too wide for the other."""

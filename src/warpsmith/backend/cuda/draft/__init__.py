"""DFlash drafts on the GPU: a program from the parts of the activations-first pass (kernels/draft)."""

"""Settings every test shares."""

import os

# Two BLAS threads on two busy cores wait for each other far longer than they compute; must be set before numpy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

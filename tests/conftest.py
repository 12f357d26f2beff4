"""Settings every test shares."""

import os
import signal

# Two BLAS threads on two busy cores wait for each other far longer than they compute; must be set before numpy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores Ctrl-C for them, and every command a test starts would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Settings every test shares."""

import os
import signal
from pathlib import Path

# Two BLAS threads on two busy cores wait for each other far longer than they compute; must be set before numpy loads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the tests in the background ignores Ctrl-C for them, and every command a test starts would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Costs, compiled kernels, histories and models of the person who runs the tests are none of their business. The folder
# stays, so that kernels need not be compiled for every run.
HOME = Path(__file__).parents[1] / ".pytest_cache" / "home"
for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"):
    os.environ[variable] = str(HOME / variable.lower())
for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    os.environ.pop(variable, None)

"""Shared by all tests."""

import os

# Both must be set before torch and transformers are imported. Tests work on small tensors, for which handing
# work to several threads costs more than it brings; and nothing may be looked for on the internet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

"""Shared by all tests."""

import os

# Before torch is imported: two test processes on two cores must not fight over them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

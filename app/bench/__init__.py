"""The self-test: suites that measure this computer and say what its limit is."""

"""The program of `engine.doctor`'s child process: the checks, which use the whole engine."""

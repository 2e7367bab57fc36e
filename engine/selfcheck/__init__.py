"""The program of `engine.doctor`'s child process: its checks use the whole engine."""

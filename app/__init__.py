"""The program: command line, REST server and benchmarks around the engine."""

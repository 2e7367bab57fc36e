"""Models that the engine cannot run, computed by llama.cpp (llama-cpp-python), behind the same service."""

"""Checks of a computer before the engine relies on it, and their stored results.

    outcome      a check's result, and the resulting limits on fallbacks
    trials       checks in a child process, so that a hang or crash costs only seconds
    verdict      results stored for this GPU, driver, torch, Triton, version and model shape
    first_start  the checks at the first start on a GPU

The checks use the whole engine: `engine.selfcheck` is the child's program.
"""

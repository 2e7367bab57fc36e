"""What is found out about a computer before anything is relied on, and what is remembered of it.

    outcome      a check's result, and what follows from all of them for the fallbacks
    trials       checks in a child process, so that one that hangs or ends the process costs seconds
    verdict      what was found, kept for exactly this GPU, driver, torch, Triton, version and model shape
    first_start  the checks at the first start on a GPU
    safe_start   a start that ended its process makes the next one more careful
    machine      what a verdict belongs to, and where such files are

The checks themselves use the whole engine: `engine.selfcheck`, the child's program.
"""

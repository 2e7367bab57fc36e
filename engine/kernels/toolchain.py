"""An early check that Triton can compile its kernels on this computer.

Triton compiles kernels by itself. But their launcher is C code, which Triton compiles with the system's
compiler and Python's headers when a process first uses a GPU.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from neo_desktop.engine.fallbacks import KERNELS, fallbacks

_GAIN = "which is faster and multiplies weights of 4 bits as they are, in a third of the GPU's memory"
TIMEOUT_S = 60.0  # for the compiler on a busy computer
PROGRAM = "#include <Python.h>\n#include <stdlib.h>\nint usable(void) { return Py_IsInitialized(); }\n"


def limit_kernels() -> None:
    """Switch all kernels to torch's operators if Triton cannot compile. Call this before using kernels."""
    if any(fallbacks.level(kernel) != "torch" for kernel in KERNELS) and (obstacle := find_obstacle()):
        fallbacks.limit_all(KERNELS, "torch", obstacle)


def find_obstacle() -> str | None:
    """Return the reason why Triton cannot compile kernels, and the fix; None: the check passed."""
    if find_spec("triton") is None:
        return f"Triton is not installed, {_GAIN}: {sys.executable} -m pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter needs no compiler
        return None
    return _compiler_obstacle(os.environ.get("CC"), _include_folder())


@cache
def _compiler_obstacle(named: str | None, include: str) -> str | None:
    """Compile a test program with Triton's choice of compiler: CC, else gcc, else clang."""
    needs = f"Triton, {_GAIN}, needs"
    compiler = named or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return f"{needs} a C compiler, and neither gcc nor clang is installed: {_advice()}"
    if not Path(include, "Python.h").is_file():
        return f"{needs} Python's headers, and {include}/Python.h is missing: {_advice()}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "usable.c")
        source.write_text(PROGRAM)
        library = str(source.with_suffix(".so"))
        command = [compiler, str(source), "-shared", "-fPIC", "-o", library, f"-I{include}"]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        else:
            if result.returncode == 0:
                return None
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            said = next((line for line in lines if "error" in line), lines[0])
    return f"{needs} a C compiler, and {compiler} fails ({said}): {_advice()}"


def _include_folder() -> str:
    """Return the folder of Python's headers; Debian's own default scheme does not contain them."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _advice() -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    debian = f"'sudo apt install gcc libc6-dev python{version}-dev'"
    return f"{debian}, on Fedora 'sudo dnf install gcc python3-devel'"

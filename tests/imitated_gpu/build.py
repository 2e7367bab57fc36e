"""Replaces the CUDA runtime and the cuBLAS of the running torch by the imitated GPU.

Only for a virtual environment made for this purpose: its torch no longer computes on a real GPU.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {  # library -> sources of its imitation; all other functions do nothing and return 0
    "libcudart.so.13": (
        "queues.cpp",
        "streams.cpp",
        "graphs.cpp",
        "failures.cpp",
        "memory.cpp",
        "properties.cpp",
    ),
    "libcublas.so.13": ("cublas.cpp",),
}


def exported(library: Path) -> set[str]:
    """Return the names of a library's functions."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    symbols = (line.split()[1:] for line in listing.splitlines())
    return {name.split("@")[0] for kind, name in symbols if kind in "TW"}


def imitate(folder: Path, name: str, sources: tuple[str, ...], work: Path) -> None:
    """Replace a library in a folder by a build with the same name and functions."""
    original = folder / f"{name}.original"
    if not original.exists():
        (folder / name).rename(original)
    own = set(re.findall(r"^EXPORT [^(]*?(\w+)\(", "\n".join((HERE / s).read_text() for s in sources), re.M))
    others = sorted(exported(original) - own)
    stubs, versions = work / "stubs.c", work / "versions.map"
    stubs.write_text("\n".join(f"int {each}(void) {{ return 0; }}" for each in others))
    versions.write_text(f"{name} {{ global: *; }};\n")
    subprocess.run(["gcc", "-w", "-fPIC", "-c", stubs, "-o", work / "stubs.o"], check=True)
    command: list[str | Path] = [
        "g++",
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-pthread",
        "-I",
        folder.parent / "include",
    ]
    command += [f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", work / "stubs.o"]
    subprocess.run([*command, *(HERE / s for s in sources), "-o", folder / name], check=True)


def main() -> None:
    """Build all libraries; the given folder gets the driver's library, a second name of the runtime's."""
    work, folder = Path(sys.argv[1]), Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "lib")
    for name, sources in LIBRARIES.items():
        imitate(folder, name, sources, work)
    empty = work / "empty.cpp"
    empty.write_text("")
    command: list[str | Path] = ["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", empty]
    subprocess.run([*command, folder / "libcudart.so.13", "-o", work / "libcuda.so.1"], check=True)


if __name__ == "__main__":
    main()

"""A PDF's text, as a program: the PDF on standard input, JSON on standard output. It limits itself."""

import contextlib
import io
import json
import resource
import sys

MAX_PAGES = 2000
MAX_CHARS = 2_100_000
MEMORY_BYTES = 1 << 30
CPU_S = 30


def main() -> None:
    """Print {"text"} or {"error"}; a limit may end the program without a word."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    from pypdf import PdfReader  # noqa: PLC0415 - what it takes counts
    from pypdf.errors import PyPdfError  # noqa: PLC0415

    try:
        reader = PdfReader(io.BytesIO(sys.stdin.buffer.read()))
        if reader.is_encrypted and not reader.decrypt(""):
            answer = {"error": "is protected by a password: attach a copy without one"}
        elif len(reader.pages) > MAX_PAGES:
            answer = {"error": f"has {len(reader.pages):,} pages, but {MAX_PAGES:,} is the limit"}
        else:
            pages, num_chars = [], 0
            for page in reader.pages:
                text = page.extract_text()
                num_chars += len(text)
                pages.append(text)
                if num_chars > MAX_CHARS:
                    break  # too long in any case
            answer = {"text": "\n\n".join(pages).encode(errors="replace").decode()}
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        answer = {"error": f"cannot be read as a PDF ({error or type(error).__name__}): attach its text"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

"""Text of PTX as data."""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Address(NamedTuple):
    """Operand in brackets."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `parts` are those of its name, between dots."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None = None  # predicate register
    negated: bool = False  # executes where the guard is false

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return guard + ".".join(self.parts) + " " + ", ".join(map(_shown, self.operands))


@dataclass(slots=True)
class Kernel:
    """A compiled kernel.

    Args:
        parameters: name → type.
        num_threads: of a program.
        widths: register, or prefix of numbered registers → bits; 1: a predicate.
        labels: name → index in `code`.
    """

    name: str
    parameters: dict[str, str]
    num_threads: int
    widths: dict[str, int]
    code: list[Instruction]
    labels: dict[str, int]

    def width(self, register: str) -> int:
        """Return the bits of a register."""
        return self.widths[register if register in self.widths else register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """Parse a module with one kernel."""
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert head, "no kernel"
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads, f"{head[1]} has no fixed number of threads"
    parameters = {name: kind for kind, name in re.findall(r"\.param \.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[2])}
    kernel = Kernel(head[1], parameters, int(threads[1]), {}, [], {})
    body = text[head.end() :].partition("$L__func_end")[0]
    body = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", body, flags=re.MULTILINE)
    for statement in body.split(";"):
        _add(kernel, statement)
    return kernel


def _add(kernel: Kernel, statement: str) -> None:
    """Add a statement; braces of scopes, as of inline PTX, have no meaning of their own."""
    statement = statement.strip().lstrip("{} \t\n")
    while label := re.match(r"(\$\w+):\s*", statement):
        kernel.labels[label[1]] = len(kernel.code)
        statement = statement[label.end() :].lstrip("{} \t\n")
    if declared := re.match(r"\.reg \.(\w+)\s+(.*)", statement):
        bits = 1 if declared[1] == "pred" else int(declared[1].lstrip("bsuf"))
        for name in declared[2].split(","):
            prefix = name.partition("<")[0].strip()
            assert kernel.widths.setdefault(prefix, bits) == bits, f"two registers are named {prefix}"
    elif statement and not statement.startswith(".pragma"):
        kernel.code.append(_instruction(statement))


def _instruction(statement: str) -> Instruction:
    guard, negated = None, False
    if statement.startswith("@"):
        given, statement = statement.split(None, 1)
        guard, negated = given.lstrip("@!"), given[1] == "!"
    name, _, rest = statement.replace("\t", " ").partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    return Instruction(
        tuple(name.split(".")), tuple(_operand(each.strip()) for each in operands), guard, negated
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text[1:-1].split(","))
    if text.startswith("["):
        found = re.fullmatch(r"([%$\w]+)(?:\+?(-?\w+))?", re.sub(r"\s", "", text[1:-1]))
        assert found, text
        return Address(found[1], int(found[2] or "0", 0))
    return text


def _shown(operand: Operand) -> str:
    if isinstance(operand, Address):
        return f"[{operand.base}{operand.offset:+d}]"
    return operand if isinstance(operand, str) else "{" + ", ".join(operand) + "}"

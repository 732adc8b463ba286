"""Do the fast tests notice small changes of the package's code?

    uv run tools/mutants.py --sample 400 --seed 1               # 400 changes, drawn at random
    uv run tools/mutants.py --sample 50 --only batch/tokens.py  # in one file or folder
    uv run tools/mutants.py --check                             # entries of the list that are old

Needs Python 3.11.

A mutant is the package with one change: another operator, a constant plus one, ``None`` returned, a
call left out. The tests about its file run in a process of its own until one fails. Mutants that no
test notices are printed, and the exit status is 1. No file is written.

What no test can notice stands in ``tests/equivalent_mutants.toml`` and is left alone. For each file
it says ``"code" = "why"``, where the code is an expression, a statement, the head of a compound one
(``if a:``), or ``def name`` for a whole function. It has to be in the file exactly once.
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple
from unittest import mock

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "timm_naflex_fast"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"
NOT_SAMPLED = ("cli", "measure")  # rooms, unless --only names them

# Run for every file, after the tests of its own room.
FOR_ALL = ("contract", "test_functional.py", "behaviour/test_models.py", "behaviour/test_modes.py")
# By words in their names. They compile, or start Python.
SLOW_TESTS = (
    "compile or graph or export or capture or thread or removable or imports_no or one_module"
)
PYTEST = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation")
# Imported once, before the processes fork. The package is not: each process reads its own.
IMPORTED_BEFORE = ("hypothesis", "timm", "torch", "transformers")

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.Mult(),
    ast.Pow: ast.Mult(),
    ast.BitOr: ast.BitAnd(),
    ast.BitAnd: ast.BitOr(),
}
# Errors, types and text for readers: nothing in them computes.
SKIPPED_NODES = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")
Part = ast.expr | ast.stmt
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Mutant(NamedTuple):
    """One change of one file."""

    file: Path
    line: int
    statement: str
    before: str
    after: str
    source: bytes  # of the whole file, changed

    def __str__(self) -> str:
        place = f"{self.file.relative_to(ROOT)}:{self.line}"
        return f"{place}  {self.before}  ->  {self.after}\n    {self.statement}"


def operator_changes(node: ast.AST) -> Iterator[str]:
    """An expression with another operator, or without its ``not`` or its minus sign."""
    match node:
        case ast.Compare(left, operators, right):
            for place, operator in enumerate(operators):
                changed = list(operators)
                changed[place] = COMPARISONS[type(operator)]
                yield ast.unparse(ast.Compare(left, changed, right))
        case ast.BoolOp(ast.And(), values):
            yield ast.unparse(ast.BoolOp(ast.Or(), values))
        case ast.BoolOp(ast.Or(), values):
            yield ast.unparse(ast.BoolOp(ast.And(), values))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield ast.unparse(operand)
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)], right))
        case ast.AugAssign(target, operator, value) if type(operator) in ARITHMETIC:
            yield ast.unparse(ast.AugAssign(target, ARITHMETIC[type(operator)], value))


def constant_changes(node: ast.AST) -> Iterator[str]:
    """Another value in place of a constant, the default of a parameter too."""
    match node:
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value) | float(value)):
            yield str(value + 1)
        case ast.Constant(str(value)) if " " not in value:  # else a text for readers
            yield repr(value + "_")


def changes(node: ast.AST) -> Iterator[tuple[Part, str]]:
    """A node's mutants: the part to replace, and the new code."""
    if isinstance(node, Part):
        for code in (*operator_changes(node), *constant_changes(node)):
            yield node, code
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            if isinstance(test, (ast.Name, ast.Attribute, ast.Call)):
                yield test, f"not {ast.unparse(test)}"
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield value, "None"
        case ast.Expr(ast.Call()):
            yield node, "pass"


def head(statement: ast.stmt) -> str:
    """A statement in one line, of a compound one its head: what the list of equivalents names."""
    if isinstance(statement, DEFINITIONS):
        return f"def {statement.name}"
    return ast.unparse(statement).splitlines()[0]


def text_of(node: ast.AST) -> str | None:
    """A statement or an expression in that form; None for other nodes."""
    if isinstance(node, ast.stmt):
        return head(node)
    return ast.unparse(node) if isinstance(node, ast.expr) else None


def text_of_entry(code: str) -> str:
    """An entry of the list in that form."""
    if code.startswith("def "):
        return code
    if code.endswith(":"):
        code += " pass"
    return head(ast.parse(code).body[0])


@cache
def equivalents() -> dict[str, list[str]]:
    """What to leave alone in each file of the package."""
    listed = tomllib.loads(EQUIVALENT.read_text())
    return {file: [text_of_entry(code) for code in entries] for file, entries in listed.items()}


def old_entries() -> Iterator[str]:
    """Entries of the list whose code is not in its file, or more than once."""
    for name, entries in equivalents().items():
        file = PACKAGE / name
        if not file.exists():
            yield f"{name} is not there"
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        # An expression that is a statement counts once.
        texts = [text_of(node) for node in nodes if not isinstance(node, ast.Expr)]
        for entry in entries:
            if texts.count(entry) != 1:
                yield f"{name} has {texts.count(entry)} times: {entry}"


def is_skipped(node: ast.AST) -> bool:
    """Whether a node computes nothing that a test could notice."""
    match node:
        case ast.Expr(ast.Constant()):  # a docstring
            return True
        case ast.Subscript(ast.Name("Literal")) | ast.If(ast.Name("TYPE_CHECKING")):  # types
            return True
        case ast.keyword(arg="stacklevel"):  # of a warning
            return True
    return isinstance(node, SKIPPED_NODES)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """What is directly below a node, without types and decorators."""
    for name, value in ast.iter_fields(node):
        if name in SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def mutants_below(
    node: ast.AST, statement: ast.stmt, left_alone: list[str]
) -> Iterator[tuple[ast.stmt, Part, str]]:
    """The mutants of a node and of all below it: the statement, the part to replace, its code."""
    if is_skipped(node):
        return
    if text_of(node) in left_alone:
        # Of a compound statement only the head is: what is in its body follows.
        if isinstance(node, ast.stmt) and not isinstance(node, DEFINITIONS):
            for child in children(node):
                if isinstance(child, ast.stmt):
                    yield from mutants_below(child, child, left_alone)
        return
    if isinstance(node, ast.stmt):
        statement = node
    for part, code in changes(node):
        yield statement, part, code
    for child in children(node):
        yield from mutants_below(child, statement, left_alone)


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = file.read_bytes()
    left_alone = equivalents().get(file.relative_to(PACKAGE).as_posix(), [])

    # Where each line begins, in bytes, as ast counts columns.
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    for top in ast.parse(source).body:
        for statement, node, code in mutants_below(top, top, left_alone):
            begin = starts[node.lineno - 1] + node.col_offset
            assert node.end_lineno is not None and node.end_col_offset is not None
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = source[begin:end].decode()
            after = code if isinstance(node, ast.stmt) else f"({code})"
            changed = source[:begin] + after.encode() + source[end:]
            yield Mutant(file, node.lineno, head(statement), before, code, changed)


def tests_of(file: Path) -> tuple[str, ...]:
    """The tests of a file's room, then those that every file needs."""
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    found = []
    for name in (room, f"test_{room}.py", *FOR_ALL):
        path = ROOT / "tests" / name
        if path.exists():
            found.append(str(path))
    return tuple(dict.fromkeys(found))


def run_tests(tests: tuple[str, ...], mutant: Mutant | None) -> None:
    """Run tests on a mutant, in a process that ends with pytest's status. None: nothing changed."""
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    read_code = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        if mutant is not None and Path(path) == mutant.file:
            return compile(mutant.source, path, "exec")
        return read_code(loader, name)

    with mock.patch.object(SourceFileLoader, "get_code", get_code):
        status = pytest.main([*PYTEST, "-k", f"not ({SLOW_TESTS})", *tests])
    sys.exit(int(status))


def fails(tests: tuple[str, ...], mutant: Mutant | None, limit: float | None) -> bool:
    """Whether tests fail, or take longer than ``limit`` seconds."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, mutant))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode != 0


@cache
def time_limit(tests: tuple[str, ...]) -> float:
    """How many seconds a mutant's tests may take: several times what they take without one."""
    start = time.perf_counter()
    if fails(tests, None, None):
        raise SystemExit(f"these fail without any mutant: {' '.join(tests)}")
    return 10 + 4 * (time.perf_counter() - start)


def draw(only: str, count: int, seed: int) -> list[Mutant]:
    """A random sample of the mutants below a path of the package, in the order of the files."""
    mutants: list[Mutant] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if f"{path.as_posix()}/".startswith(only) and (only or path.parts[0] not in NOT_SAMPLED):
            mutants += mutants_of(file)
    chosen = random.Random(seed).sample(range(len(mutants)), min(count, len(mutants)))
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    return [mutants[place] for place in sorted(chosen)]


def main() -> int:
    """Check the list, or run a sample."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only tell which entries are old")
    parser.add_argument("--sample", type=int, default=100, help="how many mutants (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--only", default="", help="a file or folder of the package")
    options = parser.parse_args()
    if options.check:
        old = list(old_entries())
        for line in old:
            print(f"{EQUIVALENT.relative_to(ROOT)}: {line}")
        return bool(old)

    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    survivors = 0
    for mutant in draw(options.only, options.sample, options.seed):
        tests = tests_of(mutant.file)
        if not fails(tests, mutant, time_limit(tests)):
            survivors += 1
            print(mutant, flush=True)
    print(f"{survivors} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())

"""What is wrong with the results: old figures and tests, lost races, failed tests."""

import ast
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from .results import PLAIN_ADD, ROOT, Row, read

LEAST = 0.9  # of the library's own speed: what is slower stops a release

# What figures depend on: where this code changes, they are old.
ROOMS = ("resampling", "batch", "strategies.py", "backends", "patching", "rope", "patch_embed")
NO_STEP_RUNS = ("install", "releases", "status")  # of patching
CODE = [
    *(f"timm_naflex_fast/{room}" for room in ROOMS),
    *(f":!timm_naflex_fast/patching/{name}.py" for name in NO_STEP_RUNS),
]
# What results/versions and results/tests depend on.
TESTED = ["timm_naflex_fast", ":!timm_naflex_fast/cli", ":!timm_naflex_fast/measure"]


def git(*arguments: str) -> str | None:
    """What git prints about this project; None: it cannot."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def parsed(commit: str, name: str) -> str:
    """A file of a commit as Python reads it, without comments and docstrings."""
    text = git("show", f"{commit}:{name}")
    if text is None:
        return ""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [statement for statement in body if not is_text(statement)]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string alone, as a docstring is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def has_changed(commit: str, code: Sequence[str]) -> bool:
    """Whether code has changed since a commit, beyond its words, or git does not know it."""
    diff = git("diff", "--name-only", commit, "HEAD", "--", *code)
    if diff is None:
        return True
    return any(parsed(commit, name) != parsed("HEAD", name) for name in diff.split())


def outdated(abouts: Iterable[Row], code: Sequence[str]) -> Iterator[str]:
    """The commits of figures or tests whose code has changed since."""
    commits = dict.fromkeys(about["commit"] for about in abouts)
    for commit in commits:
        if has_changed(commit, code):
            yield f"its code has changed since {commit}"


def lost_races(rows: Iterable[Row]) -> Iterator[str]:
    """Races in which this package is slower than the library's own code."""
    text = "{workload} {phase} B={batch} {contender} has {times_faster:.2f} of the library's speed"
    for row in rows:
        if row["contender"].startswith(("timm-", PLAIN_ADD)):
            continue
        if row["times_faster"] is not None and row["times_faster"] < LEAST:
            yield text.format(**row)


def failed_tests(rows: Iterable[Row]) -> Iterator[str]:
    """Tests that fail on a pairing of releases, or under a mode but not under stock."""
    for row in rows:
        failed = list(row.get("broken", []))
        for counts in row.get("layers", {}).values():
            failed += counts["failures"]
        for name in failed:
            yield f"{name} fails"


def complaints_about(record: Row) -> Iterator[str]:
    """What is wrong with one result file."""
    match record["again"].split("/"):
        case ["versions", _]:  # each row was made by itself
            yield from outdated(record["rows"], TESTED)
            yield from failed_tests(record["rows"])
        case ["tests", _]:
            yield from outdated([record], TESTED)
            for name in record["green"]:
                yield f"{name} passes without ours"
        case ["against" | "drift", *_]:
            yield from outdated([record["made"]], CODE)
        case ["recordings", "jax_float64"]:
            return  # none of this package's code has part in it
        # Not timed, or not against the same.
        case ["recordings", "agreement"] | ["counts" | "graphs" | "exported" | "rounding"]:
            yield from outdated([record], CODE)
        case _:
            yield from outdated([record], CODE)
            yield from lost_races(record["rows"])


def complaints() -> Iterator[str]:
    """Old figures and tests, lost races, and tests that fail or notice nothing."""
    for record in read("**/*"):
        for line in complaints_about(record):
            yield f"results/{record['again']}.json: {line}"

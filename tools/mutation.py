"""Do the fast tests notice when the code of resampling/ and patching/ changes? mutmut changes it, place by place.

uv run --with mutmut tools/mutation.py                   # draws 2,000 mutants, and tests those for at most 40 minutes
uv run --with mutmut tools/mutation.py                   # again: what is left of them, then the next ones
uv run --with mutmut tools/mutation.py --survivors       # once more those that survived without a reason
uv run --with mutmut tools/mutation.py --only "*.tokens.*" --out build/tokens.json

Mutants are drawn in a random order with a fixed seed, so any number of them is a random sample; the result file says of
how many. Results of functions that have not changed are kept in mutants/; --fresh forgets them. A survivor whose change
fits an entry of tools/mutation_reasons.json (regular expressions on its name and on the changed lines) gets the reason
from there. Which tests run, and other settings: [tool.mutmut] in pyproject.toml.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from version_matrix import made

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "mutation" / "mutation.json"
REASONS = Path(__file__).with_name("mutation_reasons.json")
SEED = 0
COUNTS = ("mutants", "drawn", "killed", "timeout", "survived", "no test", "equivalent", "not tested")
STRING = re.compile(r"""\"[^\"]*\"|'[^']*'""")
SURVIVED, TIMEOUT, NO_TEST = {0}, {-24, 24, 36, 152, 255}, {5, 33}  # mutmut's exit codes; any other is a red test


def results() -> dict[str, int | None]:
    """What mutmut has found so far: exit code by mutant, None if it was not tested."""
    found: dict[str, int | None] = {}
    for file in sorted((ROOT / "mutants").rglob("*.meta")):
        found |= json.loads(file.read_text())["exit_code_by_key"]
    return found


def mutmut(names: list[str], children: int, until: float) -> bool:
    """Let mutmut test these mutants; False if time ended before."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(children), *names]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        status = process.wait(max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # mutmut has saved each result as it came
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return False
    if status:
        raise SystemExit(f"mutmut failed: run it by hand to see why: mutmut run {names[0]!r}")
    return True


def change(name: str) -> list[str]:
    """The lines that a mutant takes away and puts in."""
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=find_mutant(name).path).splitlines()
    return [f"{line[0]} {line[1:].strip()}" for line in lines if re.match(r"[-+](?![-+])", line)]


def reason(name: str, lines: list[str], reasons: list[dict[str, str]]) -> str | None:
    """Why no test can notice this change, or why none has to: only the words of a message differ."""
    text = "\n".join(lines)
    old, new = ([line[2:] for line in lines if line[0] == sign] for sign in "-+")
    if [STRING.sub("", line) for line in old] == [STRING.sub("", line) for line in new]:
        if any(" " in string for line in old for string in STRING.findall(line)):
            return "text of a message"
    fits = (r["reason"] for r in reasons if re.search(r["name"], name) and re.search(r["change"], text))
    return next(fits, None)


def summary(order: list[str], drawn: set[str], codes: dict[str, int | None]) -> dict[str, Any]:
    """Counts by room, and each survivor with its reason."""
    reasons = json.loads(REASONS.read_text())
    rooms: dict[str, dict[str, Any]] = {}
    survivors = []
    for name in order:
        zeros = dict.fromkeys(COUNTS, 0)
        room, code = rooms.setdefault(name.split(".")[1], zeros), codes[name]
        room["mutants"] += 1
        if name not in drawn:
            continue
        room["drawn"] += 1
        if code is None:
            room["not tested"] += 1  # time ended before: those with the longest tests come last
        elif code in SURVIVED | NO_TEST:
            lines = change(name)
            why = reason(name, lines, reasons)
            room["equivalent" if why else "survived" if code in SURVIVED else "no test"] += 1
            survivors.append({"mutant": name, "change": lines, "reason": why})
        else:
            room["timeout" if code in TIMEOUT else "killed"] += 1
    for room in rooms.values():
        killed = room["killed"] + room["timeout"]
        of = killed + room["survived"] + room["no test"]
        room["killed_percent"] = round(100 * killed / of, 1) if of else None
    survivors.sort(key=lambda survivor: (survivor["reason"] is not None, survivor["mutant"]))
    return {"rooms": rooms, "survivors": survivors}


def main() -> int:
    """Test mutants until the drawn ones are tested or time is over, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="of testing (40)")
    parser.add_argument("--draw", type=int, default=2000, help="mutants to draw when none is left (2,000)")
    parser.add_argument("--children", type=int, default=os.cpu_count(), help="mutants at the same time (the cores)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="mutants whose names match")
    parser.add_argument("--survivors", action="store_true", help="test those again that survived without a reason")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--out", type=Path, metavar="FILE", default=OUT, help="where to write (results/mutation/)")
    options = parser.parse_args()
    start = time.monotonic()
    until = start + 60 * options.minutes
    if options.fresh:
        shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    # With a few mutants first: mutmut makes all of them, and learns which test runs what.
    mutmut(["timm_naflex_fast.resampling.m*__mutmut_1"], options.children, until)
    codes = results()
    order = sorted(name for name in codes if fnmatch.fnmatch(name, options.only))
    random.Random(SEED).shuffle(order)
    memory = ROOT / "mutants" / "drawn.json"
    by_earlier_calls = json.loads(memory.read_text()) if memory.exists() else {}
    drawn = [name for name in by_earlier_calls.get(options.only, ()) if name in codes]
    untested = [name for name in drawn if codes[name] is None]
    if not (untested or options.survivors):
        drawn += [name for name in order if name not in drawn][: options.draw]
        untested = [name for name in drawn if codes[name] is None]
    todo = untested
    if options.survivors:
        reasons, alive = json.loads(REASONS.read_text()), (n for n in drawn if codes[n] in SURVIVED | NO_TEST)
        todo = [name for name in alive if not reason(name, change(name), reasons)]
    memory.write_text(json.dumps({**by_earlier_calls, options.only: drawn}))
    print(f"{len(order)} mutants, {len(drawn)} drawn, {len(todo)} to test", flush=True)
    if todo:
        mutmut(todo, options.children, until)
    versions = {name: importlib.metadata.version(name) for name in ("mutmut", "torch", "timm", "pytest", "hypothesis")}
    record: dict[str, Any] = {**made(), "versions": versions, "seed": SEED, "only": options.only}
    record["minutes_of_this_call"] = round((time.monotonic() - start) / 60, 1)
    record |= summary(order, set(drawn), results())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    for name, room in record["rooms"].items():
        print(name, room)
    return 0


if __name__ == "__main__":
    sys.exit(main())

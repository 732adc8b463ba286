"""Who opens a module finds its test: by the module's path, or by its docstring."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "timm_naflex_fast"


def test_a_module_has_a_test_of_its_name_or_names_one():
    without = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE)
        if path.stem in ("__init__", "__main__"):
            continue
        if (ROOT / "tests" / module.parent / f"test_{module.name}").is_file():
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named = re.findall(r"tests/[\w/]+\.py", docstring)
        if not named or not all((ROOT / name).is_file() for name in named):
            without.append(str(module))
    assert not without

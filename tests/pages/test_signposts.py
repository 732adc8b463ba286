"""Who opens a module finds its test: by the module's path, or by its docstring."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "timm_naflex_fast"
MODULES = [
    path.relative_to(PACKAGE)
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test_of_its_name_or_names_one(module):
    if (ROOT / "tests" / module.parent / f"test_{module.name}").is_file():
        return
    docstring = ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))) or ""
    named = re.findall(r"tests/[\w/]+\.py", docstring)
    assert named, "no test of its name, and the docstring names none"
    assert all((ROOT / name).is_file() for name in named), named

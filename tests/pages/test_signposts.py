"""Who opens a module finds its test: by the module's path, or by its docstring."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [("timm_naflex_fast", "tests"), ("ports/vit_ports", "ports/tests")]


@pytest.mark.parametrize(("package", "tests"), PACKAGES)
def test_a_module_has_a_test_of_its_name_or_names_one(package, tests):
    without = []
    for path in (ROOT / package).rglob("*.py"):
        module = path.relative_to(ROOT / package)
        if path.stem in ("__init__", "__main__"):
            continue
        if (ROOT / tests / module.parent / f"test_{module.name}").is_file():
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named = re.findall(r"(?:ports/)?tests/[\w/]+\.py", docstring)
        if not named or not all((ROOT / name).is_file() for name in named):
            without.append(str(module))
    assert not without

"""tools/mutants.py: which changes it makes, and what it says about its list of equivalent ones."""

import ast
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the list is read by tomllib", allow_module_level=True)

import mutants

SOURCE = '''
def f(a, b=1):
    """A text."""
    if a and not b:
        raise ValueError("b == 0")
    a.sort()
    a.clear()
    return a[-b] <= len("xy")
    return None
'''
CHANGES = [
    ("1", "2"),
    ("a and not b", "a or not b"),
    ("not b", "b"),
    ("a.sort()", "pass"),
    ('a[-b] <= len("xy")', "None"),
    ('a[-b] <= len("xy")', "a[-b] < len('xy')"),
    ("-b", "b"),
    ('"xy"', "'xy_'"),
]


def test_each_change_is_made_once_and_gives_a_program_but_for_those_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    monkeypatch.setattr(mutants, "equivalents", lambda: {"f.py": ["a.clear()"]})
    file = tmp_path / "f.py"
    file.write_text(SOURCE)
    made = list(mutants.mutants_of(file))
    assert [(mutant.before, mutant.after) for mutant in made] == CHANGES
    for mutant in made:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))


def test_the_list_is_not_old(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutants.py", "--check"])
    assert mutants.main() == 0, capsys.readouterr().out

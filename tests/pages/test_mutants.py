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
    return a[-b] <= len("xy")
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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package of one file and the list of its equivalent mutants."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "list.toml")
    file = tmp_path / "package" / "f.py"
    file.parent.mkdir()
    file.write_text(SOURCE)

    def listed(text):
        mutants.equivalents.cache_clear()
        mutants.EQUIVALENT.write_text(text)
        return file

    yield listed
    mutants.equivalents.cache_clear()


def made(file):
    return [(mutant.before, mutant.after) for mutant in mutants.mutants_of(file)]


def test_each_change_is_made_once_and_gives_a_program(package):
    file = package("")
    assert made(file) == CHANGES
    for mutant in mutants.mutants_of(file):
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))


def test_what_is_listed_is_left_alone(package):
    file = package("""["f.py"]\n'if a and not b:' = "why"\n'return a[-b] <= len("xy")' = "why"\n""")
    assert made(file) == [CHANGES[0], CHANGES[3]]
    assert made(package("""["f.py"]\n'def f' = "why"\n""")) == []


def test_an_entry_whose_code_is_gone_is_told(package, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mutants.py", "--check"])
    package("""["f.py"]\n'a.sort()' = "why"\n'b.sort()' = "why"\n["g.py"]\n'c' = "why"\n""")
    assert mutants.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "list.toml: f.py has 0 times: b.sort()",
        "list.toml: g.py is not there",
    ]


def test_the_list_is_not_old(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutants.py", "--check"])
    assert mutants.main() == 0, capsys.readouterr().out

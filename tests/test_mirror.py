"""``timm_naflex_fast/a/b.py`` has ``tests/a/test_b.py``, and what lies elsewhere crosses modules."""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "timm_naflex_fast"
CROSS = {"contract", "behaviour", "examples", "pages", "support"}  # CONTRIBUTING.md says what each asks
ELSEWHERE = {  # a module: the file that tests it
    **dict.fromkeys(("names", "strategies/base"), "contract/test_fourth_strategy"),
    "__main__": "cli/test_main",
    "cli/startup/sitecustomize": "cli/test_run",
    "resampling/checks": "contract/test_unusual_tensors",
    **dict.fromkeys(("strategies/matmul", "backends/placement"), "contract/test_backends"),
    **dict.fromkeys(("backends/eager", "backends/operator"), "contract/test_backends"),
    "backends/dispatch": "behaviour/test_graphs",
    "measure/export": "cli/test_export",
    "patching/library": "patching/test_timm",
    "patching/settings": "behaviour/test_handles",
    **dict.fromkeys(("rope/embeds", "rope/settings"), "rope/test_batched"),
    **dict.fromkeys(("measure/drift/pictures", "measure/drift/plots"), "measure/drift/test_report"),
}


def names(folder, pattern):
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob(pattern)}


def test_each_module_has_its_test_file_and_each_test_file_its_module():
    modules = {name for name in names(PACKAGE, "*.py") if not name.endswith("__init__")}
    files = {name for name in names(TESTS, "test_*.py") if name.split("/")[0] not in CROSS} - {"test_mirror"}
    wanted = {name: "/".join([*name.split("/")[:-1], f"test_{name.split('/')[-1]}"]) for name in modules}
    assert ELSEWHERE.keys() <= modules
    assert {name: file for name, file in (wanted | ELSEWHERE).items() if not (TESTS / f"{file}.py").exists()} == {}
    assert files <= {*wanted.values()}
    assert not any((TESTS / f"{wanted[name]}.py").exists() for name in ELSEWHERE)

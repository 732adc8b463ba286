"""A plugin of pytest: timm's own tests run with timm patched (``nox -f lab/noxfile.py -s timm_tests``).

python -m pytest -p timm_suite --naflex-mode MODE
    Each process adds to the file "calls" beside this one how often each strategy ran in it.
"""

from pathlib import Path

from timm_naflex_fast import enable, status


def pytest_addoption(parser):
    parser.addoption("--naflex-mode", required=True)


def pytest_configure(config):
    enable(config.getoption("naflex_mode"))


def pytest_sessionfinish(session):
    lines = [f"{strategy} {count}\n" for (_, strategy), count in status().calls.items()]
    with Path(__file__).with_name("calls").open("a") as file:
        file.writelines(lines)

"""The public functions, as docs/api.md lists them."""

import inspect
from types import ModuleType

import timm_naflex_fast
from timm_naflex_fast import functional, pictures


def function_row(module: ModuleType, name: str) -> str:
    """A public function: its name, the names of its arguments, the first sentence of its docstring."""
    function = getattr(module, name)
    arguments = ", ".join(inspect.signature(function).parameters)
    first = str(function.__doc__).split("\n\n")[0]
    sentence = " ".join(first.split())
    place = module.__name__.removeprefix("timm_naflex_fast").lstrip(".")
    path = f"{place}.{name}".lstrip(".")
    return f"| `{path}({arguments})` | {sentence} |"


def api() -> str:
    """The table of the public functions."""
    rows = ["| function | what it does |", "| --- | --- |"]
    rows += [function_row(timm_naflex_fast, name) for name in ("enable", "disable", "status")]
    rows += [function_row(functional, name) for name in functional.__all__]
    rows.append(function_row(pictures, "patches_of"))
    return "\n".join(rows)

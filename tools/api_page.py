"""docs/api.md from the docstrings: every public function with its signature and its example."""

from __future__ import annotations

import inspect

import timm_naflex_fast
from timm_naflex_fast import functional

PUBLIC = [("timm_naflex_fast", timm_naflex_fast, ("enable", "disable", "status"))]
PUBLIC += [("timm_naflex_fast.functional", functional, tuple(functional.__all__))]


def render() -> str:
    """A section for each function."""
    parts = []
    for home, module, names in PUBLIC:
        for name in names:
            function = getattr(module, name)
            parameters = inspect.signature(function).parameters
            arguments = ", ".join("*" if p == "*" else p for p in _with_star(parameters))
            text, _, example = inspect.getdoc(function).partition("\n>>> ")
            parts.append(f"### `{home}.{name}({arguments})`\n\n```text\n{text.strip()}\n```")
            parts.append(f"```python\n>>> {example.strip()}\n```")
    return "\n\n".join(parts)


def _with_star(parameters: dict[str, inspect.Parameter]) -> list[str]:
    names, starred = [], False
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            names.append("*")
            starred = True
        names.append(name if parameter.default is parameter.empty else f"{name}=...")
    return names

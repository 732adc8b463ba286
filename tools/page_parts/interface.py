"""The public interface, as docs/api.md shows it."""

import inspect
from types import ModuleType

import timm_naflex_fast
from timm_naflex_fast import functional, pictures
from timm_naflex_fast.patching.install import Handle
from timm_naflex_fast.patching.status import Status

RETURNED = (Handle, Status)  # what enable and status return


def function_text(module: ModuleType, name: str) -> str:
    """A public function: its call, without types, and the first sentence of its docstring."""
    function = getattr(module, name)
    signature = inspect.signature(function)
    untyped = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    call = str(signature.replace(parameters=untyped)).replace(", *,", ",\n    *,")
    for cls in RETURNED:
        call = call.replace(f"{cls.__module__}.", "")
    first = str(function.__doc__).split("\n\n")[0]
    sentence = " ".join(first.split())
    return f"### `{module.__name__}.{name}`\n\n```text\n{name}{call}\n```\n\n{sentence}"


def api() -> str:
    """The public functions, and what two of them return."""
    parts = [function_text(timm_naflex_fast, name) for name in ("enable", "disable", "status")]
    parts += [function_text(functional, name) for name in functional.__all__]
    parts.append(function_text(pictures, "patches_of"))
    return "\n\n".join(parts)

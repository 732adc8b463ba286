"""Whether an installed release of a library is one that we know.

By its version, its own methods, their arguments, and what they read. A method that reads another
attribute of its module than it used to has gained or lost a setting, and a method that nobody calls
any more has been superseded. Replacing either would change results without a word, so it is
refused. No library is imported here: ``install`` holds its lock.
"""

import inspect
import re
import sys
from typing import Any

from torch.torch_version import TorchVersion

from .choices import libraries_in_use
from .library import Library, author_of, calls_ours, owner_of


def installed(library: Library) -> TorchVersion:
    """The installed release, which compares with others as PyTorch's own version does."""
    return TorchVersion(sys.modules[library.name].__version__)


def check_supported(library: Library) -> None:
    """Check what we are about to replace, or have replaced.

    Raises:
        RuntimeError: the library is too old, or a method is missing, another package's, or takes
            other arguments (names, order, defaults) than ours, or, in a release newer than any that
            we know, one reads other attributes or is not called any more; names all.
    """
    version = installed(library)
    is_in_use = library in libraries_in_use()
    # All differences are named at once: who reports them, or mends ours, needs all.
    wrong = ["it is too old"] if version < library.oldest else []
    for owner, name, replacement in library.places():
        label = f"{owner.__name__}.{name}"
        method = vars(owner).get(name)
        if method is None:
            wrong.append(f"{label} is missing")
        elif library.wrote(method):
            # Ours has the strategy before the method's own arguments.
            if ["strategy", *_arguments(method)] != _arguments(replacement.compute):
                wrong.append(f"{label} takes {inspect.signature(method)}")
        # What is over ours may call it.
        elif not (is_in_use or calls_ours(method)):
            over = "to put that over ours, call enable() before"
            wrong.append(f"{label} is {author_of(method)}; {over}")
    # Where ours is in place, all were compared before it was.
    if version > library.newest and not is_in_use:
        wrong += _read_differently(library)
    if wrong:
        raise RuntimeError(
            f"{library.name} {version} is not supported by this timm_naflex_fast ({library.oldest} "
            f"to {library.newest} are, and newer ones as long as what it replaces is the same): "
            f"{'; '.join(wrong)}. Nothing was changed"
        )


def _arguments(function: Any) -> list[str]:
    """Their names and defaults, in order, without the annotations."""
    parameters = inspect.signature(function).parameters.values()
    return [str(each.replace(annotation=each.empty)) for each in parameters]


def _read_differently(library: Library) -> list[str]:
    """What differs from the newest release that we know, in sentences: the attributes that a method
    reads, or that its class no longer calls it."""
    wrong = []
    for path, methods in library.reads.items():
        owner = owner_of(path)
        if owner is None:
            continue  # a class that is gone is left to the library's own code
        for name, attributes in methods.items():
            label = f"{owner.__name__}.{name}"
            try:
                changed = attributes_of(getattr(owner, name)) ^ set(attributes.split())
                called = attributes_of(owner)
            except (AttributeError, OSError):
                wrong.append(f"{label} is missing, or has no source")
                continue
            if changed:
                which = ", ".join(sorted(changed))
                wrong.append(f"{label} reads what it did not, or no longer: {which}")
            # A public method may be called from anywhere.
            if name.startswith("_") and name not in called:
                wrong.append(f"nothing calls {label} any more")
    return wrong


def attributes_of(function: Any) -> set[str]:
    """The attributes of ``self`` that a function, or any method of a class, names.

    By ``getattr`` too. Of a function without ``self`` those of ``torch`` and ``F``.

    Raises:
        OSError: there is no source.
    """
    # A comment may name an attribute that the code does not read.
    source = re.sub("#.*", "", inspect.getsource(function))
    pattern = r"\b(?:torch|F)\.(\w+)"
    if re.search(r"\bself\b", source):
        pattern = r"""\b(?:self\.|(?:get|has)attr\(self, ["'])(\w+)"""
    return set(re.findall(pattern, source))

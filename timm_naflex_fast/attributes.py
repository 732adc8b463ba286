"""Attributes of an object that are others for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an object or a class has these attributes; afterwards its own, as before.

    ``owner`` may be a module of PyTorch, and an attribute one of its modules.
    """
    # Not those that its class, or a base, has: they come back when the new ones are gone.
    own = {**getattr(owner, "_modules", {}), **vars(owner)}
    before = {name: own[name] for name in attributes if name in own}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)

"""An extension of mkdocstrings: the section `Example:` of our docstrings is what Google's style calls `Examples:`."""

from __future__ import annotations

import re

import griffe


class Examples(griffe.Extension):
    """Rename the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Called with every function, class and module."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

"""An extension of mkdocstrings: what our docstrings and packages have that it does not know by
itself.

The section `Example:` is what Google's style calls `Examples:`, and `from a import B as B` makes B
public.
"""

from __future__ import annotations

import ast
import re

import griffe


class Examples(griffe.Extension):
    """Rename the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Called with every function, class and module."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )

    def on_module_members(self, *, node, mod: griffe.Module, **_) -> None:
        """Called with every module: `from a import B as B` makes B a public name of it."""
        if isinstance(node, ast.Module) and mod.is_init_module and "__all__" not in mod.members:
            imports = [
                name
                for line in node.body
                if isinstance(line, ast.ImportFrom)
                for name in line.names
            ]
            own = [
                name
                for name, member in mod.members.items()
                if not member.is_alias and not member.is_module
            ]
            mod.exports = [*(name.asname for name in imports if name.name == name.asname), *own]

"""The registries: what expressions, flags and settings name, of tfdml's own and of users'
modules; and names of packages that are imported on their first use."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from tfdml.errors import ERROR_TEXT, UserError, check_choice, user_errors

Item = TypeVar("Item")

#: What each kind is called in messages. A sum of `--objectives` names losses and objectives alike.
KINDS = {
    "loss": "loss or objective",
    "objective": "loss or objective",
    "miner": "miner",
    "distance": "distance",
    "relation": "relation",
    "kernel": "kernel",
    "backbone": "backbone",
    "reader": "data set",
    "metric": "metric",
}
#: The distances that pairs, searches and galleries know by name.
DISTANCES = ("euclidean", "sqeuclidean", "cosine", "dot")
#: What stands for a class of several images: each image, their mean, or the means of its groups.
PER_CLASS = ("nearest", "mean", "max_of_means")
#: The environment variable with the modules that the user has named.
VARIABLE = "TFDML_IMPORT"
_TABLES: dict[str, dict[str, Any]] = {word: {} for word in KINDS.values()}
# What is saved within a model or a loss, and loaded from there by name.
_SAVED = ("loss", "objective", "miner", "distance", "relation", "kernel")


def register(
    kind: str, *, name: str | None = None, alias: str | None = None
) -> Callable[[Item], Item]:
    """Return a decorator that gives a class or function a name, by which expressions, flags and
    settings find it.

    Losses, objectives and what they are composed of are registered with Keras too, so that models
    with them can be loaded.

    Args:
        kind: One of `KINDS`.
        name: The name; by default that of the class in snake case without its kind,
            `nearest_negative` of `NearestNegativeLoss`, or that of the function, `shop` of
            `read_shop`.
        alias: A further name.

    Raises:
        UserError: There is no such kind, or the name belongs to something else.

    Example:
        >>> @tfdml.register("distance")
        ... def manhattan(a, b):
        ...     return tfdml.pairwise.absolute_distances(a, b)
        >>> loss = tfdml.losses.ContrastiveLoss(margin=3.0, distance="manhattan")
        >>> float(loss([0, 0, 1], [[0.0, 1.0], [0.0, 2.0], [2.0, 1.0]]))  # 1 + (3 - 2)
        2.0
    """
    check_choice("kind", kind, KINDS)

    def add(item: Item) -> Item:
        table = _TABLES[KINDS[kind]]
        for key in (name or _name_of(kind, item), *([alias] if alias else [])):
            other = table.get(key, item)
            # A module that is loaded again, or a cell that is run again, replaces what it defined.
            if _place_of(other) != _place_of(item):
                raise UserError(
                    f"the {KINDS[kind]} {key!r} is {_place_of(other)}; give {_place_of(item)} "
                    "another name"
                )
            table[key] = item
        if kind in _SAVED and not item.__module__.startswith("tfdml."):
            import keras  # here, so that flags are read and galleries searched without it

            keras.saving.register_keras_serializable(item.__module__)(item)
        return item

    return add


def registered(kind: str) -> dict[str, Any]:
    """Return what is registered of a kind, by name.

    Example:
        >>> "jaccard" in registered("relation")
        True
    """
    return dict(sorted(_TABLES[KINDS[kind]].items()))


def find(kind: str, name: str) -> Any:
    """Return what is registered under a name.

    Raises:
        UserError: Nothing is; the message has the nearest name.
    """
    table = _TABLES[KINDS[kind]]
    argument = "dataset" if kind == "reader" else kind
    check_choice(argument, name, sorted(table))
    return table[name]


def allow_modules(names: Iterable[str]) -> None:
    """Let tfdml import modules, and what is in them, in this process and those that it starts.

    Only the user does so: on the command line, in Python, or by the variable `TFDML_IMPORT`, in
    which the names are kept. What files name is not code to run.

    Example:
        >>> allow_modules(["my_losses", "shop.readers"])
    """
    known = [*_allowed(), *filter(None, names)]
    os.environ[VARIABLE] = ",".join(dict.fromkeys(known))


def check_allowed(name: str, **setting: str) -> None:
    """Refuse a module that the user has not named, nor a package that it is in.

    Args:
        name: The module.
        **setting: What asks for it, for the message, such as `log_to="my_logging.start"`.

    Raises:
        UserError: The user has not named it; the message says how to.
    """
    if not any(name == module or name.startswith(f"{module}.") for module in _allowed()):
        raise UserError(
            "a module runs only where you name it yourself, not by a file: if you trust it, "
            f"add --import={name} to the command, or set {VARIABLE}={name}",
            **setting,
        )


def import_allowed(name: str, **setting: str) -> ModuleType:
    """Return a module that the user has named, from where Python finds it or the current folder.

    Args:
        name: The module.
        **setting: What asks for it, for messages.

    Raises:
        UserError: As `check_allowed`; or the module is not found, or fails.
    """
    check_allowed(name, **setting)
    # Not before: the files of a stranger's folder would stand in for packages that are missing.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    where = "modules are looked for on Python's path and in the current folder"
    named: dict[str, Any] = setting
    with user_errors(Exception, f"{ERROR_TEXT}; {where}", named=True, **named):
        return importlib.import_module(name)


def import_modules(names: str | None = None) -> None:
    """Import modules that register what they define; those that are loaded already stay as they
    are.

    Args:
        names: Module names with commas, such as `my_losses,shop.readers`; by default those of the
            variable `TFDML_IMPORT`.

    Raises:
        UserError: As `import_allowed`; the message names `--import`.
    """
    for name in _allowed() if names is None else module_names(names):
        if name not in sys.modules:
            import_allowed(name, imports=name)


def module_names(names: str) -> list[str]:
    """Return the names of a text with commas.

    Example:
        >>> module_names("my_losses, shop.readers")
        ['my_losses', 'shop.readers']
    """
    return list(filter(None, map(str.strip, names.split(","))))


def _allowed() -> list[str]:
    return module_names(os.environ.get(VARIABLE, ""))


def snake_case(name: str) -> str:
    """Return the name of a class in the way of Python's functions.

    Example:
        >>> snake_case("NTXentLoss"), snake_case("FastAPLoss"), snake_case("SphereFace2")
        ('nt_xent_loss', 'fast_ap_loss', 'sphere_face2')
    """
    return re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()


def imported_later(
    package: str, parts: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports its parts on first use.

    Args:
        package: Its name.
        parts: By module, the names that the package offers besides its own modules.

    Example:
        >>> parts = {"tfdml.retrieval.galleries": ["open_gallery"]}
        >>> find, _ = imported_later("tfdml.retrieval", parts)
        >>> find("open_gallery").__name__
        'open_gallery'
    """

    modules: dict[str, str] = {}
    for module, offered in parts.items():
        modules.update(dict.fromkeys(offered, module))

    def find_attribute(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        if importlib.util.find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    def names() -> list[str]:
        module = sys.modules[package]
        own = [part.name for part in pkgutil.iter_modules(module.__path__)]
        return sorted({*vars(module), *modules, *own})

    return find_attribute, names


def _name_of(kind: str, item: Any) -> str:
    if not inspect.isclass(item):
        return item.__name__.removeprefix("read_") if kind == "reader" else item.__name__
    return snake_case(item.__name__).removesuffix(f"_{kind}").removesuffix("_loss")


def _place_of(item: Any) -> str:
    return f"{item.__module__}.{getattr(item, '__qualname__', repr(item))}"

"""The catalog: every data set that can be asked for by name."""

import inspect
import os
import typing
from collections.abc import Callable
from typing import Any

from tfdml import arguments
from tfdml.data.dataset import ImageDataset
from tfdml.data.readers import glyphs, official_archives, own_images
from tfdml.errors import REASON, UserError, check_choice, user_errors

SPLITS = ("train", "test")
# The two parts of a test split that has roles.
ROLES = ("query", "gallery")

# To add a data set: a function `read_NAME(data_dir, split, *, option=default, ...)` in one of these modules. A reader
# that gives `data_dir` a default works without one.
_READERS: dict[str, Callable[..., ImageDataset]] = {
    **{
        name.removeprefix("read_"): reader
        for name, reader in vars(official_archives).items()
        if name.startswith("read_")
    },
    "folder": own_images.read_folder,
    "glyphs": glyphs.read,
    "list": own_images.read_list,
}


def names() -> list[str]:
    """Return the names that `load` knows, sorted.

    Example:
        >>> "glyphs" in names()
        True
    """
    return sorted(_READERS)


def load(name: str, data_dir: str | os.PathLike | None = None, split: str = "train", **options: Any) -> ImageDataset:
    """Read one split of a data set.

    Args:
        name: One of `names()`.
        data_dir: The folder that holds the data set as unpacked; for `"list"` the file. `"glyphs"` ignores it.
        split: `"train"` or `"test"`: their classes are disjoint. Of `"folder"` also `"all"`: the images of both. Where
            the test split has roles, as that of `"inshop"`, also `"query"` or `"gallery"` for that part of it.
        **options: What the data set's reader takes, e.g. `images_per_class` of `"glyphs"`.

    Returns:
        The images, their labels and the names of their classes. No image is decoded yet.

    Raises:
        UserError: The name, the split or an option is unknown, `data_dir` is missing, or the files in it are not
            as they should be.

    Example:
        >>> len(load("glyphs", split="test", images_per_class=2))
        214
    """
    check_choice("data set", name, names())
    check_choice(f"split of {name}", split, (*SPLITS, *ROLES, "all") if name == "folder" else SPLITS + ROLES)
    reader = _READERS[name]
    parameters = inspect.signature(reader).parameters
    known = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    types = typing.get_type_hints(reader)
    for option, value in options.items():
        if option not in known:
            takes = f"it takes: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"data set {name} has no option {option!r}; {takes}")
        check = arguments.BY_TYPE.get(types.get(option, Any))
        with user_errors(ValueError, f"data set {name}: {REASON} (one of its `options`)"):
            options[option] = check(option, value) if check else value
    if data_dir:
        # A shell expands no tilde behind an equals sign.
        options["data_dir"] = os.path.expanduser(data_dir)
    elif parameters["data_dir"].default is inspect.Parameter.empty:
        kind, value = ("file", "FILE") if name == "list" else ("folder", "DIR")
        raise UserError(f"data set {name} is read from a {kind}; name it, `data_dir={value}`")
    dataset = reader(split="test" if split in ROLES else split, **options)
    if split in ROLES:
        return dataset.queries if split == "query" else dataset.gallery
    return dataset

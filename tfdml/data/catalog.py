"""The catalog: every data set that can be asked for by name."""

import inspect
import os
import typing
from typing import Any

from tfdml import arguments
from tfdml.data.dataset import ImageDataset
from tfdml.data.readers import glyphs, official_archives, own_images
from tfdml.errors import ERROR_TEXT, UserError, check_choice, user_errors
from tfdml.io.files import plain_path
from tfdml.registry import find, register, registered

SPLITS = ("train", "test")
# The two parts of a test split that has roles.
ROLES = ("query", "gallery")

# A reader is a function `read_NAME(data_dir, split, *, option=default, ...)`. One that gives
# `data_dir` a default works without one.
for reader in (own_images.read_folder, own_images.read_list, *vars(official_archives).values()):
    if inspect.isfunction(reader) and reader.__name__.startswith("read_"):
        register("reader")(reader)
register("reader", name="glyphs")(glyphs.read)


def names() -> list[str]:
    """Return the names that `load` knows, sorted.

    Example:
        >>> "glyphs" in names()
        True
    """
    return list(registered("reader"))


def load(
    name: str, data_dir: str | os.PathLike | None = None, split: str = "train", **options: Any
) -> ImageDataset:
    """Read one split of a data set.

    Args:
        name: One of `names()`.
        data_dir: The folder that holds the data set as unpacked; for `"list"` the file. `"glyphs"`
            ignores it.
        split: `"train"` or `"test"`: their classes are disjoint. Of `"folder"` also `"all"`: the
            images of both. Where the test split has roles, as that of `"inshop"`, also `"query"` or
            `"gallery"` for that part of it.
        **options: What the data set's reader takes, e.g. `images_per_class` of `"glyphs"`.

    Returns:
        The images, their labels and the names of their classes. No image is decoded yet.

    Raises:
        UserError: The name, the split or an option is unknown, `data_dir` is missing, or the files
            in it are not as they should be.

    Example:
        >>> len(load("glyphs", split="test", images_per_class=2))
        214
    """
    reader = find("reader", name)
    splits = (*SPLITS, *ROLES, "all") if name == "folder" else SPLITS + ROLES
    check_choice("split", split, splits)
    parameters = inspect.signature(reader).parameters
    names_of_options = [
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    types = typing.get_type_hints(reader)
    for option, value in options.items():
        if option not in names_of_options:
            choices = ", ".join(names_of_options)
            takes = f"it takes: {choices}" if choices else "it takes none"
            raise UserError(f"data set {name} has no option {option!r}; {takes}")
        check = arguments.BY_TYPE.get(types.get(option, Any))
        with user_errors(ValueError, f"data set {name}: {ERROR_TEXT} (one of its options)"):
            options[option] = check(option, value) if check else value
    if data_dir:
        # A shell expands no tilde behind an equals sign.
        options["data_dir"] = plain_path(data_dir)
    elif parameters["data_dir"].default is inspect.Parameter.empty:
        kind, value = ("file", "FILE") if name == "list" else ("folder", "DIR")
        raise UserError(f"data set {name} is read from a {kind}; name it, data_dir={value}")
    dataset = reader(split="test" if split in ROLES else split, **options)
    if split in ROLES:
        return dataset.queries if split == "query" else dataset.gallery
    return dataset

"""The image collections of docs/defaults.md as folders of classes, each from a free source that you fetch yourself.

Photographs of products (MIT, 81 classes) and of clothes (CC0, 25 classes) are Git repositories:

    git clone https://github.com/marcusklasson/GroceryStoreDataset
    git -C GroceryStoreDataset checkout fc80ba90f803d79d0383df52c5a4ac5de99ff6fc
    python -m benchmarks.defaults_data --name=grocery --source=GroceryStoreDataset --out=sets/grocery
    git clone https://github.com/alexeygrigorev/clothing-dataset
    git -C clothing-dataset checkout 7ed86a9cc56763b6acb35e41cb35184e43a5d218
    python -m benchmarks.defaults_data --name=clothing --source=clothing-dataset --out=sets/clothing

Drawings are packages of npm, which resvg draws (`pip install resvg-py==0.5.0`). --list prints their names:

    mkdir npm
    npm pack --pack-destination=npm $(python -m benchmarks.defaults_data --name=emoji --list)
    npm pack --pack-destination=npm $(python -m benchmarks.defaults_data --name=icons --list)
    python -m benchmarks.defaults_data --name=emoji --source=npm --out=sets/emoji
    python -m benchmarks.defaults_data --name=icons --source=npm --out=sets/icons

A class of emoji (CC BY, CC BY-SA, MIT, Apache) is one Unicode name, drawn by up to eleven artists. A class of icons
(MIT, ISC, Apache, CC BY) is one name in up to twenty sets of icons. The same source gives the same folders.
"""

import csv
import io
import json
import pathlib
import shutil
import tarfile

from tools.numbers import command_line

EMOJI = {
    "emojione": "1.2.3",
    "emojione-monotone": "1.2.1",
    "emojione-v1": "1.2.3",
    "fluent-emoji": "1.2.7",
    "fluent-emoji-flat": "1.2.6",
    "fluent-emoji-high-contrast": "1.2.6",
    "fxemoji": "1.2.2",
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "openmoji": "1.2.29",
    "twemoji": "1.2.5",
}
ICONS = {
    "ant-design": "1.2.9",
    "bi": "1.2.7",
    "bx": "1.2.3",
    "carbon": "1.2.29",
    "eva": "1.2.3",
    "fa6-solid": "1.2.4",
    "fluent": "1.2.60",
    "heroicons": "1.2.3",
    "iconoir": "1.2.11",
    "ion": "1.2.7",
    "lucide": "1.2.137",
    "material-symbols": "1.2.98",
    "mdi": "1.2.3",
    "octicon": "1.2.36",
    "ph": "1.2.2",
    "ri": "1.2.10",
    "solar": "1.2.13",
    "streamline": "1.2.5",
    "tabler": "1.2.41",
    "uil": "1.2.3",
}
# The packages; in how many of them a name has to be; every n-th of these names, sorted, is a class.
DRAWINGS = {"emoji": (EMOJI, 10, 4), "icons": (ICONS, 8, 1)}
SIDE = 128


def write_grocery(source, out):
    """Copy the photographs of all three splits. A class is the innermost folder."""
    for split in ("train", "val", "test"):
        for path in sorted((source / "dataset" / split).rglob("*.jpg")):
            _copy(path, out / path.parent.name / f"{split}_{path.name}")


def write_clothing(source, out, at_least=15, at_most=200):
    """Copy the first photographs of each kind of clothes, those of children apart, without the unsure labels."""
    classes = {}
    with open(source / "images.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            path = source / "images" / f"{row['image']}.jpg"
            if row["label"] not in ("Not sure", "Other", "Skip") and path.is_file():
                kind = row["label"] + (" of children" if row["kids"] == "True" else "")
                classes.setdefault(kind, []).append(path)
    for kind, paths in classes.items():
        for path in sorted(paths)[:at_most] if len(paths) >= at_least else ():
            _copy(path, out / kind / path.name)


def write_drawings(source, out, packages, at_least, every):
    """Draw names that are in enough packages on white, and in black where a drawing has no color."""
    import resvg_py
    from PIL import Image

    sets = {package: _icons(source, package, version) for package, version in packages.items()}
    names = sorted({name for icons in sets.values() for name in icons["icons"]})
    names = [name for name in names if sum(name in icons["icons"] for icons in sets.values()) >= at_least]
    for name in names[::every]:
        for package, icons in sets.items():
            if name not in icons["icons"]:
                continue
            icon = icons["icons"][name]
            width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
            box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
            text = (
                f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}" '
                f'width="{SIDE}" height="{SIDE}" color="black">{icon["body"]}</svg>'
            )
            drawn = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=text)))).convert("RGBA")
            image = Image.new("RGBA", drawn.size, "white")
            image.alpha_composite(drawn)
            (out / name).mkdir(parents=True, exist_ok=True)
            image.convert("RGB").save(out / name / f"{package}.png")


def _icons(source, package, version):
    """The drawings of a package of npm."""
    with tarfile.open(source / f"iconify-json-{package}-{version}.tgz") as archive:
        return json.load(archive.extractfile("package/icons.json"))


def _copy(path, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def main():
    """Write the folders of one collection."""
    parser = command_line(__doc__)
    parser.add_argument("--name", choices=("grocery", "clothing", *DRAWINGS), required=True)
    parser.add_argument("--source", type=pathlib.Path, help="the checkout, or the folder of the packages")
    parser.add_argument("--out", type=pathlib.Path, help="the folder to write, which must not be there")
    parser.add_argument("--list", action="store_true", help="print the packages of npm")
    arguments = parser.parse_args()
    if arguments.list:
        packages = DRAWINGS.get(arguments.name, ({},))[0]
        print(" ".join(f"@iconify-json/{package}@{version}" for package, version in packages.items()))
        return
    if not arguments.source or not arguments.out or arguments.out.exists():
        parser.error("--source and --out: name the source and a new folder")
    if arguments.name in DRAWINGS:
        write_drawings(arguments.source, arguments.out, *DRAWINGS[arguments.name])
    else:
        {"grocery": write_grocery, "clothing": write_clothing}[arguments.name](arguments.source, arguments.out)
    folders = [folder for folder in arguments.out.iterdir() if folder.is_dir()]
    print(f"{arguments.name}: {len(folders)} classes, {sum(1 for f in folders for _ in f.iterdir())} images")


if __name__ == "__main__":
    main()

r"""Group images without labels: those of known classes first, the others among themselves.

  tfdml cluster --embeddings=embeddings/new --held_out=embeddings/held_out --out=photos/groups.csv
  tfdml cluster --embeddings=embeddings/new --held_out=embeddings/held_out --expected_classes=300 \
      --out=photos/groups.csv
  tfdml cluster --embeddings=embeddings/new --held_out=embeddings/held_out \
      --gallery=lancedb:///data/galleries --max_distance=threshold.json --out=photos/groups.csv
  tfdml train --dataset=list --data_dir=photos/groups.csv --run_dir=runs/new

--embeddings are clustered by average linkage of cosine distances. --held_out are labeled
embeddings by the same model, of classes that it was not trained on. The clusters are cut where the
same clustering of these classes is best, for the share of pairs of one class that the new images
have. How many classes there are need not be known.

With --gallery, images within --max_distance of an image of a known class join it, and only the
others are grouped.

--out is a list (path, label) of tfdml train and its relatives. The label is a known class, or a
group such as group-0001. Images of smaller groups than --min_images are left out, and counted.
Where --embeddings have classes, the groups are measured by them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tfdml.cli.cluster.flags import ClusterFlags
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.evaluation.thresholds import MaxDistance
from tfdml.errors import UserError, counted
from tfdml.io.files import printable, require_writable
from tfdml.names import warn

if TYPE_CHECKING:
    import numpy as np

    from tfdml.embeddings.files import StoredEmbeddings


def cluster(flags: ClusterFlags) -> None:
    """Group as the flags say."""
    import numpy as np

    from tfdml.embeddings.files import check_same_model, read_embeddings
    from tfdml.evaluation.clustering import group

    _check_flags(flags)
    images = read_embeddings(os.path.expanduser(flags.embeddings))
    held_out = read_embeddings(os.path.expanduser(flags.held_out))
    names = f"{flags.embeddings} and {flags.held_out}"
    check_same_model(images.model, held_out.model, names)
    _check_images(images, held_out, flags)
    labels = np.full(len(images), "", object)
    if flags.gallery:
        labels = _join_known(images, flags)
    rest = np.flatnonzero(labels == "")
    if len(rest) < 2:
        print(f"{counted(len(rest), 'image', 'are')} left to group")
    else:
        groups = group(
            images.embeddings[rest],
            held_out.embeddings,
            held_out.labels,
            expected_classes=flags.expected_classes,
            min_precision=flags.min_precision,
            min_ari=flags.min_ari,
        )
        print(groups)
        _measure(images, rest, groups.numbers)
        labels[rest] = _group_names(groups.numbers, flags)
    _write(images, labels, flags)


def _check_flags(flags: ClusterFlags) -> None:
    require_writable(flags.out, "out")
    if os.path.splitext(flags.out)[1] != ".csv":
        raise UserError("name a file as *.csv", out=flags.out)
    if flags.gallery and not flags.max_distance:
        raise UserError("is missing: how near a known class is", max_distance=...)


def _check_images(
    images: StoredEmbeddings, held_out: StoredEmbeddings, flags: ClusterFlags
) -> None:
    """Refuse images without names, and labels that show nothing about them."""
    if not images.has_names:
        raise UserError("has no column path: a list names the images", embeddings=flags.embeddings)
    if held_out.labels is None:
        raise UserError("has no labels", held_out=flags.held_out)
    shared = set(images.names).intersection(held_out.names) if held_out.has_names else set()
    if shared:
        count = f"{len(shared):,} of its images are among those to group"
        raise UserError(f"{count}, such as {min(shared)}", held_out=flags.held_out)


def _join_known(images: StoredEmbeddings, flags: ClusterFlags) -> np.ndarray:
    """Return the known class that each image joins, (N,); an empty text for none."""
    import numpy as np

    from tfdml.retrieval import open_gallery

    within = MaxDistance.read(flags.max_distance)
    with open_gallery(flags.gallery) as gallery:
        within = within.of_gallery(gallery)
        about = gallery.about
        assert about is not None  # it is not empty
        within.check_models(images.model, about.model)
        neighbors = gallery.search(images.embeddings, 1, model=images.model)
        if about.classes_are_numbers:
            warn(f"{flags.gallery}: classes are numbers, which mean something in one file alone")
    is_near = neighbors.distances[:, 0] <= within.value
    classes = neighbors.columns["class"][:, 0]
    named = np.array([bool(name) for name in classes])
    labels = np.where(is_near & named, classes, "").astype(object)
    if np.any(is_near & ~named):
        count = np.sum(is_near & ~named)
        warn(f"{counted(count, 'image', 'are')} nearest to an image without a class, and grouped")
    print(f"{np.sum(labels != ''):,} of {len(labels):,} images are of known classes")
    return labels


def _measure(images: StoredEmbeddings, rows: np.ndarray, numbers: np.ndarray) -> None:
    """Print how well the groups of some images agree with their classes, where these are known."""
    import numpy as np

    from tfdml.evaluation.clustering import evaluate_groups

    if images.labels is None or len(np.unique(images.labels[rows])) < 2:
        return
    for name, rate in evaluate_groups(images.labels[rows], numbers).items():
        ends = f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}]"
        print(f"  {name:<15}{100 * rate.mean:6.1f} % {ends}")


def _group_names(numbers: np.ndarray, flags: ClusterFlags) -> list[str]:
    """Return the name of each image's group; an empty text for one that is too small."""
    import numpy as np

    sizes = np.bincount(numbers)
    digits = max(4, len(str(len(sizes))))
    names = [f"{flags.prefix}{number + 1:0{digits}}" for number in range(len(sizes))]
    return [names[number] if sizes[number] >= flags.min_images else "" for number in numbers]


def _write(images: StoredEmbeddings, labels: np.ndarray, flags: ClusterFlags) -> None:
    """Write the list."""
    from tfdml.audit import write_table

    rows = [row for row, label in enumerate(labels) if label]
    base = os.path.expanduser(flags.data_dir)
    paths = [os.path.join(base, images.names[row]) for row in rows]
    if not rows:
        raise UserError("no image is of a known class or a group: nothing is written")
    write_table(flags.out, {"path": paths, "label": [labels[row] for row in rows]})
    left_out = len(labels) - len(rows)
    print(f"left out: {counted(left_out, 'image')} in groups of fewer than {flags.min_images}")
    print(f"written: {printable(flags.out)}, {counted(len(rows), 'image')}")


COMMAND = Command("cluster", cluster, Flags(ClusterFlags), __doc__, needs_tensorflow=False)

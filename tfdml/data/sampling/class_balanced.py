"""P classes x K images."""

from __future__ import annotations

import numpy as np

from tfdml.data.sampling.checks import check_choice, check_positive, check_seed
from tfdml.data.sampling.class_index import ClassIndex
from tfdml.data.sampling.permutation import CLASS_STREAM, permute, round_keys
from tfdml.errors import UserError

SHORT_CLASSES = ("repeat", "drop")


class ClassBalancedSampler:
    """P distinct classes a batch, K images of each.

    Classes come in shuffled passes of floor(C / P) batches: within a pass no class comes twice, and the C mod P
    classes left over are others in every pass. The K images of a class are drawn without replacement. Rows are
    grouped by class: rows 0 .. K-1 are the first class, and so on.

    Args:
        labels: (N,) integer class ids, any values.
        classes_per_batch: P.
        images_per_class: K.
        seed: A non-negative integer.
        short_classes: What to do with classes of fewer than K images. `"repeat"`: all images of the class in random
            order, again (in a new order) as often as needed. `"drop"`: never sample the class.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: floor(N / batch_size), at least 1, where N counts the images that can be sampled.

    Raises:
        UserError: There are fewer than P classes, a number is out of range, or the policy is unknown.

    Example:
        >>> sampler = ClassBalancedSampler(labels=[7, 7, 7, 9, 9, 9], classes_per_batch=2, images_per_class=2, seed=0)
        >>> sampler.batch(step=0).shape
        (4,)
    """

    def __init__(
        self,
        labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int = 0,
        short_classes: str = "repeat",
    ):
        check_positive("classes_per_batch", classes_per_batch)
        check_positive("images_per_class", images_per_class)
        check_seed(seed)
        check_choice("short_classes", short_classes, SHORT_CLASSES)
        self._classes = ClassIndex.of(labels)
        available = len(self._classes)
        if short_classes == "drop":
            self._classes = self._classes.select(self._classes.counts >= images_per_class)
        if classes_per_batch > len(self._classes):
            short = f" with at least `images_per_class={images_per_class}` images" if short_classes == "drop" else ""
            dropped = len(self._classes) < available
            raise UserError(
                f"`classes_per_batch={classes_per_batch}`, but the data has {len(self._classes)} classes{short}"
                f"{f' (of {available})' if dropped else ''}; lower `classes_per_batch`"
                + (", lower `images_per_class` or use `short_classes='repeat'`" if dropped else "")
            )
        self._classes_per_batch, self._images_per_class, self._seed = classes_per_batch, images_per_class, seed
        self.batch_size = classes_per_batch * images_per_class
        self.steps_per_epoch = max(1, self._classes.num_images // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The images of a step.

        Args:
            step: From 0.

        Returns:
            (P * K,) int64 indices into `labels`, grouped by class.
        """
        num_classes, p = len(self._classes), self._classes_per_batch
        number, place = divmod(int(step), num_classes // p)
        keys = round_keys(self._seed, CLASS_STREAM, number)
        classes = permute(np.arange(place * p, (place + 1) * p), num_classes, keys)
        return self._classes.draw(classes, self._images_per_class, self._seed, int(step))

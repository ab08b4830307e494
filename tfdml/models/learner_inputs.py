"""`LearnerInputs`, the checks of what the methods of a `MetricLearner` are given."""

import itertools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml import workarounds
from tfdml.errors import UserError
from tfdml.labels import integer_labels, require_classes
from tfdml.losses.classification import refuse_unknown_classes
from tfdml.models.embedder import check_images, first_batch, untrained_batch_norm
from tfdml.models.inference import never_ends
from tfdml.models.text import TextEmbedder
from tfdml.objectives import InstanceLoss, Objective, ProxyLoss

# Levels from a warning of `fit_arguments` to the caller of `fit`.
_CALLER_OF_FIT = 4


class LearnerInputs:
    """Checks what the methods of a learner are given, before Keras compiles a step.

    Args:
        learner: A `MetricLearner`.
    """

    def __init__(self, learner: Any):
        self._learner = learner
        self._with_classes: list[Objective] = []
        for objective in learner.objectives:
            # Those with a proxy for each training class.
            if isinstance(objective, (ProxyLoss, InstanceLoss)):
                self._with_classes.append(objective)

    def fit_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `fit` by name, as Keras takes them; warns of what trains badly.

        Args:
            arguments: Those that are given, `x` and `y` among them.

        Raises:
            UserError: See `MetricLearner.fit`.
        """
        arguments = {**arguments, "y": self.labels(arguments["y"])}
        x, y = arguments["x"], arguments["y"]
        if isinstance(x, types.GeneratorType):
            batch = next(x, ())
            arguments["x"] = (part for part in itertools.chain([batch], x))
            self.check(batch, stacklevel=_CALLER_OF_FIT)
        else:
            weights = arguments.get("sample_weight"), arguments.get("class_weight")
            self.check(x, y, *weights, stacklevel=_CALLER_OF_FIT)
        if arguments.get("validation_data") is not None:
            arguments["validation_data"] = self._validation_data(arguments["validation_data"])
        self._check_steps(x, arguments.get("steps_per_epoch") or 0)
        self._warn_of_few_positives(x, y)
        self._warn_of_the_learner()
        self._warn_of_another_size(x)
        if y is None and hasattr(x, "cardinality"):
            # Keras warns that it does not shuffle a tf.data.Dataset, though nobody asked it to.
            arguments.setdefault("shuffle", False)
        if isinstance(x, keras.callbacks.Callback):
            # Batches that follow the epochs, as `tfdml.data.ArrayBatches`.
            arguments["shuffle"] = False
            arguments["callbacks"] = [x, *keras.tree.flatten(arguments.get("callbacks") or [])]
        return arguments

    def check(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        stacklevel: int = 3,
    ) -> None:
        """Refuse data that no step takes.

        Args:
            x: Images, or batches of images and labels.
            y: Labels, or None where `x` has them.
            sample_weight: None.
            class_weight: None.
            stacklevel: Of a warning of odd pixels; 3 is the caller of the caller.

        Raises:
            UserError: There are weights or no labels, or images or labels do not fit.
        """
        parts = _first_parts(x, y, sample_weight)
        if any(part is not None for part in (*parts[2:], sample_weight, class_weight)):
            raise UserError(
                "MetricLearner takes (images, labels), without weights of images or classes: "
                "tfdml.data.class_balanced makes batches with equally many images of each class"
            )
        if not parts:
            return
        images, labels = (*parts, None)[:2]
        towers = self._learner.towers
        if towers and isinstance(images, dict):
            for view, tower in towers.items():
                check_images(tower, images.get(view), stacklevel=stacklevel + 1)
        else:
            check_images(self._learner.embedder, images, stacklevel=stacklevel + 1)
        if labels is None:
            raise UserError(
                "MetricLearner learns from integer labels, one for each item: give (images, labels)"
            )
        if not hasattr(labels, "is_compatible_with"):
            # Before the first step, as a program compiled by XLA or JAX cannot refuse labels.
            self._check_classes(self.labels(labels))

    def labels(self, labels: Any) -> np.ndarray | None:
        """Return labels as integers, before Keras makes them float32; None of None.

        Raises:
            UserError: They are no integers, or do not fit those of JAX.
        """
        if labels is None:
            return None
        integers = integer_labels(labels, rows=self._learner.positives is not None)
        too_large = np.abs(integers).max(initial=0) > 2**31 - 1
        if too_large and keras.backend.backend() == "jax":
            raise UserError(
                "labels must fit int32 on JAX: np.unique(labels, return_inverse=True)[1] numbers "
                "them"
            )
        return integers

    def refusing(self, batches: Any) -> Any:
        """Return the same `tf.data.Dataset`, which refuses labels without a proxy and unknown
        tokens, whatever compiles the steps; other batches as they are."""
        towers = self._learner.towers
        spec = getattr(batches, "element_spec", None)
        texts = [view for view, tower in towers.items() if isinstance(tower, TextEmbedder)]
        if not isinstance(spec, tuple) or len(spec) != 2 or not (self._with_classes or texts):
            return batches
        # A data set that is distributed already takes no map.
        if not hasattr(batches, "map"):
            return batches

        def check(images, labels):
            self._check_classes(labels)
            for view in texts:
                towers[view].check_values(images[view])
            return images, labels

        return batches.map(check)

    def refuse_other_trainables(self) -> None:
        """Refuse to train other variables than the learner was compiled for.

        Raises:
            UserError: Variables were frozen, or made trainable, since the optimizer was built.
        """
        learner = self._learner
        optimizer = getattr(learner.optimizer, "inner_optimizer", learner.optimizer)
        before = {id(variable): variable for variable in workarounds.trained_by(optimizer)}
        now = {id(variable): variable for variable in learner.trainable_variables}
        frozen = [variable.path for key, variable in before.items() if key not in now]
        added = [variable.path for key, variable in now.items() if key not in before]
        changes = []
        for words, paths in (("frozen", frozen), ("trainable", added)):
            if paths:
                changes.append(f"{len(paths)} variables are {words}, such as {paths[0]}")
        if changes:
            raise UserError(
                f"since the optimizer was built {' and '.join(changes)}: call compile() again, "
                "with a new optimizer"
            )

    def _validation_data(self, validation: Any) -> Any:
        parts = validation if isinstance(validation, tuple | list) else (validation,)
        x, y, sample_weight = (*parts, None, None)[:3]
        self.check(x, y, sample_weight, stacklevel=_CALLER_OF_FIT + 1)
        if isinstance(validation, tuple) and len(validation) == 2:
            validation = validation[0], self.labels(validation[1])
        return self.refusing(validation)

    def _check_steps(self, batches: Any, steps_per_epoch: int) -> None:
        if never_ends(batches) and not steps_per_epoch:
            raise UserError(
                "the training batches never end: give fit steps_per_epoch, or the batches num_steps"
            )
        steps = self._learner.steps_per_execution
        if steps_per_epoch % steps:
            raise UserError(
                f"is no multiple of steps_per_execution={steps}", steps_per_epoch=steps_per_epoch
            )

    def _check_classes(self, labels: Any) -> None:
        # On JAX the tensors of a tf.data.Dataset are none of the backend's; the step checks their
        # form.
        of_backend = isinstance(labels, np.ndarray) or ops.is_tensor(labels)
        for objective in self._with_classes:
            classes = objective.as_labels(labels) if of_backend else labels
            refuse_unknown_classes(classes, objective.num_classes, objective.name)

    def _warn_of_few_positives(self, images: Any, labels: np.ndarray | None) -> None:
        if labels is None or labels.ndim != 1:
            return
        require_classes(labels, "training")
        if isinstance(images, dict) or self._with_classes:
            return
        if len(np.unique(labels)) == len(labels):
            _warn("no two images have the same label, so that no image has a positive")

    def _warn_of_the_learner(self) -> None:
        for objective in self._learner.objectives:
            if not objective.is_adapted:
                _warn(
                    f"{objective.name} is not adapted ({objective.without_adapting}): call "
                    "learner.adapt(batches), one pass over the training images, before fit"
                )
        if message := untrained_batch_norm(self._learner.embedder):
            _warn(message)

    def _warn_of_another_size(self, batches: Any) -> None:
        size, image_size = _size_of(batches), self._learner.embedder.image_size
        if size is not None and size != image_size:
            _warn(
                f"the training images have {size} px, and the embedder evaluates and exports views "
                f"of its image_size of {image_size}: give the batches "
                f"transform=TrainTransform(image_size={image_size}), or the embedder "
                f"image_size={size}"
            )


def _warn(text: str) -> None:
    # From a method of `fit_arguments`.
    warnings.warn(text, stacklevel=_CALLER_OF_FIT + 1)


def _first_parts(x: Any, y: Any, sample_weight: Any) -> Sequence[Any]:
    """Return images, labels and weights of arrays, or of the first of batches."""
    if y is not None:
        return x, y, sample_weight
    return x if isinstance(x, tuple | list) else first_batch(x)


def _size_of(batches: Any) -> int | None:
    """Return the height of the images of a `tf.data.Dataset`; None where it is not known."""
    spec = getattr(batches, "element_spec", None)
    shape = getattr(spec[0], "shape", None) if isinstance(spec, tuple) else None
    if shape is None or shape.rank != 4:
        return None
    return shape[1]

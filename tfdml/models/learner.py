"""`MetricLearner`, the model that `fit` trains: an embedder and the objectives that shape it."""

import inspect
import itertools
import types
import warnings

import keras
import numpy as np
from keras import ops

from tfdml import pairwise, replicas, workarounds
from tfdml.arguments import integer
from tfdml.errors import REASON, UserError, user_errors
from tfdml.labels import integer_labels, require_classes
from tfdml.losses.classification import refuse_unknown_classes
from tfdml.models.embedder import (
    Embedder,
    build_once,
    check_images,
    first_batch,
    untrained_batch_norm,
)
from tfdml.models.inference import never_ends, represent_batches
from tfdml.models.text import TextEmbedder
from tfdml.objectives import InstanceLoss, MetricLoss, Objective, ProxyLoss
from tfdml.objectives.terms import build_objectives
from tfdml.pairs import Pairs, Scope
from tfdml.saving import SavedAsFile, SavedByArguments, restore

#: What the logs say of the distances of a batch's pairs.
_DISTANCES = ("d_pos", "d_neg", "violations")


class MetricLearner(SavedByArguments, SavedAsFile, workarounds.SeveralWorkersModel):
    """Trains an embedder on (images, integer labels) with a weighted sum of objectives.

        learner = MetricLearner(embedder, [ProxyLoss(AMSoftmaxLoss(), 98),
                                           JointRepresentationSimilarity()])
        learner.compile(optimizer="adam")
        learner.fit(batches, epochs=12)
        embedder.save("embedder.keras")

    Each objective does its per-image work on its replica; then the per-image vectors that pairs
    need, and only those, are gathered across replicas, so that the update under a distribution
    strategy is that of a single device on the whole batch. Each term is reported under its name,
    unweighted; `d_pos` and `d_neg` are the mean distances of positive and negative pairs on a
    replica (a collapse shows as both going to 0). `violations` is the share of the negative pairs
    of anchors with a positive that are nearer than the anchor's furthest positive.

    Labels may be rows (B, L), sets or levels of a hierarchy, where the losses say which images
    belong together (`positives` of a `PairLoss`); then each objective needs such a loss, and the
    first one's pairs are those of `d_pos` and `d_neg`.

    An objective that measures the training set before the first step, such as `DensityAdaptivity`,
    does so in `calibrate`; without it `fit` warns.

    Calling the learner returns the representations of the images; `predict` returns their
    embeddings.

    With several views of each item, such as images and texts, there is an embedder of each, and the
    inputs are a dict with the same names:

        towers = {"image": embedder, "text": text_embedder}
        learner = MetricLearner(towers, SoftmaxAcrossViews())
        learner.fit({"image": images, "text": text_embedder.tokenize(texts)}, labels)

    The first view's representations keep their names, and `predict`, `d_pos` and `d_neg` are of the
    first. Those of the others begin with the view: `text_embedding`. Any objective can read them. A
    tower that does not train is frozen as a Keras layer is, by `trainable`, or in part by
    `freeze_backbone()`, and its dropout is off. Do so before `compile`, or compile again. No two
    towers share weights.

    Args:
        embedder: An `Embedder`; or a dict of embedders by view.
        objectives: `tfdml.objectives`, or plain losses, which are wrapped in `MetricLoss`.
            Objectives that read `"class"` come after the `ProxyLoss` that provides it. Or a sum of
            their names, as `tfdml train` takes it: `"am_softmax(margin=0.05) + 0.4 * jrs"`.
        num_classes: With a sum: how many training classes there are, where a term needs it.
        gradient_cache: Keep the activations of this many images of each device at a time: a step on
            a batch of any size takes the memory of a chunk, the images and the vectors that
            objectives compare, and one more pass forward. BatchNorm in training takes its
            statistics over a chunk. 0: plain steps. See `tfdml.models.chunks`.

    Raises:
        UserError: Two embedders share weights.
        ValueError: `gradient_cache` is negative; there is no objective, two share a name or provide
            the same representation, or one reads a representation that nothing provides.
    """

    __repr__ = keras.Model.__repr__

    def __init__(
        self,
        embedder,
        objectives,
        name="metric_learner",
        gradient_cache=0,
        num_classes=None,
        **kwargs,
    ):
        # The embedder casts the images itself, after scaling them.
        super().__init__(name=name, **{**kwargs, "autocast": False})
        self.gradient_cache = integer("gradient_cache", gradient_cache, at_least=0)
        embedder = restore(embedder)
        self.towers = (
            {view: restore(tower) for view, tower in embedder.items()}
            if isinstance(embedder, dict)
            else {}
        )
        self.embedder = next(iter(self.towers.values()), embedder)
        for tower in self.towers.values() or [self.embedder]:
            if not isinstance(tower, Embedder):
                raise ValueError(
                    f"embedder must be a tfdml.models.Embedder, or a dict of them, not {embedder!r}"
                )
        self._refuse_shared_weights()
        if isinstance(objectives, str):
            objectives = build_objectives(objectives, num_classes)
        listed = objectives if isinstance(objectives, (list, tuple)) else [objectives]
        self.objectives = [_as_objective(restore(objective)) for objective in listed]
        _check_objectives(self.objectives, tuple(self.representation_shapes(self.view_shape)))
        self.term_trackers = [
            keras.metrics.Mean(name=objective.name) for objective in self.objectives
        ]
        self.observation_trackers = {
            f"{objective.name}_{key}": keras.metrics.Mean(name=f"{objective.name}_{key}")
            for objective in self.objectives
            for key in objective.observes
        }
        self.distance_trackers = [keras.metrics.Mean(name=name) for name in _DISTANCES]

    def get_config(self):
        """Return the arguments."""
        config = super().get_config()
        if self.towers:
            towers = self.towers.items()
            config["embedder"] = {
                view: keras.saving.serialize_keras_object(tower) for view, tower in towers
            }
        return config

    @property
    def view_shape(self):
        """The shape of what it is fed: (None, S, S, 3), or a dict of them with several views."""
        shapes = {view: (None, *tower.view_shape) for view, tower in self.towers.items()}
        return shapes or (None, *self.embedder.view_shape)

    @property
    def drawn_weight_ids(self) -> set[int]:
        """The ids of the weights of objectives of which each step uses rows that are drawn."""
        return {id(weight) for objective in self.objectives for weight in objective.drawn_weights}

    @property
    def embedder_weights(self) -> list:
        """The weights of the embedders of all views."""
        return [
            weight for tower in self.towers.values() or [self.embedder] for weight in tower.weights
        ]

    def representation_shapes(self, input_shape) -> dict:
        """Return the shapes of the embedders' representations, by name."""
        return self._by_name(input_shape, lambda tower, shape: tower.representation_shapes(shape))

    def _by_name(self, inputs, represent) -> dict:
        """Return what `represent(embedder, inputs of its view)` returns of all views."""
        if self.towers and (not isinstance(inputs, dict) or set(inputs) != set(self.towers)):
            raise UserError(
                f"the inputs must be a dict with {', '.join(map(repr, self.towers))}, as the "
                "embedders are"
            )
        return self.named_by_view(
            lambda view, tower: represent(tower, inputs[view] if view else inputs), "_"
        )

    def named_by_view(self, function, between=" ") -> dict:
        """Return what a function says of the embedders, by name; names of all but the first begin
        with their view.

        Args:
            function: From a view, None where there is one embedder, and the embedder to a dict.
            between: What is between view and name.
        """
        first, *others = self.towers.items() or [(None, self.embedder)]
        named = dict(function(*first))
        for view, tower in others:
            named |= {
                f"{view}{between}{name}": value for name, value in function(view, tower).items()
            }
        return named

    def build(self, input_shape):
        """Create the weights of the embedders and of the objectives."""
        shapes = self.representation_shapes(input_shape)
        for view, tower in self.towers.items():
            build_once(tower, input_shape[view])
        build_once(self.embedder, input_shape)
        for objective in self.objectives:
            if not objective.built:
                unknown = f"{objective.name} cannot be built on the representation {REASON}"
                with keras.name_scope(objective.name), user_errors(KeyError, unknown):
                    objective.build_from(shapes)
                objective.built = True
        workarounds.freeze_new_weights(self)
        self._refuse_shared_weights()

    def _refuse_shared_weights(self) -> None:
        """Refuse views that share a network: a learner is saved, and loaded, with one of each."""
        for (first, one), (second, other) in itertools.combinations(self.towers.items(), 2):
            weights = {id(weight) for weight in one.weights}
            if one is other or not weights.isdisjoint(map(id, other.weights)):
                raise UserError(
                    f"the views {first!r} and {second!r} share weights: give each an embedder of "
                    "its own; or train one embedder on the images of both views, with the same "
                    "labels, as one batch"
                )

    def _refuse_other_trainables(self) -> None:
        """Refuse to train other variables than the learner was compiled for."""
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        before = {id(variable): variable for variable in workarounds.trained_by(optimizer)}
        now = {id(variable): variable for variable in self.trainable_variables}
        frozen = [variable.path for key, variable in before.items() if key not in now]
        added = [variable.path for key, variable in now.items() if key not in before]
        if not frozen and not added:
            return
        changes = []
        for words, paths in (("frozen", frozen), ("trainable", added)):
            if paths:
                changes.append(f"{len(paths)} variables are {words}, such as {paths[0]}")
        raise UserError(
            f"since the optimizer was built {' and '.join(changes)}: call compile() again, with a "
            "new optimizer"
        )

    def compile(self, optimizer="rmsprop", loss=None, **options):
        """As in Keras, but without a loss and metrics: the objectives are the loss.

        Raises:
            ValueError: There is a loss or a metric, or several replicas with `steps_per_execution`.
        """
        if loss is not None or options.get("loss_weights") is not None:
            raise ValueError(
                "compile() takes no loss: it is an objective, MetricLearner(embedder, "
                "[MetricLoss(loss)])"
            )
        if any(options.get(name) is not None for name in ("metrics", "weighted_metrics")):
            raise ValueError(
                "compile() takes no metrics: give fit the callback "
                "tfdml.callbacks.RetrievalEvaluation"
            )
        strategy = getattr(self, "distribute_strategy", None)
        devices = strategy.num_replicas_in_sync if strategy else replicas.data_devices()
        if (together := options.get("steps_per_execution", 1)) > 1 and devices > 1:
            # Keras 3.15 does not find the replicas' results in its loop, and devices of JAX wait
            # for each other.
            raise UserError(
                "works on one device, and there are several", steps_per_execution=together
            )
        super().compile(optimizer=optimizer, **options)

    def compile_from_config(self, config):
        """Compile a loaded model as it was."""
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config)
        if self.built:
            workarounds.exclude_from_decay(self.optimizer, self.trainable_variables)
            self.optimizer.build(self.trainable_variables)

    # The step

    def train_step(self, *args):
        """Make a step on a batch of images and labels: Keras's hook.

        On JAX, Keras differentiates `call` and `compute_loss` itself.
        """
        if keras.backend.backend() != "tensorflow":
            if self.gradient_cache and keras.backend.backend() != "jax":
                raise ValueError(
                    f"gradient_cache works on TensorFlow and JAX, not on {keras.backend.backend()}"
                )
            return super().train_step(*args)
        import tensorflow as tf

        from tfdml.models.chunks import Chunks

        images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(args[0])
        size = keras.tree.flatten(images)[0].shape[0]
        chunks = Chunks(self, images, self.gradient_cache) if self._exceeds_a_chunk(size) else None
        with tf.GradientTape() as tape:
            representations = chunks.represent(tape) if chunks else self(images, training=True)
            loss = self.compute_loss(images, labels, representations, sample_weight, training=True)
            workarounds.loss_tracker(self).update_state(
                loss * replicas.count(), sample_weight=tf.shape(labels)[0]
            )
            loss = self.optimizer.scale_loss(loss)
        trained = self.trainable_variables
        gradients = (
            chunks.gradients(tape, loss, trained) if chunks else tape.gradient(loss, trained)
        )
        drawn = self.drawn_weight_ids
        # Keras 3.15 squares the parts of a row that a batch uses several times one by one: their
        # sum is the gradient.
        gradients = [
            gradient
            if gradient is None or id(variable) in drawn
            else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(gradients, trained, strict=True)
        ]
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        return self.compute_metrics(images, labels, representations)

    def _exceeds_a_chunk(self, size: int | None) -> bool:
        """Whether a batch of this size, None for an unknown one, takes more than a chunk of the
        gradient cache."""
        return bool(self.gradient_cache) and (size is None or size > self.gradient_cache)

    def call(self, images, training=None):
        """Return the representations of the images: the embedder's, and those that objectives make
        of them."""
        images = keras.tree.map_structure(replicas.require_images, images)
        if training and keras.backend.backend() == "jax":
            from tfdml.models.chunks import represent_in_chunks

            devices = replicas.data_devices()
            if self._exceeds_a_chunk(keras.tree.flatten(images)[0].shape[0] // devices):
                return represent_in_chunks(self, images, self.gradient_cache, devices)
        detached = any("detached_" in name for name in self.reads)
        options = {"training": training, "detached": detached}
        representations = self._by_name(
            images, lambda tower, views: tower.represent(views, **options)
        )
        for objective in self.objectives:
            representations.update(objective.represent(representations, training=training))
        return representations

    def represent(self, images, training=None) -> dict:
        """Return the embedder's representations of the images, by name, as `Embedder.represent`; of
        a dict of views those of all embedders."""
        if self.towers and not isinstance(images, dict):
            return self.embedder.represent(images, training=training)
        return self._by_name(images, lambda tower, views: tower.represent(views, training=training))

    def represent_labeled(self, representations, labels, training=None):
        """Return the representations of the images, with those that objectives make of them and the
        labels."""
        representations = dict(representations)
        for objective in self.objectives:
            representations.update(
                objective.represent_labeled(representations, labels, training=training)
            )
        return representations

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Return the weighted sum of the terms, scaled so that Keras's sum over replicas is its
        global value.

        Args:
            x: The images of this replica; not used.
            y: Their labels.
            y_pred: Their representations, as `call` returns them.
            sample_weight: None.
            training: Whether this is a step of training, in which objectives update their own
                state.
        """
        if sample_weight is not None:
            raise UserError("MetricLearner takes (images, labels), without sample weights")
        labels = pairwise.as_labels(y, rows=self.positives is not None)
        self._track_distances(y_pred["embedding"], labels)
        y_pred = self.represent_labeled(y_pred, labels, training)
        # What pairs need is gathered, and nothing else.
        size, num_replicas = ops.shape(labels)[0], replicas.count()
        scope, all_labels = Scope.of_replica(size), replicas.gather(labels)
        names = {
            name
            for objective in self.objectives
            if not objective.per_image
            for name in objective.reads
        }
        gathered = {name: replicas.gather(y_pred[name]) for name in sorted(names)}

        loss = reported = ops.zeros((), "float32")
        for objective, tracker in zip(self.objectives, self.term_trackers, strict=True):
            vectors, their_labels = (
                (y_pred, labels) if objective.per_image else (gathered, all_labels)
            )
            term = objective.term(vectors, their_labels, scope, training)
            # Weighted as Keras weighs the loss in its logs: by the images of this replica.
            tracker.update_state(term.value, ops.cast(size, "float32"))
            for key, (total, count) in term.observations.items():
                observed = self.observation_trackers[f"{objective.name}_{key}"]
                observed.update_state(total / ops.maximum(count, 1.0), count)
            loss = loss + objective.weight * term.share
            reported = reported + objective.weight * term.value / num_replicas
        for regularizer in self.losses:
            penalty = ops.cast(regularizer, "float32") / num_replicas
            loss, reported = loss + penalty, reported + penalty
        if num_replicas > 1:
            # The shares have the right gradient; the value is what Keras's logs expect of replicas
            # of unequal size.
            loss = loss + ops.stop_gradient(reported - loss)
        return loss + pairwise.nan_if_no_label(labels)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the representations that a step needs."""
        return tuple(
            sorted({"embedding"}.union(*(objective.reads for objective in self.objectives)))
        )

    @property
    def positives(self):
        """What says which images belong together: that of the first objective which has such; None
        for equal labels."""
        return next((o.positives for o in self.objectives if o.positives is not None), None)

    def _track_distances(self, embeddings, labels):
        pairs = Pairs.of_batch(ops.stop_gradient(embeddings), labels, self.positives)
        distances, positives, negatives = pairs.distances(), pairs.positives, pairs.negatives
        furthest = ops.max(
            ops.where(positives, distances, -1.0), axis=1, keepdims=True, initial=-1.0
        )
        compared = ops.logical_and(negatives, furthest >= 0)
        totals = [pairwise.masked_sum(distances, mask) for mask in (positives, negatives)]
        totals.append(pairwise.masked_count(ops.logical_and(negatives, distances < furthest)))
        counts = [pairwise.masked_count(mask) for mask in (positives, negatives, compared)]
        for tracker, total, count in zip(self.distance_trackers, totals, counts, strict=True):
            # Weighted by the number of pairs, so that a batch without any does not count.
            tracker.update_state(total / ops.maximum(count, 1.0), count)

    # Keras's methods of users

    def calibrate(self, batches, objectives=None):
        """Let objectives measure the training set, by one pass over it; to be called before the
        first step of `fit`.

        Args:
            batches: The training images in the view of evaluation, as (images, labels) batches that
                end: a `tf.data.Dataset`, or any iterable. With several views, dicts of them.
            objectives: Which of the learner's; by default all that measure something.

        Raises:
            ValueError: The batches do not end, are no pairs, or their labels do not fit an
                objective.

        Example:
            >>> learner = MetricLearner(embedder, [ContrastiveLoss(reduction="sum"),
            ...     DensityAdaptivity(98, weight=10)])
            >>> learner.calibrate(tfdml.data.evaluation_batches(train, EvaluationTransform(32, 28),
            ...     batch_size=64))
            >>> learner.compile("adam")
            >>> history = learner.fit(batches, steps_per_epoch=100)
        """
        chosen = self.objectives if objectives is None else objectives
        chosen = [o for o in chosen if o.calibrates_on]
        if not chosen:
            return
        if not self.built:
            self.build(self.view_shape)
        names = sorted({str(objective.calibrates_on) for objective in chosen})
        features, labels = represent_batches(self, names, batches)
        for objective in chosen:
            objective.calibrate(features[str(objective.calibrates_on)], labels)

    def fit(self, x=None, y=None, *args, **kwargs):
        """As in Keras; warns of objectives that are not calibrated, BatchNorm that is not trained,
        and odd pixels.

        Raises:
            UserError: Labels are no integers; batches never end and there is no `steps_per_epoch`;
                or it is no multiple of `steps_per_execution`, beyond which Keras would train; or
                variables were frozen, or made trainable, since the optimizer was built.
            ValueError: Under a distribution strategy, a batch has fewer images than there are
                replicas, or the first one cannot be split equally.
        """
        options = inspect.signature(super().fit).bind(x, y, *args, **kwargs).arguments
        options.update(x=x, y=self._integers(y))
        if isinstance(x, types.GeneratorType):
            batch = next(x, ())
            options["x"] = (part for part in itertools.chain([batch], x))
            self._check_data(batch)
        else:
            self._check_data(x, y, options.get("sample_weight"), options.get("class_weight"))
        if options.get("validation_data") is not None:
            validation = options["validation_data"]
            self._check_data(
                *(validation if isinstance(validation, tuple | list) else (validation,))
            )
            if isinstance(validation, tuple) and len(validation) == 2:
                validation = validation[0], self._integers(validation[1])
            options["validation_data"] = self._with_checked_classes(validation)
        if never_ends(x) and not options.get("steps_per_epoch"):
            raise UserError(
                "the training batches never end: give fit steps_per_epoch, or the batches num_steps"
            )
        steps_per_epoch, together = options.get("steps_per_epoch") or 0, self.steps_per_execution
        if steps_per_epoch % together:
            raise UserError(
                f"is no multiple of steps_per_execution={together}", steps_per_epoch=steps_per_epoch
            )
        if options["y"] is not None and options["y"].ndim == 1:
            require_classes(options["y"], "training")
            if not (
                isinstance(x, dict)
                or self._with_classes
                or len(np.unique(options["y"])) < len(options["y"])
            ):
                warnings.warn(
                    "no two images have the same label, so that no image has a positive",
                    stacklevel=2,
                )
        for objective in self.objectives:
            if not objective.calibrated:
                warnings.warn(
                    f"{objective.name} is not calibrated ({objective.without_calibration}): call "
                    "learner.calibrate(batches), one pass over the training images, before fit",
                    stacklevel=2,
                )
        if message := untrained_batch_norm(self.embedder):
            warnings.warn(message, stacklevel=2)
        self._warn_of_another_size(x)
        if y is None and hasattr(x, "cardinality"):
            # Keras warns that it does not shuffle a tf.data.Dataset, though nobody asked it to.
            options.setdefault("shuffle", False)
        if isinstance(x, keras.callbacks.Callback):
            # Batches that follow the epochs, as `tfdml.data.ArrayBatches`.
            options["shuffle"] = False
            options["callbacks"] = [x, *keras.tree.flatten(options.get("callbacks") or [])]
        self._create_variables()
        self._refuse_other_trainables()
        with replicas.explaining_empty_replicas():
            options["x"] = self._with_checked_classes(options["x"])
            return super().fit(**options)

    def _warn_of_another_size(self, batches) -> None:
        spec = getattr(batches, "element_spec", None)
        shape = getattr(spec[0], "shape", None) if isinstance(spec, tuple) else None
        size = shape[1] if shape is not None and shape.rank == 4 else None
        own = self.embedder.image_size
        if size is not None and size != own:
            warnings.warn(
                f"the training images have {size} px, and the embedder evaluates and exports views "
                "of its image_size "
                f"of {own}: give the batches transform=TrainTransform(image_size={own}), or the "
                "embedder "
                f"image_size={size}",
                stacklevel=3,
            )

    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False):
        """As in Keras, of images and integer labels, which replicas share as in `fit`."""
        self._check_data(x, y, sample_weight, class_weight)
        self._create_variables()
        self._refuse_other_trainables()
        with replicas.explaining_empty_replicas():
            return super().train_on_batch(x, self._integers(y), return_dict=return_dict)

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """As in Keras, of images and integer labels, which replicas share as in `fit`."""
        self._check_data(x, y, sample_weight)
        self._create_variables()
        with replicas.explaining_empty_replicas():
            return super().test_on_batch(x, self._integers(y), return_dict=return_dict)

    def _check_data(self, x, y=None, sample_weight=None, class_weight=None) -> None:
        """Refuse data that no step takes, before Keras compiles one."""
        parts = (
            (x, y, sample_weight)
            if y is not None
            else x
            if isinstance(x, tuple | list)
            else first_batch(x)
        )
        if any(part is not None for part in (*parts[2:], sample_weight, class_weight)):
            raise UserError(
                "MetricLearner takes (images, labels), without weights of images or classes: "
                "tfdml.data.class_balanced makes batches with equally many images of each class"
            )
        if not parts:
            return
        images, labels = (*parts, None)[:2]
        if self.towers and isinstance(images, dict):
            for view, tower in self.towers.items():
                check_images(tower, images.get(view), stacklevel=4)
        else:
            check_images(self.embedder, images, stacklevel=4)
        if labels is None:
            raise UserError(
                "MetricLearner learns from integer labels, one for each item: give (images, labels)"
            )
        if not hasattr(labels, "is_compatible_with"):
            # Before the first step, as a program compiled by XLA or JAX cannot refuse labels.
            self._check_classes(self._integers(labels))

    def _create_variables(self) -> None:
        """Create all variables, before a step is compiled, and keep what is never to train."""
        for tower in self.towers.values() or [self.embedder]:
            tower.keep_batch_norm()
        with workarounds.scope_of(self):
            if not self.built:
                self.build(self.view_shape)
            if self.compiled:
                workarounds.exclude_from_decay(self.optimizer, self.trainable_variables)
            if self.compiled and not self.optimizer.built:
                self.optimizer.build(self.trainable_variables)

    def evaluate(self, x=None, y=None, *args, **kwargs):
        """As in Keras, of classes that were trained on."""
        if not kwargs.get("_use_cached_eval_dataset"):
            self._check_data(x, y, kwargs.get("sample_weight"))
        self._create_variables()
        return super().evaluate(self._with_checked_classes(x), self._integers(y), *args, **kwargs)

    def _integers(self, y):
        # Before Keras makes them float32.
        labels = None if y is None else integer_labels(y, rows=self.positives is not None)
        if (
            labels is not None
            and keras.backend.backend() == "jax"
            and np.abs(labels).max(initial=0) > 2**31 - 1
        ):
            raise UserError(
                "labels must fit int32 on JAX: np.unique(labels, return_inverse=True)[1] numbers "
                "them"
            )
        return labels

    def _check_classes(self, labels) -> None:
        # On JAX the tensors of a tf.data.Dataset are none of the backend's; the step checks their
        # form.
        own = isinstance(labels, np.ndarray) or ops.is_tensor(labels)
        for objective in self._with_classes:
            classes = objective.as_labels(labels) if own else labels
            refuse_unknown_classes(classes, objective.num_classes, objective.name)

    def _with_checked_classes(self, batches):
        """Return the same `tf.data.Dataset`, which refuses labels without a proxy and unknown
        tokens, whatever compiles the steps."""
        pairs = (
            isinstance(getattr(batches, "element_spec", None), tuple)
            and len(batches.element_spec) == 2
        )
        # A data set that is distributed already takes no map.
        texts = [view for view, tower in self.towers.items() if isinstance(tower, TextEmbedder)]
        if not (self._with_classes or texts) or not pairs or not hasattr(batches, "map"):
            return batches

        def check(images, labels):
            self._check_classes(labels)
            for view in texts:
                self.towers[view].check_values(images[view])
            return images, labels

        return batches.map(check)

    @property
    def _with_classes(self) -> list:
        """The objectives that have a proxy for each training class."""
        return [
            objective
            for objective in self.objectives
            if isinstance(objective, (ProxyLoss, InstanceLoss))
        ]

    def predict(self, x, **kwargs):
        """Return the embeddings of the images, as NumPy (N, d); with several views those of the
        first.

        Args:
            x: What `fit` takes: images, or batches of images, or of images and labels; where there
                are several views, a dict of them in the place of images, or those of the first.
            **kwargs: As in Keras.

        Raises:
            UserError: The images do not fit the embedder, or the first view is missing.
        """
        return self.embedder.predict(self._of_first_view(x), **kwargs)

    def predict_on_batch(self, x):
        """Return the embeddings of one batch of images, as NumPy (B, d); see `predict`."""
        return self.embedder.predict_on_batch(self._of_first_view(x))

    def _of_first_view(self, x):
        """Return the images of the first view, as an array or batches; x itself with one view."""
        if not self.towers or hasattr(x, "shape"):
            return x
        if isinstance(x, dict):
            return self._first_view(x)
        if hasattr(x, "element_spec") and hasattr(x, "map"):
            return x.map(lambda *parts: self._first_view(*parts))
        batches = x
        if isinstance(x, keras.utils.PyDataset):
            batches = (x[index] for index in range(x.num_batches))
        parts = (batch if isinstance(batch, tuple | list) else [batch] for batch in batches)
        return ((self._first_view(*part),) for part in parts)

    def _first_view(self, images, *labels):
        """Return the first view of the images of a batch."""
        del labels
        first = next(iter(self.towers))
        if isinstance(images, dict) and first not in images:
            raise UserError(
                f"predict embeds the view {first!r}, and the images have {', '.join(images)}"
            )
        return images[first] if isinstance(images, dict) else images

    def parts(self) -> dict[str, list]:
        """Return the trainable variables by part: `backbone`, `projection`, `objectives`;
        `text backbone` of a view."""
        own = [
            variable for objective in self.objectives for variable in objective.trainable_variables
        ]
        return {**self.named_by_view(lambda _, tower: tower.parts()), "objectives": own}


def _as_objective(value) -> Objective:
    if isinstance(value, Objective):
        return value
    if isinstance(value, keras.losses.Loss) or inspect.isfunction(value):
        return MetricLoss(value)
    raise ValueError(
        "an objective must be a tfdml.objectives.Objective, a keras.losses.Loss or a function of "
        "labels and "
        f"embeddings, not {value!r}"
    )


def _check_objectives(objectives: list[Objective], representations: tuple[str, ...]) -> None:
    if not objectives:
        raise ValueError("a MetricLearner needs at least one objective")
    names = [objective.name for objective in objectives]
    names += [f"{o.name}_{key}" for o in objectives for key in o.observes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two objectives are called {name!r}: give one another name=")
        if name in ("loss", *_DISTANCES):
            raise ValueError(
                f"an objective is called {name!r}, a name that the logs use: give it another name="
            )
    available = set(representations)
    for objective in objectives:
        taken = available & set(objective.provides)
        if taken:
            raise ValueError(
                f"{objective.name} provides the representation {taken.pop()!r}, which is there "
                "already"
            )
        available |= set(objective.provides)
        # Raises, with the name of the one that is missing.
        objective.select(dict.fromkeys(available))

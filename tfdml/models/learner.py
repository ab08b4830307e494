"""The model that `fit` trains: an embedder and the objectives that shape it."""

from __future__ import annotations

import keras
from keras import ops
from typing_extensions import override

from tfdml import pairwise, replicas
from tfdml.arguments import integer
from tfdml.losses.classification import refuse_unknown_classes
from tfdml.models.auto_weights import AutoWeights, WeightMeasurement
from tfdml.models.calibration import measure, warn_of_uncalibrated
from tfdml.models.embedder import Embedder, warn_of_untrained_batch_norm
from tfdml.models.first_batch import check_training_data
from tfdml.models.gradient_cache import GradientCache
from tfdml.models.several_workers import SeveralWorkers
from tfdml.objectives import (
    AutoWeight,
    Calibrated,
    InstanceLoss,
    MetricLoss,
    Objective,
    Observed,
    ProxyLoss,
    Stateful,
    WithStatistics,
)
from tfdml.pairs import Pairs, pairs_by_name, pairs_of_replica
from tfdml.saving import restore


@keras.saving.register_keras_serializable("tfdml")
class MetricLearner(SeveralWorkers, AutoWeights, GradientCache, keras.Model):
    """Trains an embedder on (images, integer labels) with a weighted sum of objectives.

        learner = MetricLearner(embedder, [ProxyLoss(AMSoftmaxLoss(), 98), JointRepresentationSimilarity()])
        learner.compile(optimizer="adam")
        learner.fit(batches, epochs=12)
        embedder.save("embedder.keras")

    Each objective does its per-image work on its replica; then the per-image vectors that pairs need, and only those,
    are gathered across replicas, so that the update under a distribution strategy is that of a single device on the
    whole batch. Each term is reported under its name, unweighted; `d_pos` and `d_neg` are the mean distances of
    positive and negative pairs on a replica (a collapse shows as both going to 0).

    Labels may be rows (B, L), sets or levels of a hierarchy, where the losses say which images belong together
    (`PairLoss.with_positives`); then each objective needs such a loss, and the first one's pairs are those of
    `d_pos` and `d_neg`.

    An objective that measures the training set before the first step, such as `DensityAdaptivity`, does so in
    `calibrate`; without it `fit` warns.

    Calling the learner returns the representations of the images; `predict` returns their embeddings.

    An objective may have a statistics phase, such as `RankMI`: then this makes an `AlternatingLearner`, whose `fit`
    alternates between steps of the embedder, by all objectives, and steps in which only that objective's own statistics
    learn.

    An objective's weight may be an `AutoWeight`: the first steps measure it, and the logs tell it as `<name>_weight`
    (`tfdml.models.auto_weights.WeightMeasurement`).

    Args:
        embedder: An `Embedder`.
        objectives: `tfdml.objectives`, or plain losses, which are wrapped in `MetricLoss`. Objectives that read
            `"class"` come after the `ProxyLoss` that provides it.
        gradient_cache: Keep the activations of this many images at a time, on Keras's TensorFlow backend: a step on a
            batch of any size takes the memory of a chunk, the images and the vectors that objectives compare, and one
            more pass forward. BatchNorm in training takes its statistics over a chunk. 0: plain steps. See
            `tfdml.models.gradient_cache.GradientCache`.

    Raises:
        ValueError: `gradient_cache` is negative; there is no objective, two share a name or provide the same
            representation, or one reads a representation that nothing provides; two want different numbers of steps
            of their statistics; or a weight cannot be measured.
    """

    def __new__(cls, embedder=None, objectives=(), **kwargs):
        """The kind of learner that the objectives need."""
        kinds = cls.__subclasses__() if cls is MetricLearner else []
        return super().__new__(next((kind for kind in kinds if kind.suits(_listed(objectives))), cls))

    @classmethod
    def suits(cls, objectives) -> bool:
        """Whether these objectives are to be trained by this kind of learner where a `MetricLearner` is asked for."""
        del objectives
        return False

    def __init__(self, embedder, objectives, name="metric_learner", gradient_cache=0, **kwargs):
        # The embedder casts the images itself, after scaling them.
        super().__init__(name=name, **{**kwargs, "autocast": False})
        self.gradient_cache = integer("gradient_cache", gradient_cache, at_least=0)
        self.embedder = restore(embedder)
        if not isinstance(self.embedder, Embedder):
            raise ValueError(f"embedder must be a tfdml.models.Embedder, not {embedder!r}")
        self.objectives = [_as_objective(restore(objective)) for objective in _listed(objectives)]
        _check_objectives(self.objectives, self.embedder.representations)
        self.term_trackers = [keras.metrics.Mean(name=objective.name) for objective in self.objectives]
        self.observation_trackers = {
            f"{objective.name}_{key}": keras.metrics.Mean(name=f"{objective.name}_{key}")
            for objective in self.objectives
            if isinstance(objective, Observed)
            for key in objective.observes
        }
        self.distance_trackers = [keras.metrics.Mean(name="d_pos"), keras.metrics.Mean(name="d_neg")]
        if any(isinstance(objective.weight, AutoWeight) for objective in self.objectives):
            self.auto_weights = WeightMeasurement(self.objectives, self.gradient_cache)

    def build(self, input_shape):
        """Create the weights of the embedder and of the objectives."""
        if not self.embedder.built:
            self.embedder.build(input_shape)
            self.embedder.built = True
        shapes = self.embedder.representation_shapes(input_shape)
        for objective in self.objectives:
            if not objective.built:
                with keras.name_scope(objective.name):
                    objective.build_from(shapes)
                objective.built = True

    def call(self, images, training=None):
        """The representations of the images: see `Embedder.represent`."""
        images = replicas.require_images(images)
        return self.embedder.represent(images, training=training, detached=self._reads_detached)

    @property
    def _reads_detached(self) -> bool:
        """Whether an objective reads what only the projection layer learns from."""
        return any(name.startswith("detached_") for objective in self.objectives for name in objective.reads)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """The weighted sum of the objectives, scaled so that Keras's sum over replicas is its global value."""
        del x
        representations = self._with_those_of_objectives(y_pred, training)
        return self.loss_of(representations, self._labels(y, sample_weight), training)

    def represent_images(self, images, training=None) -> dict:
        """All the work on each image alone: the representations that objectives read, their own among them."""
        representations = self._with_those_of_objectives(self(images, training=training), training)
        wanted = {"embedding"}.union(*(objective.reads for objective in self.objectives))
        return {name: representations[name] for name in sorted(wanted & set(representations))}

    def _with_those_of_objectives(self, representations, training) -> dict:
        representations = dict(representations)
        for objective in self.objectives:
            representations.update(objective.represent(representations, training=training))
        return representations

    def loss_of(self, representations, labels, training=True):
        """What `compute_loss` gives, of the representations that objectives read and integer labels (B,)."""
        return self.sum_of(self.terms_of(representations, labels, training))

    def terms_of(self, representations, labels, training=True) -> list:
        """Of each objective, unweighted: what this replica adds to the loss, and the value that it reports."""
        self._track_distances(representations["embedding"], labels)
        num_replicas = replicas.count()
        all_labels = replicas.gather(labels)
        wanted = {name for objective in self.objectives if not objective.per_image for name in objective.reads}
        gathered = {name: replicas.gather(representations[name]) for name in sorted(wanted & set(representations))}

        num_local = ops.cast(ops.shape(labels)[0], "float32")
        num_images = ops.cast(ops.shape(all_labels)[0], "float32")
        terms = []
        for objective, tracker in zip(self.objectives, self.term_trackers, strict=True):
            selected = objective.select(representations if objective.per_image else gathered)
            its_labels, all_its_labels = objective.as_labels(labels), objective.as_labels(all_labels)
            stateful = training and isinstance(objective, Stateful)
            if stateful:
                objective.update(selected, its_labels if objective.per_image else all_its_labels)
            if objective.per_image and objective.reduction == "mean":
                local = ops.sum(objective.compute(selected, its_labels))
                share, value = local / num_images, local / ops.maximum(num_local, 1.0)
            elif objective.per_image:
                share = ops.sum(objective.compute(selected, its_labels))
                value = share * num_replicas
            else:
                share = self._over_pairs(objective, selected, all_its_labels, ops.shape(labels)[0])
                if stateful:
                    objective.remember(selected, all_its_labels)
                share, value = self._share_and_value(objective, share, num_local, num_images)
            # Weighted as Keras weighs the loss in its logs: by the images of this replica.
            tracker.update_state(value, num_local)
            terms.append((share, value))
        return terms

    def sum_of(self, terms: list):
        """The loss of this replica, of what `terms_of` gives."""
        num_replicas = replicas.count()
        total = reported = ops.zeros((), "float32")
        for objective, (share, value) in zip(self.objectives, terms, strict=True):
            weight = self.weight_of(objective)
            total = total + weight * share
            reported = reported + weight * value / num_replicas
        for regularizer in self.losses:
            penalty = ops.cast(regularizer, "float32") / num_replicas
            total, reported = total + penalty, reported + penalty
        # The shares have the right gradient; the value is what Keras's logs expect where replicas are of unequal size.
        return total if num_replicas == 1 else total + ops.stop_gradient(reported - total)

    def _over_pairs(self, objective, representations, labels, num_local):
        """What a pair objective gives of the global batch, or the part of it that this replica's anchors make up."""
        blocks = None if objective.whole_batch else self.row_blocks(labels)
        if blocks is None:
            pairs = pairs_of_replica(representations, labels, objective.positives, num_local, objective.whole_batch)
            self._track_observations(objective, pairs)
            return objective.compute_pairs(pairs)
        if isinstance(objective, Observed):
            self._track_observations(objective, pairs_by_name(representations, labels, objective.positives))
        names = list(representations)

        def part(rows, total, *tensors):
            named = dict(zip(names, tensors, strict=True))
            return objective.compute_pairs(pairs_by_name(named, labels, objective.positives, rows, total))

        states = objective.non_trainable_variables
        return blocks.sum_of(part, list(representations.values()), objective.trainable_variables, states)

    @staticmethod
    def _share_and_value(objective, computed, num_local, num_images):
        """What this replica adds to the loss, and the term's value as it reports it."""
        if objective.whole_batch or replicas.count() == 1:
            return computed / replicas.count(), computed
        # So that the mean over replicas, weighted by their images, is the sum of the shares.
        return computed, computed * num_images / ops.maximum(num_local, 1.0)

    @property
    def positives(self):
        """What says which images belong together: that of the first objective which has such; None for equal labels."""
        return next((o.positives for o in self.objectives if o.positives is not None), None)

    def _labels(self, y, sample_weight):
        if sample_weight is not None:
            raise ValueError("MetricLearner takes (images, labels), without sample weights")
        return pairwise.as_labels(y, rows=self.positives is not None)

    def _track_distances(self, embeddings, labels):
        def sums(rows, total, embeddings):
            pairs = Pairs.of_batch(embeddings, labels, self.positives, rows, total)
            masks = (pairs.positives, pairs.negatives)
            totals = [pairwise.masked_sum(pairs.distances(), mask) for mask in masks]
            return ops.stack([*totals, *(pairwise.masked_count(mask) for mask in masks)])

        embeddings, blocks = ops.stop_gradient(embeddings), self.row_blocks(labels)
        found = ops.unstack(sums(None, None, embeddings) if blocks is None else blocks.sum_of(sums, [embeddings]))
        for tracker, total, count in zip(self.distance_trackers, found[:2], found[2:], strict=True):
            # Weighted by the number of pairs, so that a batch without any does not count.
            tracker.update_state(total / ops.maximum(count, 1.0), count)

    def _track_observations(self, objective, pairs):
        if not isinstance(objective, Observed):
            return
        for key, (mean, count) in objective.observe(pairs).items():
            # On every replica the same, of the global batch.
            tracker = self.observation_trackers[f"{objective.name}_{key}"]
            tracker.update_state(ops.stop_gradient(mean), ops.cast(count, "float32"))

    def compile(self, optimizer="rmsprop", loss=None, **options):
        """As in Keras, but without a loss and metrics: the objectives are the loss.

        Raises:
            ValueError: There is a loss or a metric.
        """
        if loss is not None or options.get("loss_weights") is not None:
            raise ValueError(
                "MetricLearner.compile() takes no loss, as its objectives are the loss: make it one of them, "
                "MetricLearner(embedder, [MetricLoss(loss, weight=1.0)])"
            )
        if any(options.get(name) is not None for name in ("metrics", "weighted_metrics")):
            raise ValueError(
                "MetricLearner.compile() takes no metrics, as it gives no class scores: measure retrieval with "
                "tfdml.evaluation.evaluate_retrieval(learner.predict(images), labels), or in fit with the callback "
                "tfdml.callbacks.RetrievalEvaluation(images, labels)"
            )
        super().compile(optimizer=optimizer, **options)

    def compile_from_config(self, config):
        """Compile a loaded model as it was."""
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config)
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def calibrate(self, batches, objectives=None):
        """Let objectives measure the training set, by one pass over it; to be called before the first step of `fit`.

        Args:
            batches: The training images in the view of evaluation, as (images, labels) batches that end: a
                `tf.data.Dataset`, or any iterable.
            objectives: Which of the learner's; by default all that measure something.

        Raises:
            ValueError: The batches do not end, are no pairs, or their labels do not fit an objective.

        Example:
            >>> learner = MetricLearner(embedder, [ContrastiveLoss(reduction="sum"), DensityAdaptivity(98, weight=10)])
            >>> learner.calibrate(tfdml.data.evaluation_batches(train, EvaluationTransform(32, 28), batch_size=64))
            >>> learner.compile("adam")
            >>> history = learner.fit(batches, steps_per_epoch=100)
        """
        chosen = self.objectives if objectives is None else objectives
        chosen = [o for o in chosen if isinstance(o, Calibrated) and o.calibrates_on]
        if not chosen:
            return
        if not self.built:
            size = self.embedder.image_size
            self.build((None, size, size, 3))
        names = sorted({str(objective.calibrates_on) for objective in chosen})
        features, labels = measure(self.embedder, names, batches)
        for objective in chosen:
            objective.calibrate(features[str(objective.calibrates_on)], labels)

    def fit(self, x=None, y=None, *args, **kwargs):
        """As in Keras; warns of objectives that are not calibrated, BatchNorm that is not trained, and images in 0..1.

        Raises:
            UserError: Labels are no integers, or batches never end and there is no `steps_per_epoch`.
            ValueError: Under a distribution strategy, a batch has fewer images than there are replicas, or the first
                one cannot be split equally.
        """
        warn_of_uncalibrated(self.objectives)
        warn_of_untrained_batch_norm(self.embedder)
        check_training_data(self.embedder, x, y, kwargs.get("steps_per_epoch"), self.positives is None)
        self._check_classes(y)
        if y is None and hasattr(x, "cardinality"):
            x = self._with_checked_classes(x)
            # Keras warns that it does not shuffle a tf.data.Dataset, though nobody asked it to.
            kwargs.setdefault("shuffle", False)
        if hasattr(kwargs.get("validation_data"), "cardinality"):
            kwargs["validation_data"] = self._with_checked_classes(kwargs["validation_data"])
        with replicas.explaining_empty_replicas():
            return super().fit(x, y, *args, **kwargs)

    def evaluate(self, x=None, y=None, *args, **kwargs):
        """As in Keras, of classes that were trained on."""
        self._check_classes(y)
        if y is None and hasattr(x, "cardinality"):
            x = self._with_checked_classes(x)
        return super().evaluate(x, y, *args, **kwargs)

    def _check_classes(self, y):
        # Before the first step, as a program compiled by XLA or JAX cannot refuse labels.
        for objective in self._with_classes if y is not None else ():
            refuse_unknown_classes(objective.as_labels(y), objective.num_classes, objective.name)

    def _with_checked_classes(self, batches):
        """A `tf.data.Dataset` of (images, labels) that refuses labels without a proxy, whatever compiles the steps."""
        pairs = isinstance(getattr(batches, "element_spec", None), tuple) and len(batches.element_spec) == 2
        # A data set that is distributed already takes no map.
        if not self._with_classes or not pairs or not hasattr(batches, "map"):
            return batches

        def check(images, labels):
            for objective in self._with_classes:
                refuse_unknown_classes(labels, objective.num_classes, objective.name)
            return images, labels

        return batches.map(check)

    @property
    def _with_classes(self) -> list:
        """The objectives that have a proxy for each training class."""
        return [objective for objective in self.objectives if isinstance(objective, (ProxyLoss, InstanceLoss))]

    def predict(self, x, **kwargs):
        """The embeddings of the images, as NumPy (N, d)."""
        return self.embedder.predict(x, **kwargs)

    def predict_on_batch(self, x):
        """The embeddings of one batch of images, as NumPy (B, d)."""
        return self.embedder.predict_on_batch(x)

    @property
    def statistics_variables(self) -> list:
        """The variables that steps of the statistics train, and no step of the embedder does."""
        members = [objective for objective in self.objectives if isinstance(objective, WithStatistics)]
        return [variable for objective in members for variable in objective.statistics_variables]

    def parts(self) -> dict[str, list]:
        """The trainable variables by part: `backbone`, `projection`, `objectives`."""
        own = [variable for objective in self.objectives for variable in objective.trainable_variables]
        return {**self.embedder.parts(), "objectives": own}

    @override
    def get_config(self):
        return {
            "name": self.name,
            "embedder": keras.saving.serialize_keras_object(self.embedder),
            "objectives": [keras.saving.serialize_keras_object(objective) for objective in self.objectives],
            "gradient_cache": self.gradient_cache,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The learner that `get_config` describes."""
        # Restored here, as what kind of learner it is depends on them.
        objectives = [restore(objective) for objective in config["objectives"]]
        return cls(**{**config, "objectives": objectives})


def _listed(objectives) -> list:
    return list(objectives) if isinstance(objectives, (list, tuple)) else [objectives]


def _as_objective(value) -> Objective:
    if isinstance(value, Objective):
        return value
    if isinstance(value, keras.losses.Loss):
        return MetricLoss(value)
    raise ValueError(f"an objective must be a tfdml.objectives.Objective or a keras.losses.Loss, not {value!r}")


def _check_objectives(objectives: list[Objective], representations: tuple[str, ...]) -> None:
    if not objectives:
        raise ValueError("a MetricLearner needs at least one objective")
    names = [objective.name for objective in objectives]
    names += [f"{o.name}_{key}" for o in objectives if isinstance(o, Observed) for key in o.observes]
    names += [f"{objective.name}_weight" for objective in objectives if isinstance(objective.weight, AutoWeight)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two objectives are called {name!r}: give one another name=")
        if name in ("loss", "d_pos", "d_neg"):
            raise ValueError(f"an objective is called {name!r}, a name that the logs use: give it another name=")
    available = set(representations)
    for objective in objectives:
        taken = available & set(objective.provides)
        if taken:
            raise ValueError(f"{objective.name} provides the representation {taken.pop()!r}, which is there already")
        available |= set(objective.provides)
        # Raises, with the name of the one that is missing.
        objective.select(dict.fromkeys(available))

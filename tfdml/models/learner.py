"""`MetricLearner`, the model that `fit` trains: an embedder and the objectives that shape it."""

import inspect
import itertools

import keras
from keras import ops

from tfdml import pairwise, replicas, workarounds
from tfdml.arguments import integer
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.models.embedder import Embedder, build_once
from tfdml.models.inference import represent_batches
from tfdml.models.learner_inputs import LearnerInputs
from tfdml.objectives import MetricLoss, Objective
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
    does so in `adapt`; without it `fit` warns.

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
        self.towers = {}
        if isinstance(embedder, dict):
            self.towers = {view: restore(tower) for view, tower in embedder.items()}
        self.embedder = next(iter(self.towers.values()), embedder)
        for tower in self._embedders:
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
            name: keras.metrics.Mean(name=name) for name in _observation_names(self.objectives)
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
    def row_sampled_weight_ids(self) -> set[int]:
        """The ids of the weights of objectives of which each step uses sampled rows."""
        weights = [objective.drawn_weights for objective in self.objectives]
        return set(map(id, itertools.chain(*weights)))

    @property
    def _embedders(self) -> list:
        """The embedder of each view, or the only one."""
        return list(self.towers.values()) or [self.embedder]

    @property
    def embedder_weights(self) -> list:
        """The weights of the embedders of all views."""
        return list(itertools.chain(*(tower.weights for tower in self._embedders)))

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
                unknown = f"{objective.name} cannot be built on the representation {ERROR_TEXT}"
                with keras.name_scope(objective.name), user_errors(KeyError, unknown):
                    objective.build_from(shapes)
                objective.built = True
        workarounds.freeze_new_weights(self)
        self._refuse_shared_weights()

    def _refuse_shared_weights(self) -> None:
        """Refuse views that share a network: a learner is saved, and loaded, with one of each."""
        for (first, first_tower), (second, second_tower) in itertools.combinations(
            self.towers.items(), 2
        ):
            weights = {id(weight) for weight in first_tower.weights}
            if first_tower is second_tower or not weights.isdisjoint(map(id, second_tower.weights)):
                raise UserError(
                    f"the views {first!r} and {second!r} share weights: give each an embedder of "
                    "its own; or train one embedder on the images of both views, with the same "
                    "labels, as one batch"
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
        if (steps := options.get("steps_per_execution", 1)) > 1 and devices > 1:
            # Keras 3.15 does not find the replicas' results in its loop, and devices of JAX wait
            # for each other.
            raise UserError("works on one device, and there are several", steps_per_execution=steps)
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
        row_sampled = self.row_sampled_weight_ids
        updates = []
        for gradient, variable in zip(gradients, trained, strict=True):
            if gradient is not None and id(variable) not in row_sampled:
                # Keras 3.15 squares the parts of a row that a batch uses several times one by one:
                # their sum is the gradient.
                gradient = tf.convert_to_tensor(gradient)
            updates.append((gradient, variable))
        self.optimizer.apply_gradients(updates)
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
        size, num_replicas = ops.shape(labels)[0], replicas.count()
        scope, all_labels = Scope.of_replica(size), replicas.gather(labels)
        gathered = self._gather_for_pairs(y_pred)

        loss = ops.zeros((), "float32")
        reported = loss
        for objective, tracker in zip(self.objectives, self.term_trackers, strict=True):
            # A term has a value, which is logged, and this replica's share of the gradient.
            if objective.per_image:
                term = objective.term(y_pred, labels, scope, training)
            else:
                term = objective.term(gathered, all_labels, scope, training)
            # Weighted as Keras weighs the loss in its logs: by the images of this replica.
            tracker.update_state(term.value, ops.cast(size, "float32"))
            for key, (total, count) in term.observations.items():
                observed = self.observation_trackers[f"{objective.name}_{key}"]
                observed.update_state(total / ops.maximum(count, 1.0), count)
            loss = loss + objective.weight * term.share
            reported = reported + objective.weight * term.value / num_replicas
        for penalty in self.losses:
            share = ops.cast(penalty, "float32") / num_replicas
            loss, reported = loss + share, reported + share
        if num_replicas > 1:
            # The shares have the right gradient; the value is what Keras's logs expect of replicas
            # of unequal size.
            loss = loss + ops.stop_gradient(reported - loss)
        return loss + pairwise.nan_if_no_label(labels)

    def _gather_for_pairs(self, representations) -> dict:
        """Return what pairs need of the representations of all replicas, and nothing else."""
        of_pairs = [objective.reads for objective in self.objectives if not objective.per_image]
        names = sorted({*itertools.chain(*of_pairs)})
        return {name: replicas.gather(representations[name]) for name in names}

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
        relations = [objective.positives for objective in self.objectives]
        return next((relation for relation in relations if relation is not None), None)

    def _track_distances(self, embeddings, labels):
        pairs = Pairs.of_batch(ops.stop_gradient(embeddings), labels, self.positives)
        distances = pairs.distances()
        positives, negatives = pairs.positives, pairs.negatives
        furthest = ops.max(
            ops.where(positives, distances, -1.0), axis=1, keepdims=True, initial=-1.0
        )
        # Negatives of an anchor that has a positive, and those of them that are nearer than it.
        compared = ops.logical_and(negatives, furthest >= 0)
        nearer = ops.logical_and(negatives, distances < furthest)
        totals = [pairwise.masked_sum(distances, mask) for mask in (positives, negatives)]
        counts = [pairwise.masked_count(mask) for mask in (positives, negatives)]
        totals.append(pairwise.masked_count(nearer))
        counts.append(pairwise.masked_count(compared))
        for tracker, total, count in zip(self.distance_trackers, totals, counts, strict=True):
            # Weighted by the number of pairs, so that a batch without any does not count.
            tracker.update_state(total / ops.maximum(count, 1.0), count)

    # Keras's methods of users

    def adapt(self, batches, objectives=None):
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
            >>> loss = tfdml.losses.ContrastiveLoss(reduction="sum")
            >>> density = tfdml.objectives.DensityAdaptivity(98, weight=10)
            >>> learner = tfdml.models.MetricLearner(embedder, [loss, density])
            >>> view = tfdml.data.EvaluationTransform.of(embedder)
            >>> learner.adapt(tfdml.data.evaluation_batches(train, view, batch_size=64))
            >>> learner.compile("adam")
            >>> history = learner.fit(batches, steps_per_epoch=100)
        """
        objectives = self.objectives if objectives is None else objectives
        objectives = [objective for objective in objectives if objective.adapts_to]
        if not objectives:
            return
        if not self.built:
            self.build(self.view_shape)
        names = sorted({str(objective.adapts_to) for objective in objectives})
        features, labels = represent_batches(self, names, batches)
        for objective in objectives:
            objective.adapt(features[str(objective.adapts_to)], labels)

    def fit(self, x=None, y=None, *args, **kwargs):
        """As in Keras; warns of objectives that are not adapted, BatchNorm that is not trained,
        and odd pixels.

        Raises:
            UserError: Labels are no integers; batches never end and there is no `steps_per_epoch`;
                or it is no multiple of `steps_per_execution`, beyond which Keras would train; or
                variables were frozen, or made trainable, since the optimizer was built.
            ValueError: Under a distribution strategy, a batch has fewer images than there are
                replicas, or the first one cannot be split equally.
        """
        inputs = LearnerInputs(self)
        options = inspect.signature(super().fit).bind(x, y, *args, **kwargs).arguments
        arguments = inputs.fit_arguments({**options, "x": x, "y": y})
        self._create_variables()
        inputs.refuse_other_trainables()
        with replicas.explaining_empty_replicas():
            arguments["x"] = inputs.refusing(arguments["x"])
            return super().fit(**arguments)

    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False):
        """As in Keras, of images and integer labels, which replicas share as in `fit`."""
        inputs = LearnerInputs(self)
        inputs.check(x, y, sample_weight, class_weight)
        self._create_variables()
        inputs.refuse_other_trainables()
        with replicas.explaining_empty_replicas():
            return super().train_on_batch(x, inputs.labels(y), return_dict=return_dict)

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """As in Keras, of images and integer labels, which replicas share as in `fit`."""
        inputs = LearnerInputs(self)
        inputs.check(x, y, sample_weight)
        self._create_variables()
        with replicas.explaining_empty_replicas():
            return super().test_on_batch(x, inputs.labels(y), return_dict=return_dict)

    def _create_variables(self) -> None:
        """Create all variables, before a step is compiled, and keep what is never to train."""
        for tower in self._embedders:
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
        inputs = LearnerInputs(self)
        if not kwargs.get("_use_cached_eval_dataset"):
            inputs.check(x, y, kwargs.get("sample_weight"))
        self._create_variables()
        return super().evaluate(inputs.refusing(x), inputs.labels(y), *args, **kwargs)

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
        of_objectives = [objective.trainable_variables for objective in self.objectives]
        parts = self.named_by_view(lambda _, tower: tower.parts())
        return {**parts, "objectives": list(itertools.chain(*of_objectives))}


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


def _observation_names(objectives: list[Objective]) -> list[str]:
    """Return what the logs call the observations of objectives."""
    names = []
    for objective in objectives:
        names += [f"{objective.name}_{key}" for key in objective.observes]
    return names


def _check_objectives(objectives: list[Objective], representations: tuple[str, ...]) -> None:
    if not objectives:
        raise ValueError("a MetricLearner needs at least one objective")
    names = [objective.name for objective in objectives] + _observation_names(objectives)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two objectives are called {name!r}: give one another name=")
        if name in ("loss", *_DISTANCES):
            raise ValueError(
                f"an objective is called {name!r}, a name that the logs use: give it another name="
            )
    available = set(representations)
    for objective in objectives:
        duplicates = available & set(objective.provides)
        if duplicates:
            raise ValueError(
                f"{objective.name} provides the representation {duplicates.pop()!r}, which is "
                "there already"
            )
        available |= set(objective.provides)
        # Raises, with the name of the one that is missing.
        objective.select(dict.fromkeys(available))

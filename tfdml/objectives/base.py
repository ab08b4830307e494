"""An objective: one term of the training loss, as a layer from (representations, labels) to a
scalar.

And plain losses as objectives: on a representation, on its prefixes, or on the similarities to
class proxies.
"""

import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
from keras import ops

from tfdml import pairwise, replicas, workarounds
from tfdml.arguments import count_of_share, integer, number, one_of
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.layers import CosineProxies
from tfdml.layers.vectors import draw_classes
from tfdml.losses.base import PairLoss, check_rank
from tfdml.losses.classification import ClassSimilarityLoss, ProxyAnchorLoss, refuse_unknown_classes
from tfdml.pairs import Scope, pairs_by_name
from tfdml.registry import register, snake_case
from tfdml.saving import SavedByArguments, restore

#: Where classes are drawn: the representation that holds the column of `"class"` of each image's
#: own.
CLASS_COLUMNS = "class_columns"


class Term(NamedTuple):
    """An objective's part of a training loss, unweighted.

    Attributes:
        share: What this replica adds to the loss. The shares of all replicas make up the value of
            the global batch.
        value: What this replica reports. The mean over replicas, weighted by their images, is the
            global value.
        observations: What the objective observes (`Objective.observe`), of the global batch: sums
            and counts by key.
    """

    share: Any
    value: Any
    observations: Mapping[str, tuple]


class Objective(SavedByArguments, keras.layers.Layer):
    """One weighted term of a `MetricLearner`'s loss.

    Called as `objective(representations, labels)` with the dict that `Embedder.represent` returns;
    the result is the term's value, unweighted (the learner multiplies it by `weight`). An objective
    is a layer, so that weights of its own (proxies, projections ...) are trained, checkpointed and
    saved with the learner.

    A subclass names the representations that it `reads`, and defines one of

    - `compute_pairs(pairs)`: a scalar from the pairs of the batch;
    - `compute(representations, labels)`: one value per image, (B,), with `per_image = True`.
      Nothing is gathered across replicas then.

    It may also define

    - `represent(representations)`: its work on each image alone;
    - `represent_labeled(representations, labels)`: what it needs the labels of the global batch
      for;
    - `update` and `remember`: what it keeps of the batches of training, the same on every replica,
      and `forget`;
    - `observe`, with the keys in `observes`: what is logged next to its value, as `<name>_<key>`;
    - `adapt`, with `adapts_to`: what it measures of the training set before the first step.

    Args:
        weight: The factor of this term in the learner's loss, at least 0.
        name: The term's name in logs; by default that of the class, as `energy_confusion`.

    Attributes:
        per_image: Whether `compute` gives one value per image.
        reduction: `"mean"` or `"sum"`, of the values per image.
        representation: The name of the representation that it reads, where it reads one.
        whole_batch: Whether `compute_pairs` needs all anchors of the batch. By default it returns
            the part of the value that the given anchors make up, and the parts of all replicas add
            up.
        learns_from: The pairs of images that it learns from, of one class (`"positive"`) or of two
            (`"negative"`); a batch without any would teach it nothing.
        provides: The names of the representations that `represent` adds.
        observes: The keys of what `observe` returns.
        adapts_to: The representation of all training images that `adapt` needs; None for
            nothing.
        without_adapting: What it does until then, for the warning of `MetricLearner.fit`.
        loss: The loss that it is computed by; None for one of its own.

    Raises:
        ValueError: `weight` is negative or not finite, or a representation that the objective reads
            is missing.
    """

    per_image = False
    whole_batch = False
    reduction = "mean"
    representation = "embedding"
    learns_from: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    observes: tuple[str, ...] = ()
    adapts_to: str | None = None
    without_adapting = "it knows nothing of the training set"
    loss: Any = None

    def __init__(self, weight=1.0, name=None, **kwargs):
        # Losses are float32 under every dtype policy.
        name = name or snake_case(type(self).__name__).removesuffix("_loss")
        super().__init__(name=name, **{**kwargs, "dtype": "float32"})
        self.weight = number("weight", weight, at_least=0)

    @property
    def drawn_weights(self) -> list:
        """Its weights of which each step uses rows that are drawn; by default none."""
        return []

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the representations that the value needs; by default `representation`
        alone."""
        return (self.representation,)

    def build_from(self, shapes: dict) -> None:
        """Create weights for representations of these shapes; by default none."""

    def build(self, representations_shape, labels_shape=None):
        """Create weights on first use."""
        self.build_from(representations_shape)

    def represent(self, representations, training=None) -> dict:
        """Compute further representations of each image from its own; by default none."""
        return {}

    def represent_labeled(self, representations, labels, training=None) -> dict:
        """Compute further representations of the images of this replica, of labels (B,) too; by
        default none."""
        return {}

    def compute(self, representations, labels):
        """Compute one value per image, (B,), if `per_image`."""
        raise TypeError(f"{type(self).__name__} must define compute(representations, labels)")

    def compute_pairs(self, pairs):
        """Compute the unweighted value, or the part of it that the anchors make up.

        Args:
            pairs: `tfdml.pairs.Pairs` of each representation that the objective reads, by name.
        """
        raise TypeError(f"{type(self).__name__} must define compute_pairs(pairs)")

    def update(self, representations, labels) -> None:
        """Update its state before the value of a training step is computed; by default not at all.

        Args:
            representations: Those of the replica's own images if `per_image`, of the global batch
                otherwise.
            labels: (B,) integers.
        """

    def remember(self, representations, labels) -> None:
        """Keep a batch of training for those after it, once the value is computed; by default not
        at all.

        Args:
            representations: As of `update`.
            labels: (B,) integers.
        """

    def forget(self) -> None:
        """Drop what was remembered, as at the start of a run; by default nothing."""

    def observe(self, pairs) -> dict:
        """Compute what the anchors make up of means over the batch, by the keys of `observes`.

        Args:
            pairs: As of `compute_pairs`.

        Returns:
            For each key the sum over the anchors, and how many values were summed.
        """
        return {}

    @property
    def is_adapted(self) -> bool:
        """Whether `adapt` has run, or need not."""
        return True

    def adapt(self, features, labels) -> None:
        """Measure the training set; what is measured stays fixed in training.

        Args:
            features: (N, D) NumPy, the representation `adapts_to` of the training images,
                before training.
            labels: (N,) NumPy integers.
        """
        raise TypeError(f"{type(self).__name__} must define adapt(features, labels)")

    def __call__(self, representations, labels, **kwargs):
        """Compute the unweighted value, a scalar, of labels in any form that `as_labels` takes."""
        # Made integers before Keras converts them: it would cast float ids to float32, and on JAX
        # cut off 64-bit ones.
        if not isinstance(labels, keras.KerasTensor):
            labels = self.as_labels(labels)
        return super().__call__(representations, labels, **kwargs)

    def call(self, representations, labels, training=None):
        """Compute the unweighted value, a scalar."""
        available = {**representations, **self.represent(representations, training=training)}
        available.update(self.represent_labeled(available, labels, training=training))
        return self.term(available, labels, training=training).value + pairwise.nan_if_no_label(
            labels
        )

    def term(self, representations, labels, scope: Scope = Scope(), training=False) -> Term:
        """Evaluate a batch; in training, also update what the objective keeps of the batches.

        Args:
            representations: At least those that it reads: of this replica's own images if
                `per_image`, of the global batch otherwise.
            labels: Theirs, in a form that `as_labels` takes.
            scope: Which images of the global batch are this replica's own; by default all.
            training: Whether this is a step of training.
        """
        selected = {
            name: ops.cast(value, "float32") for name, value in self.select(representations).items()
        }
        if self.per_image and "class" in self.reads:
            labels = representations.get(CLASS_COLUMNS, labels)
        labels = self.as_labels(labels)
        pairwise.check_counts(self.name, labels, next(iter(selected.values())))
        if training:
            self.update(selected, labels)
        term = self._term_of_images if self.per_image else self._term_of_pairs
        result = term(selected, labels, scope)
        if training:
            self.remember(selected, labels)
        return result

    def _term_of_images(self, representations, labels, scope: Scope) -> Term:
        total = ops.sum(self.compute(representations, labels))
        if self.reduction == "sum":
            return Term(total, total * replicas.count(), {})
        count = ops.cast(ops.shape(labels)[0], "float32")
        images = count if scope.total is None else scope.total(count)
        return Term(total / ops.maximum(images, 1.0), total / ops.maximum(count, 1.0), {})

    def _term_of_pairs(self, representations, labels, scope: Scope) -> Term:
        pairs = pairs_by_name(
            representations, labels, self.positives, Scope() if self.whole_batch else scope
        )
        observations = self._observations(pairs) if self.observes else {}
        value = self.compute_pairs(pairs)
        if self.whole_batch or scope.count is None:
            return Term(value / replicas.count(), value, observations)
        # So that the mean over replicas, weighted by their images, is the sum of the shares.
        num_images = ops.cast(ops.shape(labels)[0], "float32")
        num_anchors = ops.cast(scope.count, "float32")
        return Term(value, value * num_images / ops.maximum(num_anchors, 1.0), observations)

    def _observations(self, pairs) -> dict[str, tuple]:
        parts = self.observe(pairs)
        # Totals and counts in turn.
        values = itertools.chain(*(parts[key] for key in self.observes))
        numbers = ops.stack([ops.cast(value, "float32") for value in values])
        summed = ops.unstack(pairs[self.reads[0]].total(numbers), 2 * len(self.observes))
        observations = zip(summed[::2], summed[1::2], strict=True)
        return dict(zip(self.observes, observations, strict=True))

    @property
    def positives(self):
        """Which images belong together, as its `loss` has them; None for equal labels."""
        return getattr(self.loss, "positives", None)

    def as_labels(self, labels):
        """Labels as integers (B,), or rows (B, L) where there are `positives`.

        Raises:
            UserError: They are rows, and this objective takes one label for each image.
        """
        if (
            self.positives is None
            and len(getattr(labels, "shape", ())) == 2
            and labels.shape[1] not in (None, 1)
        ):
            raise UserError(
                f"{self.name} takes one label for each image, not {labels.shape}: see positives of "
                "its loss"
            )
        return pairwise.as_labels(labels, rows=self.positives is not None)

    def select(self, representations) -> dict:
        """Those that this objective reads.

        Raises:
            ValueError: One is missing.
        """
        missing = [name for name in self.reads if name not in representations]
        if missing:
            hint = (
                " ('class' comes from a ProxyLoss: add one, before this objective)"
                if "class" in missing
                else ""
            )
            raise ValueError(
                f"{self.name} needs the representation {missing[0]!r}, but there are only "
                f"{', '.join(sorted(representations))}{hint}"
            )
        return {name: representations[name] for name in self.reads}

    def compute_output_spec(self, representations, labels, training=None):
        """Return a float32 scalar."""
        return keras.KerasTensor((), dtype="float32")


class ReducedObjective(Objective):
    """An objective whose values, on one representation, are reduced as the user says.

    Args:
        representation: The name of the representation that it reads.
        reduction: `"mean"` or `"sum"`.
        **kwargs: Those of `Objective`.

    Raises:
        ValueError: `reduction` is not `"mean"` or `"sum"`.
    """

    def __init__(self, representation="embedding", reduction="mean", **kwargs):
        super().__init__(**kwargs)
        self.representation = representation
        self.reduction = one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))


class FunctionLoss(SavedByArguments, keras.losses.Loss):
    """A function (labels, representations) -> (B,) values as a loss, whose mean is the value.

    To be loaded again it must be registered with `keras.saving.register_keras_serializable`.
    """

    def __init__(self, function, name=None, **kwargs):
        self.function = restore(function)
        super().__init__(name=name or self.function.__name__.strip("<>"), **kwargs)

    def call(self, y_true, y_pred):
        """Return the values of the function."""
        return self.function(y_true, y_pred)


def as_loss(loss):
    """Return the loss of an objective: restored where it is serialized, wrapped where it is a
    function."""
    loss = restore(loss)
    loss = FunctionLoss(loss) if inspect.isfunction(loss) else loss
    if not isinstance(loss, keras.losses.Loss):
        raise ValueError(f"expected a keras.losses.Loss, got {loss!r}")
    if loss.reduction in ("none", None):
        raise ValueError(
            f"{loss.name}: an objective needs a loss with a reduction, not {loss.reduction!r}"
        )
    return loss


def reduction_of(loss) -> str:
    """Return the objective's word for the reduction of a Keras loss: `"mean"` or `"sum"`."""
    return "sum" if loss.reduction == "sum" else "mean"


def share_of(part, size):
    """Compute how many of `size` images a share of them is, rounded down."""
    # A little more, as 0.3 of 10 is a little below 3 in float32.
    return ops.cast(ops.floor(part * ops.cast(size, "float32") + 1e-4), "int32")


class MetricLoss(Objective):
    """Any loss on any representation: loss(labels, representations[representation]).

    A loss of tfdml over pairs sees the global batch. Any other Keras loss is taken to work image by
    image.

    Args:
        loss: A `keras.losses.Loss` such as `tfdml.losses.ContrastiveLoss()`, or a function (labels,
            representations) that returns one value for each image.
        representation: The name of the representation that it reads.
        name: The term's name in logs; by default the loss's.

    Raises:
        ValueError: `loss` is not a loss, has no reduction, or is one on class similarities.
        UserError: When it is built: a loss that works image by image does not take labels and the
            representation.

    Example:
        >>> objective = MetricLoss(tfdml.losses.ContrastiveLoss())
        >>> float(objective({"embedding": keras.ops.eye(3)}, keras.ops.array([0, 0, 1])))
        2.00000
    """

    def __init__(self, loss, representation="embedding", name=None, **kwargs):
        loss = as_loss(loss)
        super().__init__(name=name or loss.name, **kwargs)
        self.representation, self.reduction = representation, reduction_of(loss)
        if isinstance(loss, ClassSimilarityLoss) and representation != "class":
            raise ValueError(
                f"{loss.name} takes similarities to classes: use ProxyLoss(loss, num_classes)"
            )
        self.loss = loss
        self.per_image = not isinstance(loss, PairLoss)
        self.whole_batch = not self.per_image and loss.needs_whole_batch
        self.learns_from = () if self.per_image else ("positive", "negative")

    def build_from(self, shapes):
        """Check that a loss that works image by image gives one value of a label and a
        representation."""
        if not self.per_image:
            return
        # As many images as no other axis has, so that no axis is taken for theirs.
        count = max(shapes[self.representation][1:]) + 1
        x = ops.zeros((count, *shapes[self.representation][1:]))
        problem = (
            f"{self.name} does not go with labels (B,) and {self.representation!r} "
            f"{tuple(x.shape[1:])} per image"
        )
        advice = (
            "take a loss of tfdml, or write a function (labels, embeddings) that returns (B,) "
            "values"
        )
        with user_errors(Exception, f"{problem} ({ERROR_TEXT}): {advice}", keep="first"):
            values = self.loss.call(ops.zeros((count,), "int32"), x)
            if tuple(values.shape) != (count,):
                raise ValueError(f"it returns {tuple(values.shape)} of {count} images")

    def compute(self, representations, labels):
        """Compute the values of a loss that works image by image, (B,)."""
        return self.loss.call(labels, representations[self.representation])

    def compute_pairs(self, pairs):
        """Compute the value of a loss on pairs."""
        batch = pairs[self.representation]
        check_rank(self.name, batch.references, 2, f"{self.representation!r} to be vectors (B, d)")
        return self.loss.of_pairs(batch)


def checked_prefixes(dims, dim_weights):
    """Return the lengths of prefixes, and their factors or None."""
    lengths = tuple(integer("dims", dim, at_least=1) for dim in dims)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"dims must be ascending lengths, such as [32, 64, 128]; got {list(dims)}")
    if dim_weights is not None:
        dim_weights = tuple(number("dim_weights", factor, at_least=0) for factor in dim_weights)
        if len(dim_weights) != len(lengths):
            raise ValueError(
                f"give one of dim_weights for each of {len(lengths)} dims; got {len(dim_weights)}"
            )
    return lengths, dim_weights


def over_prefixes(dims, dim_weights, value_of):
    """Return the sum of `value_of(dim)` over the lengths of prefixes, each times its factor."""
    factors = dim_weights or (1.0,) * len(dims)
    return sum(factor * value_of(dim) for factor, dim in zip(factors, dims, strict=True))


def prefix_of(pairs, dim):
    """Return the same pairs of the first `dim` dimensions, scaled to length 1."""
    return pairs.map(lambda x: pairwise.l2_normalize(x[:, :dim]))


def check_length(name, dims, length):
    """Refuse prefixes that are longer than the representation."""
    if dims[-1] > length:
        raise ValueError(f"{name}: dims={list(dims)}, and there are {length} dimensions")


@register("objective")
class Matryoshka(MetricLoss):
    """Sums a loss over prefixes of the representation, so that its first dimensions work alone.

    L = sum_m w_m loss(labels, x[:, :m] / |x[:, :m]|). `tfdml.models.TruncatedEmbedder` cuts
    embeddings in the same way after training.

    Args:
        loss: A loss over pairs, such as `tfdml.losses.MultiSimilarityLoss()`.
        dims: The lengths of the prefixes, ascending, such as `[32, 64, 128]`. Name the whole length
            too.
        dim_weights: One factor per prefix; None for 1 each.
        representation: The name of the representation that it reads, (B, d).
        name: The term's name in logs; by default `matryoshka_` and the loss's.

    Raises:
        ValueError: `loss` is not a loss over pairs, `dims` are not ascending positive integers, or
            not as many as `dim_weights`. On the first call: a prefix is longer than the
            representation.

    Example:
        >>> objective = Matryoshka(tfdml.losses.ContrastiveLoss(), dims=[1, 2])
        >>> float(objective({"embedding": keras.ops.array([[1.0, 0.0], [0.6, 0.8]])},
        ...     keras.ops.array([0, 0])))
        0.8

    Source: Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022, equation 1.
    """

    def __init__(self, loss, dims, dim_weights=None, name=None, **kwargs):
        loss = as_loss(loss)
        if not isinstance(loss, PairLoss):
            raise ValueError(
                f"Matryoshka takes a loss of tfdml over pairs, not {type(loss).__name__}"
            )
        super().__init__(loss, name=name or f"matryoshka_{loss.name}", **kwargs)
        self.dims, self.dim_weights = checked_prefixes(dims, dim_weights)

    def build_from(self, shapes):
        """Check that the prefixes are no longer than the representation."""
        check_length(self.name, self.dims, shapes[self.representation][-1])

    def compute_pairs(self, pairs):
        """Compute the weighted sum of the loss over the prefixes."""
        batch = pairs[self.representation]
        check_rank(self.name, batch.references, 2, f"{self.representation!r} to be vectors (B, d)")
        return over_prefixes(
            self.dims, self.dim_weights, lambda dim: self.loss.of_pairs(prefix_of(batch, dim))
        )


class ProxyLoss(Objective):
    """A loss on the cosines to learned class proxies, which it owns.

    Adds the representation `"class"`, the class similarities (B, C), for objectives that come after
    it to read, such as `JointRepresentationSimilarity`. With several proxies per class they are the
    loss's own, such as SoftTriple's relaxed ones; a Keras loss that has none of its own gets the
    cosines (B, C, K) as they are.

    Works image by image: nothing is gathered across replicas, save by `ProxyAnchorLoss`, whose
    terms run over the batch.

    Args:
        loss: A loss on class similarities, such as `tfdml.losses.AMSoftmaxLoss()`.
        num_classes: C; labels must lie in 0 .. C - 1, in training and in validation. Classes that
            are not trained have no proxies, whatever their numbers: measure them with
            `tfdml.callbacks.RetrievalEvaluation`, and not with `validation_data`.
        proxies_per_class: K; None for the loss's own number: 10 of `SoftTripleLoss`, 3 of
            `SubCenterArcFaceLoss`, and 1 of others.
        representation: What the proxies are compared with.
        name: The term's name in logs; by default the loss's.
        drop_highest: The share of the global batch's images, those of the highest values, that does
            not count: for wrong labels, whose images keep high values while the others are learned.
            At least 0 and below 1. The mean is that of the images that count.
        sample: The share of the C classes that a step of training compares with, for very many
            classes: those of the global batch, and others that each step draws, the same on all
            replicas. They are never fewer than the batch has images. `"class"` has their columns
            alone, and an objective that works image by image and reads it gets columns as labels.
            In evaluation all classes are compared. On TensorFlow a step reads only the drawn
            proxies, and an optimizer of `tfdml.training.build_optimizer` changes only these, their
            moments and averages, and decays them: those that are not drawn keep their moments, as
            in TensorFlow's lazy Adam, while the dense form also moves them by what is left of
            earlier gradients. Other optimizers, and JAX, change all.

    Raises:
        ValueError: `loss` is not a loss on class similarities, a count is not positive, or
            `drop_highest` is out of range or given for a loss that has no value of each image.
            `sample` is not above 0 or above 1.

    Example:
        >>> objective = ProxyLoss(tfdml.losses.AMSoftmaxLoss(), num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))},
        ...     keras.ops.arange(4)).shape)
        ()

    Source: `drop_highest` is the small-loss selection of Han et al., "Co-teaching", NeurIPS 2018,
    by one network. `sample` is that of An et al., "Partial FC: Training 10 Million Identities on a
    Single Machine", ICCVW 2021, and "Killing Two Birds with One Stone", CVPR 2022: the softmax over
    what is drawn, without a correction.
    """

    per_image = True
    reads: tuple[str, ...] = ("class",)
    provides: tuple[str, ...] = ("class",)

    def __init__(
        self,
        loss,
        num_classes,
        proxies_per_class=None,
        representation="embedding",
        name=None,
        drop_highest=0.0,
        sample=1.0,
        **kwargs,
    ):
        loss = as_loss(loss)
        if isinstance(loss, PairLoss):
            raise ValueError(
                f"{loss.name} works on pairs of embeddings: use MetricLoss, not ProxyLoss"
            )
        super().__init__(name=name or loss.name, **kwargs)
        self.representation, self.reduction = representation, reduction_of(loss)
        self.loss = loss
        if proxies_per_class is None:
            proxies_per_class = getattr(loss, "proxies_per_class", 1)
        self.class_proxies = CosineProxies(num_classes, proxies_per_class, name="class_proxies")
        self.num_classes = self.class_proxies.num_classes
        self.proxies_per_class = self.class_proxies.proxies_per_class
        self.drop_highest = number("drop_highest", drop_highest, at_least=0, below=1)
        if self.drop_highest and isinstance(loss, ProxyAnchorLoss):
            raise ValueError(f"drop_highest: {loss.name} has no value of each image; leave it out")
        self.sample = number("sample", sample, above=0, at_most=1)
        if self.sample < 1:
            self.reads = ("class", representation)

    @property
    def drawn_weights(self):
        """The proxies, where classes are drawn."""
        return [self.class_proxies.proxies] if self.sample < 1 else []

    def build_from(self, shapes):
        """Create the proxies."""
        if self.class_proxies.built:
            return
        self.class_proxies.build(shapes[self.representation])
        if self.sample < 1:
            start = workarounds.SavedSeed.start()
            self.draws = self.add_weight(
                name="draws",
                shape=start.shape,
                dtype=start.dtype.name,
                initializer=lambda shape, dtype: start,
                trainable=False,
                aggregation="only_first_replica",
            )

    def represent(self, representations, training=None):
        """Return the class similarities of each image; nothing where classes are drawn."""
        return {} if self.sample < 1 else self.of_proxies(representations)

    def represent_labeled(self, representations, labels, training=None):
        """Return the similarities to the classes that are drawn, to all in evaluation, and each
        image's column."""
        if self.sample == 1:
            return {}
        labels = self.as_labels(labels)
        refuse_unknown_classes(labels, self.num_classes, self.name)
        if not training:
            return {**self.of_proxies(representations), CLASS_COLUMNS: labels}
        of_all = replicas.gather(labels)
        size, share = ops.shape(of_all)[0], count_of_share(self.sample, self.num_classes, up=True)
        # A number, where the size of the batch is known.
        size = (
            min(max(size, share), self.num_classes)
            if isinstance(size, int)
            else ops.maximum(size, share)
        )
        classes, columns = draw_classes(
            of_all, self.num_classes, size, workarounds.SavedSeed(self.draws)
        )
        columns = replicas.local_rows(columns, ops.shape(labels)[0])
        return {
            **self.of_proxies(representations, self.class_proxies.of_classes(classes)),
            CLASS_COLUMNS: columns,
        }

    def of_proxies(self, representations, proxies=None):
        """Return what it provides, of the proxies of some classes; None for all."""
        return {"class": self._similarities(representations[self.representation], proxies=proxies)}

    def _similarities(self, embeddings, dim=None, proxies=None):
        similarities = self.class_proxies(embeddings, dim=dim, proxies=proxies)
        if isinstance(self.loss, ClassSimilarityLoss):
            similarities = self.loss.class_similarities(similarities)
        return similarities

    def compute(self, representations, labels):
        """One value per image; 0 for those that are dropped, which makes the others' larger if a
        mean is asked for."""
        refuse_unknown_classes(labels, self.num_classes, self.name)
        values = self.image_values(representations, labels)
        return self._without_highest(values) if self.drop_highest else values

    def image_values(self, representations, labels):
        """One value per image, before any is dropped."""
        return self.loss.call(labels, representations["class"])

    def _without_highest(self, values):
        every = ops.sort(replicas.gather(ops.stop_gradient(values)))
        size = ops.shape(every)[0]
        # With one value before the smallest, as a batch without images has none.
        highest = ops.pad(every, ((1, 0),))[size - share_of(self.drop_highest, size)]
        # An image whose value is NaN is not above it: a mistake stays in sight.
        left = ops.where(values > highest, 0.0, values)
        if self.reduction == "sum":
            return left
        return left * (ops.cast(size, "float32") / pairwise.masked_count(every <= highest))


@register("objective")
class MatryoshkaProxyLoss(ProxyLoss):
    """Sums a loss on the cosines to class proxies over prefixes of the representation and of the
    proxies.

    L = sum_m w_m loss(labels, cos(x[:, :m], proxies[:, :m])): one set of proxies, the paper's
    efficient variant. The representation `"class"` is that of the whole length.

    Args:
        loss: A loss on class similarities, such as `tfdml.losses.AMSoftmaxLoss()`.
        num_classes: As `ProxyLoss`.
        dims: As `Matryoshka`.
        dim_weights: As `Matryoshka`.
        name: The term's name in logs; by default `matryoshka_` and the loss's.
        **kwargs: Further arguments of `ProxyLoss`.

    Raises:
        ValueError: As `ProxyLoss` and `Matryoshka`.

    Example:
        >>> objective = MatryoshkaProxyLoss(tfdml.losses.AMSoftmaxLoss(), num_classes=98, dims=[32,
        ...     128])
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))},
        ...     keras.ops.arange(4)).shape)
        ()

    Source: Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022, equation 1 with
    weight tying.
    """

    def __init__(self, loss, num_classes, dims, dim_weights=None, name=None, **kwargs):
        loss = as_loss(loss)
        super().__init__(loss, num_classes, name=name or f"matryoshka_{loss.name}", **kwargs)
        self.dims, self.dim_weights = checked_prefixes(dims, dim_weights)
        self.provides = ("class", *(f"class_{dim}" for dim in self.dims))
        self.reads = (*self.reads, *self.provides[1:])

    def build_from(self, shapes):
        """Create the proxies."""
        check_length(self.name, self.dims, shapes[self.representation][-1])
        super().build_from(shapes)

    def of_proxies(self, representations, proxies=None):
        """Return the class similarities, and those of the prefixes."""
        x = representations[self.representation]
        prefixes = {f"class_{dim}": self._similarities(x, dim, proxies) for dim in self.dims}
        return {**super().of_proxies(representations, proxies), **prefixes}

    def image_values(self, representations, labels):
        """One weighted sum over the prefixes per image."""

        def of_prefix(dim):
            return self.loss.call(labels, representations[f"class_{dim}"])

        return over_prefixes(self.dims, self.dim_weights, of_prefix)

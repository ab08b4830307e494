"""Layers on vectors: unit length, class proxies, principal components."""

import math

import keras
import numpy as np
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, integer, number
from tfdml.saving import SavedByArguments


@keras.saving.register_keras_serializable("tfdml")
class L2Normalize(keras.layers.Layer):
    """x / |x| along the last axis, computed in float32 under every dtype policy.

    A zero vector stays zero and gets a zero gradient (`keras.layers.UnitNormalization` gives it one
    of 1e12).

    Example:
        >>> np.array(L2Normalize()(keras.ops.array([[3.0, 4.0]])))
        array([[0.6, 0.8]], dtype=float32)
    """

    def __init__(self, **kwargs):
        # float32 always: distances between unit vectors need all of its digits.
        super().__init__(**{**kwargs, "dtype": "float32"})

    def call(self, x):
        """(..., d) -> (..., d) of length 1."""
        return pairwise.l2_normalize(x)


class CosineProxies(SavedByArguments, keras.layers.Layer):
    """Cosines between embeddings and one or more learned proxies per class.

    s_ic = w_c . x_i / (|w_c| |x_i|), or s_ick for K proxies per class. Weights and arithmetic are
    float32 under every dtype policy. The weight `proxies`, (C, d) or (C, K, d), starts uniform in
    +-1/sqrt(d) (the initialization of the JRD authors' code: Kaiming uniform with a = sqrt 5).

    Args:
        num_classes: C, the number of training classes.
        proxies_per_class: K.

    Raises:
        ValueError: A count is not positive.

    Example:
        >>> tuple(CosineProxies(num_classes=10)(keras.random.normal((4, 128))).shape)
        (4, 10)

    Source: Chu et al., ICML 2020, sec. 4.1 (x+); Movshovitz-Attias et al., ICCV 2017.
    """

    def __init__(self, num_classes, proxies_per_class=1, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.proxies_per_class = integer("proxies_per_class", proxies_per_class, at_least=1)

    def build(self, input_shape):
        """Create the proxies for embeddings of the size given."""
        size = input_shape[-1]
        per_class = () if self.proxies_per_class == 1 else (self.proxies_per_class,)
        bound = 1.0 / math.sqrt(size)
        self.proxies = self.add_weight(
            name="proxies",
            shape=(self.num_classes, *per_class, size),
            initializer=keras.initializers.RandomUniform(-bound, bound),
        )

    def call(self, embeddings, dim=None, proxies=None):
        """(B, d) -> (B, C), or (B, C, K) when there are several proxies per class.

        Args:
            embeddings: (B, d).
            dim: How many of their first dimensions count; None for all.
            proxies: Those of some classes, as `of_classes` returns them; None for all.
        """
        proxies = self.proxies if proxies is None else proxies
        if dim is not None:
            embeddings, proxies = embeddings[:, :dim], proxies[..., :dim]
        unit = pairwise.l2_normalize(proxies)
        rows = ops.reshape(unit, (-1, unit.shape[-1]))
        cosines = pairwise.dot_products(pairwise.l2_normalize(embeddings), rows)
        if self.proxies_per_class == 1:
            return cosines
        return ops.reshape(cosines, (-1, ops.shape(unit)[0], self.proxies_per_class))

    def of_classes(self, classes):
        """Return the proxies of some classes, (n,) -> (n, d) or (n, K, d); on TensorFlow no others
        are read."""
        if keras.backend.backend() != "tensorflow":
            return ops.take(self.proxies, classes, axis=0)
        import tensorflow as tf

        return tf.gather(self.proxies.value, classes)

    def compute_output_shape(self, input_shape):
        """(B, C) or (B, C, K)."""
        per_class = () if self.proxies_per_class == 1 else (self.proxies_per_class,)
        return (input_shape[0], self.num_classes, *per_class)


def draw_classes(labels, num_classes, size, seed):
    """Draw classes that the images of a batch are compared with: their own, and others at random.

    The others, in the order of their numbers from a random start, are cut into equal runs, and one
    class of each is drawn: all have the same chance, none comes twice, and the work does not grow
    with C.

    Args:
        labels: (B,) integers; one outside 0 .. C - 1 belongs to no class.
        num_classes: C.
        size: How many classes to draw, at least as many as the batch has and at most C.
        seed: A `keras.random.SeedGenerator`.

    Returns:
        (size,) integers, the classes, all different; and (B,) integers, the place of each image's
        own, or -1.

    Example:
        >>> classes, places = draw_classes(keras.ops.array([7, 2, 7]), 9, 4,
        ...     keras.random.SeedGenerator(0))
        >>> np.array(places).tolist(), np.array(classes)[:2].tolist()
        ([1, 0, 1], [2, 7])
    """
    inside = ops.logical_and(labels >= 0, labels < num_classes)
    labels = ops.cast(ops.where(inside, labels, num_classes), "int32")
    present, count = _classes_of_batch(labels, num_classes)
    draws = keras.random.uniform((size + 1,), seed=seed)
    absent = _draw_of_runs(draws, size, num_classes - count, count)
    # A number counts the batch's classes that come before it.
    before = ops.arange(ops.shape(present)[0], dtype="int32")
    before = ops.where(before < count, present - before, num_classes)
    absent = absent + ops.cast(ops.searchsorted(before, absent, side="right"), "int32")
    index = ops.arange(size, dtype="int32")
    in_batch = ops.take(present, ops.minimum(index, ops.shape(present)[0] - 1))
    classes = ops.where(index < count, in_batch, absent)
    return classes, ops.where(inside, ops.cast(ops.searchsorted(present, labels), "int32"), -1)


def _classes_of_batch(labels, num_classes):
    """Return the classes of a batch in order, then C as often as there are entries left, and how
    many classes there are."""
    ordered = ops.sort(ops.concatenate([labels, ops.full((1,), num_classes, "int32")]))
    differs = ops.concatenate([ops.ones((1,), "bool"), ordered[1:] != ordered[:-1]])
    is_first = ops.logical_and(differs, ordered < num_classes)
    classes = ops.sort(ops.where(is_first, ordered, num_classes))
    return classes, ops.sum(ops.cast(is_first, "int32"))


def _draw_of_runs(draws, size, num_absent, count):
    """Return one of each run of the classes that a batch does not have, which are numbered among
    themselves from 0 on.

    Args:
        draws: (size + 1,) uniform numbers; the last one decides where the first run starts.
        size: How many results there are, which may be known in the graph alone.
        num_absent: How many such classes there are.
        count: How many of the results the batch's own classes take: the first ones.
    """
    num_classes, num_runs = ops.maximum(num_absent, 1), ops.maximum(size - count, 1)
    run = ops.arange(size, dtype="int32") - count
    length = num_classes // num_runs + ops.cast(run < num_classes % num_runs, "int32")
    start = run * (num_classes // num_runs) + ops.minimum(run, num_classes % num_runs)
    within = ops.minimum(ops.cast(draws[:-1] * ops.cast(length, "float32"), "int32"), length - 1)
    shift = ops.cast(draws[-1] * ops.cast(num_classes, "float32"), "int32")
    return (start + within + shift) % num_classes


# Up to this many vectors or dimensions, whichever are fewer, the exact decomposition takes seconds.
_EXACT = 4096


class PrincipalComponents(SavedByArguments, keras.layers.Layer):
    """The first principal components of vectors: z = (x - mean) C.

    `adapt(vectors)` fits the mean and the components, as `keras.layers.Normalization` is adapted;
    they are weights that no optimizer trains, saved with the model. Each component points where its
    largest entry is positive.

    Up to 4,096 vectors or dimensions the decomposition is exact, in float64. Beyond, where a
    covariance of 25,088 dimensions would take 5 GB and its decomposition hours, it is
    scikit-learn's randomized one in the precision of the vectors, always with the same random
    numbers: the leading components as exact, the last ones all but; in twice the memory of the
    vectors.

    Args:
        dim: d, the number of components.
        whiten: Divide each component by its standard deviation in the vectors that `adapt` saw,
            s_i, to the power of `power`: z_i / v_i^(power / 2) with v_i = (1 - shrinkage) s_i^2 +
            shrinkage v, v the mean variance of all directions.
        power: 1: all components vary alike; 0.5: half-way there; 0: as if not whitened.
        shrinkage: How far the variances are drawn to their mean, 0 .. 1: above 0 directions in
            which the vectors hardly differ, and which few vectors estimate badly, are enlarged
            less.

    Raises:
        ValueError: `dim` is not positive, or `power` or `shrinkage` is out of range.

    Example:
        >>> layer = PrincipalComponents(2)
        >>> layer.adapt(np.random.default_rng(0).normal(size=(100, 5)))
        >>> tuple(layer(np.ones((4, 5))).shape)
        (4, 2)
    """

    def __init__(self, dim, whiten=False, power=1.0, shrinkage=0.0, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.dim = integer("dim", dim, at_least=1)
        self.whiten = boolean("whiten", whiten)
        self.power = number("power", power, at_least=0, at_most=1)
        self.shrinkage = number("shrinkage", shrinkage, at_least=0, at_most=1)
        self.adapted = False

    def build(self, input_shape):
        """Create the mean (D,) and the components (D, d)."""
        size = input_shape[-1]
        if size < self.dim:
            raise ValueError(f"{self.name}: {self.dim} components of vectors of size {size}")
        self.mean = self.add_weight((size,), "zeros", trainable=False, name="mean")
        self.components = self.add_weight(
            (size, self.dim), "zeros", trainable=False, name="components"
        )

    def adapt(self, vectors):
        """Fit to vectors.

        Args:
            vectors: (N, D) NumPy.

        Raises:
            ValueError: There are not more vectors than components, one is not finite, or their size
                is not D.
        """
        vectors = np.asarray(vectors)
        if vectors.ndim != 2 or len(vectors) <= self.dim:
            raise ValueError(
                f"{self.name}: adapt() needs more than {self.dim} vectors, not {vectors.shape}"
            )
        if not np.all(np.isfinite(vectors)):
            raise ValueError(f"{self.name}: the vectors are not all finite")
        if not self.weights:
            self.build(vectors.shape)
        if vectors.shape[1] != self.mean.shape[0]:
            raise ValueError(
                f"{self.name}: the vectors have size {vectors.shape[1]}, not {self.mean.shape[0]}"
            )
        mean = vectors.mean(axis=0, dtype=np.float64)
        components, variances = _principal(vectors, mean, self.dim)
        if self.whiten:
            mean_variance = (
                vectors.var(axis=0, dtype=np.float64, ddof=1).mean() if self.shrinkage else 0.0
            )
            variances = (1 - self.shrinkage) * variances + self.shrinkage * mean_variance
            # A direction in which the vectors do not differ stays without weight.
            deviations = np.sqrt(variances)
            usable = deviations > 1e-6 * deviations[0]
            components = components * np.where(
                usable, np.where(usable, deviations, 1.0) ** -self.power, 0.0
            )
        self.mean.assign(mean)
        self.components.assign(components)
        self.adapted = True

    def load_own_variables(self, store):
        """Keras's hook: what is loaded has been adapted, unless it is still zero."""
        super().load_own_variables(store)
        self.adapted = bool(ops.any(self.components != 0))

    def call(self, x):
        """(B, D) -> (B, d)."""
        if not self.adapted:
            raise ValueError(
                f"{self.name}: call adapt() on the vectors of the training images first"
            )
        return ops.matmul(ops.cast(x, "float32") - self.mean, self.components)

    def compute_output_spec(self, x):
        """(B, d) float32."""
        return keras.KerasTensor((x.shape[0], self.dim), dtype="float32")


def _principal(vectors, mean, dim):
    """Return the first components (D, d) of vectors (N, D), and the variances (d,) along them."""
    # Imported where it is needed: a model that only applies its components does without it.
    from sklearn.decomposition import PCA

    count, size = vectors.shape
    if min(count, size) > _EXACT:
        pca = PCA(dim, svd_solver="randomized", random_state=0).fit(vectors)
    else:
        # Of fewer vectors than dimensions the singular vectors, without the covariance's D x D.
        solver = "covariance_eigh" if count >= size else "full"
        pca = PCA(dim, svd_solver=solver, copy=False).fit(vectors - mean)
    return pca.components_.T, pca.explained_variance_

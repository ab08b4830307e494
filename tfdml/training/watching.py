"""Looks at a batch every so many steps: gradients by part and term, and how far embeddings spread.

What it sees is written for TensorBoard and `watch.json`, and raises alarms, whose thresholds are here too. Other
libraries, Weights & Biases and MLflow, receive the numbers of each epoch.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops
from scipy.spatial.distance import pdist

from tfdml.data.pipeline import own_threads, training_batches
from tfdml.data.sampling import Share
from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.files import read_json, write_json
from tfdml.models import MetricLearner
from tfdml.pairs import Pairs
from tfdml.training.build import Components
from tfdml.training.checkpoints import RunFolder
from tfdml.training.settings import Experiment


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a step on a batch would meet.

    Args:
        terms: By name, what each objective adds to the loss: its value times its weight.
        norms: By part, the norm of the gradient of the loss, before any clipping.
        gram: (T, T) <g_s, g_t> of the terms' gradients g_t with respect to the embedder's weights.
        embeddings: (B, d).
    """

    terms: dict[str, float]
    norms: dict[str, float]
    gram: np.ndarray
    embeddings: np.ndarray


class GradientSampler:
    """Measures batches by a learner as it stands, on one device.

    The loss is a function of the values of the learner's variables: what a step would change, such as moving statistics
    and random states, is dropped. Losses that layers add by `add_loss` are not among the terms.

    Args:
        learner: A built learner.

    Example:
        >>> images, labels = next(iter(batches))
        >>> sample = GradientSampler(learner)(images, labels)
        >>> sorted(sample.norms)
        ['backbone', 'projection']
    """

    def __init__(self, learner: MetricLearner):
        self._learner = learner
        self._trained = list(learner.trainable_variables)
        self._others = list(learner.non_trainable_variables)
        place = {id(variable): index for index, variable in enumerate(self._trained)}
        #: The places of each part's variables.
        self._parts = {part: [place[id(v)] for v in members] for part, members in learner.parts().items()}
        backend = keras.backend.backend()
        measure = _on_jax if backend == "jax" else _on_tensorflow
        self._run = measure(self._terms, self._norms_and_gram, eagerly=learner.run_eagerly)

    def __call__(self, images: Any, labels: Any) -> Sample:
        """Measure a batch.

        Args:
            images: (B, H, W, 3).
            labels: (B,) integers.
        """
        trained, others = ([_value(variable) for variable in group] for group in (self._trained, self._others))
        terms, embeddings, squares, gram = self._run(trained, others, images, labels)
        names = [objective.name for objective in self._learner.objectives]
        return Sample(
            dict(zip(names, np.asarray(terms, np.float64).tolist(), strict=True)),
            {part: float(np.sqrt(np.float64(squares[part]))) for part, members in self._parts.items() if members},
            np.asarray(gram, np.float64),
            np.asarray(embeddings),
        )

    def _terms(self, trained, others, images, labels):
        """Return the weighted terms (T,), and the embeddings."""
        learner = self._learner
        mapping = [*zip(self._trained, trained, strict=True), *zip(self._others, others, strict=True)]
        with keras.StatelessScope(mapping, initialize_variables=False):
            representations = learner(images, training=True)
            terms = [
                objective.weight * objective.term(representations, labels, training=True).value
                for objective in learner.objectives
            ]
        return ops.stack(terms), ops.cast(representations["embedding"], "float32")

    def _norms_and_gram(self, gradients: Sequence[Sequence[Any]]):
        """Squared norms by part of the sum over terms, and the products of terms over the embedder."""

        def product(a, b, part):
            pairs = [(a[i], b[i]) for i in self._parts[part] if a[i] is not None and b[i] is not None]
            return sum((ops.sum(ops.cast(x, "float32") * ops.cast(y, "float32")) for x, y in pairs), ops.zeros(()))

        total = [_sum([term[i] for term in gradients]) for i in range(len(self._trained))]
        squares = {part: product(total, total, part) for part in self._parts}
        embedder = [part for part in self._parts if part != "objectives"]
        gram = [[sum(product(a, b, part) for part in embedder) for b in gradients] for a in gradients]
        return squares, ops.stack([ops.stack(row) for row in gram])


def _sum(gradients: Sequence[Any]):
    known = [gradient for gradient in gradients if gradient is not None]
    return sum(known[1:], known[0]) if known else None


def _on_tensorflow(terms_of: Callable, summarize: Callable, eagerly: bool) -> Callable:
    def run(trained, others, images, labels):
        own = [tf.identity(value) for value in trained]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(own)
            terms, embeddings = terms_of(own, others, images, labels)
            each = tf.unstack(terms)
        # A gradient of gathered rows lists the rows.
        gradients = [
            [None if found is None else tf.convert_to_tensor(found) for found in tape.gradient(term, own)]
            for term in each
        ]
        del tape
        return (terms, embeddings, *summarize(gradients))

    return run if eagerly else tf.function(run, autograph=False)


def _on_jax(terms_of: Callable, summarize: Callable, eagerly: bool) -> Callable:
    import jax

    def run(trained, others, images, labels):
        terms, back, embeddings = jax.vjp(
            lambda own: terms_of(own, others, images, labels), list(trained), has_aux=True
        )
        gradients = [back(one)[0] for one in jax.numpy.eye(len(terms), dtype=terms.dtype)]
        return (terms, embeddings, *summarize(gradients))

    compiled = run if eagerly else jax.jit(run)

    def on_one_device(trained, others, images, labels):
        # Whatever the training is shared out over, this is the work of one device.
        given = [np.asarray(x) for x in (images, labels)]
        labels = given[1].astype(np.int32)
        return compiled(trained, others, given[0], labels)

    return on_one_device


def _value(variable: Any):
    """Return what a variable holds, on this process's first device."""
    if keras.backend.backend() == "jax":
        return np.asarray(variable.value.addressable_data(0))
    return tf.convert_to_tensor(variable.value)


def spread(embeddings: np.ndarray) -> dict[str, float]:
    """How far embeddings spread, and over how many directions.

    With the eigenvalues l_1 .. l_d of their covariance and p_i = l_i / sum_j l_j:

        variance = sum_i l_i
        effective_rank = exp(-sum_i p_i ln p_i)
        participation_ratio = (sum_i l_i)^2 / sum_i l_i^2

    Both ranks lie between 1 and min(B - 1, d). Of unit vectors the variance is at most 1, and half the mean squared
    distance of two of them (drawn with replacement).

    Args:
        embeddings: (B, d).

    Returns:
        The three by name; of images that all have one embedding, variance 0 and ranks of 1.

    Example:
        >>> spread(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))["effective_rank"]
        2.0

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    x = np.asarray(embeddings, np.float64)
    # The singular values of the centered rows are those of the covariance, of the smaller of both sizes.
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 / len(x)
    total = float(values.sum())
    # Rounding of float32 is no direction.
    if total <= 1e-12:
        return {"variance": total, "effective_rank": 1.0, "participation_ratio": 1.0}
    shares = values[values > 0] / total
    return {
        "variance": total,
        "effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
        "participation_ratio": float(1.0 / (shares**2).sum()),
    }


def pair_distances(
    embeddings: np.ndarray, labels: np.ndarray, relation: Callable | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the Euclidean distances of positive and of negative pairs, each pair once, in float64.

    Args:
        embeddings: (B, d).
        labels: (B,) class ids, or what `relation` takes.
        relation: Which images belong together, see `MetricLearner.positives`.
    """
    pairs, distances = Pairs.of_batch(embeddings, labels, relation), pdist(embeddings)
    upper = np.triu_indices(len(labels), 1)
    return distances[np.asarray(pairs.positives)[upper]], distances[np.asarray(pairs.negatives)[upper]]


def gradient_shares(gram: np.ndarray) -> np.ndarray:
    """Return the share of each term's gradient g_t in their sum g: <g_t, g> / |g|^2, which add up to 1.

    A share below 0 pulls against the sum of all.

    Args:
        gram: (T, T) <g_s, g_t>.

    Returns:
        (T,); 0 where the gradients cancel out.
    """
    total = float(gram.sum())
    return gram.sum(axis=1) / total if total > 0 else np.zeros(len(gram))


# A batch whose variance has fallen to this share of its highest, or its effective rank to that one's, has collapsed.
VARIANCE_SHARE, RANK_SHARE = 0.1, 0.25
# Unit vectors with this variance are a thousandth apart.
POINT = 5e-7
# A gradient norm this many times the running median of so many samples, once so many are known, has exploded.
EXPLOSION, MEDIAN_OF, MEDIAN_FROM = 10.0, 20, 3

ADVICE = {
    "collapse": "lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another mining)",
    "explosion": "lower --learning_rate, add --clip_norm or --warm_up_epochs",
}

Samples = Sequence[Mapping[str, Any]]


def collapse(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what in a sample shows a collapsed embedding, against the best of earlier ones; empty: nothing.

    The variance is below a tenth of its highest so far, or is that of a point; or the effective rank is below a quarter
    of its highest so far, or of C - 1 where that is less: images of C classes, each drawn together to a point, as
    training wants them, still span C - 1 directions.

    Args:
        sample: With `variance`, `effective_rank` and `classes`, the number of classes in the batch.
        earlier: The samples before.
    """
    variance, rank = sample["variance"], sample["effective_rank"]
    if variance < POINT:
        return f"the embeddings of a batch have a variance of {variance:.1e}: they are one point"
    if not earlier:
        return ""
    widest = max(earlier, key=lambda other: other["variance"])
    if variance < VARIANCE_SHARE * widest["variance"]:
        return (
            f"the embeddings of a batch have a variance of {variance:.2g}, after {widest['variance']:.2g} at step "
            f"{widest['step']}"
        )
    fullest = max(earlier, key=lambda other: other["effective_rank"])
    if rank < RANK_SHARE * min(fullest["effective_rank"], sample["classes"] - 1):
        return (
            f"the embeddings of a batch fill {rank:.1f} directions (effective rank), after "
            f"{fullest['effective_rank']:.1f} at step {fullest['step']}"
        )
    return ""


def explosion(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what of a sample says that a gradient has exploded; empty: nothing.

    The norm of a part's gradient is above ten times the median of the last 20 samples, and higher than in any of them:
    where a loss is often 0, and its median with it, a batch that is not is no explosion.

    Args:
        sample: With `gradient_norm`, by part.
        earlier: The samples before; fewer than three are not enough.
    """
    last = earlier[-MEDIAN_OF:]
    if len(last) < MEDIAN_FROM:
        return ""
    parts = []
    for part, norm in sample["gradient_norm"].items():
        norms = [other["gradient_norm"].get(part, norm) for other in last]
        median = float(np.median(norms))
        if norm > EXPLOSION * median and norm > max(norms):
            parts.append(f"the gradient norm of the {part} is {norm:.3g}, {median:.3g} in the median of {len(norms)}")
    return " and ".join(parts)


def new_alarms(sample: dict[str, Any], earlier: Samples) -> list[dict[str, Any]]:
    """Return the alarms that a sample raises; notes in the sample under `alarms` which kinds hold.

    What held at the sample before is not raised again.

    Args:
        sample: What `collapse` and `explosion` read, with its `step`.
        earlier: The samples before, each with `alarms`.
    """
    seen = {"collapse": collapse(sample, earlier), "explosion": explosion(sample, earlier)}
    sample["alarms"] = [kind for kind, words in seen.items() if words]
    before = earlier[-1] if earlier else {"alarms": [], "step": None}
    since = "at the first look" if before["step"] is None else f"well at step {before['step']}"
    return [
        {
            "kind": kind,
            "step": sample["step"],
            "line": f"{kind} at step {sample['step']} ({since}): {seen[kind]}; {ADVICE[kind]}",
        }
        for kind in sample["alarms"]
        if kind not in before["alarms"]
    ]


@dataclasses.dataclass
class Watcher:
    """What a run is watched by, in the process that writes its folder; it changes nothing of the training.

    Args:
        experiment: The settings: how often it looks.
        parts: The objects of the run, its learner built.
        folder: Its folder.
        samples: What was seen so far.
        alarms: Those that were raised so far.
    """

    experiment: Experiment
    parts: Components
    folder: RunFolder
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    alarms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _stream: Iterator[tuple[np.ndarray, np.ndarray]] | None = None
    _sampler: GradientSampler | None = None
    _too_large: bool = False

    def resume(self, step: int) -> None:
        """Take up what was seen before this step; what came of steps that are made again comes again."""
        if self.folder.watch.is_file():
            before = read_json(self.folder.watch, {"samples": list, "alarms": list})
            self.samples = [sample for sample in before["samples"] if sample["step"] < step]
            self.alarms = [alarm for alarm in before["alarms"] if alarm["step"] < step]

    def is_due(self, step: int) -> bool:
        """Whether the batch of this step, from 0, is to be looked at: never the first."""
        every = self.experiment.watch_every
        return every > 0 and step > 0 and step % every == 0

    def look(self, step: int, writer: Any) -> None:
        """Look at the batch that the next step will learn from, and print the alarms that it raises.

        Args:
            step: How many steps have been made.
            writer: TensorBoard's.
        """
        if self._too_large:
            return
        if self._stream is None:
            self._stream = sampled_batches(self.experiment.seed, self.parts, step, self.experiment.watch_every)
        if self._sampler is None:
            self._sampler = GradientSampler(self.parts.learner)
        images, labels = next(self._stream)
        try:
            found = self._sampler(images, labels)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, tf.errors.ResourceExhaustedError):
                raise
            logging.warning("a look at a batch does not fit the memory: the run continues unwatched")
            self._too_large = True
            return
        embeddings = found.embeddings
        if not np.isfinite(embeddings).all():
            return  # the step itself will raise
        d_pos, d_neg = pair_distances(embeddings, labels, self.parts.learner.positives)
        sample: dict[str, Any] = {
            "step": step,
            "terms": found.terms,
            "gradient_norm": found.norms,
            "gradient_share": dict(zip(found.terms, gradient_shares(found.gram).tolist(), strict=True)),
            **spread(embeddings),
            "classes": len(np.unique(labels, axis=0)),
            "images": len(labels),
            "d_pos": float(d_pos.mean()) if len(d_pos) else None,
            "d_neg": float(d_neg.mean()) if len(d_neg) else None,
        }
        new = new_alarms(sample, self.samples)
        for alarm in new:
            logging.warning("%s", alarm["line"])
        self.samples.append(sample)
        self.alarms += new
        about = {"every": self.experiment.watch_every, "samples": self.samples, "alarms": self.alarms}
        write_json(self.folder.watch, about)
        with writer.as_default(step=step):
            for name in ("terms", "gradient_norm", "gradient_share"):
                for part, value in sample[name].items():
                    tf.summary.scalar(f"watch/{name}/{part}", value)
            for name in ("variance", "effective_rank", "participation_ratio"):
                tf.summary.scalar(f"watch/{name}", sample[name])
            for name, values in (("d_pos", d_pos), ("d_neg", d_neg)):
                if len(values):
                    tf.summary.histogram(f"watch/{name}", values)
            writer.flush()

    def forget_batches(self) -> None:
        """Drop the batches that were made ahead."""
        self._stream = None


def sampled_batches(
    seed: int, parts: Components, first_step: int, every: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what is looked at of a step and of every so-manieth after it: one device's share, if its memory takes it.

    Args:
        seed: Of the run.
        parts: The objects of the run.
        first_step: The step.
        every: How many steps further the next one is.
    """
    whole, most = parts.sampler.batch_size, parts.learner.gradient_cache or parts.sampler.batch_size
    devices = parts.strategy.num_replicas_in_sync
    count = next(count for count in range(devices, whole + 1) if whole % count == 0 and whole // count <= most)
    images, share = parts.splits.train, Share(parts.sampler, 0, count)
    batches = training_batches(images, share, parts.train_view, seed=seed, first_step=first_step, every=every)
    yield from own_threads(batches).as_numpy_iterator()


def logger_of(path: str) -> list[keras.callbacks.Callback]:
    """Return the Keras callback that logs a run, as a list of it; empty without a path.

    Args:
        path: What makes it, by its import path, such as `my_logging.start`; modules of the working folder are found.

    Raises:
        UserError: It cannot be imported or called, or makes something else.
    """
    if not path:
        return []
    module, _, name = path.rpartition(".")
    sys.path.append(os.getcwd())
    # Whatever the module of a user, or a server that is not there, raises.
    with user_errors(Exception, f"--log_to={path}: {REASON}", named=True):
        callback = getattr(importlib.import_module(module), name)()
    if not isinstance(callback, keras.callbacks.Callback):
        raise UserError(f"--log_to={path} makes a {type(callback).__name__}, not a keras.callbacks.Callback")
    return [callback]

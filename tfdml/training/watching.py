"""Looks at a batch every so many steps: gradients by part and term, and how far embeddings spread.

What it sees is written for TensorBoard and `watch.json`. A collapse of the embeddings raises an
alarm. Other libraries, Weights & Biases and MLflow, receive the numbers of each epoch.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml.data.pipeline import own_threads, training_batches
from tfdml.data.sampling import Share
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io.files import flat, read_json, write_json
from tfdml.models import MetricLearner
from tfdml.registry import check_allowed, import_allowed
from tfdml.training.build import Components


class GradientProbe:
    """Measures batches by a learner as it stands, on one device.

    The loss is a function of the values of the learner's variables: what a step would change, such
    as moving statistics and random states, is dropped. Losses that layers add by `add_loss` are not
    among the terms.

    Args:
        learner: A built learner.

    Example:
        >>> images, labels = next(iter(batches))
        >>> values, embeddings = GradientProbe(learner)(images, labels)
        >>> sorted(values["gradient_norm"])
        ['backbone', 'objectives', 'projection']
    """

    def __init__(self, learner: MetricLearner):
        self._learner = learner
        self._variables = [list(learner.trainable_variables), list(learner.non_trainable_variables)]
        index_by_id = {id(variable): index for index, variable in enumerate(self._variables[0])}
        self._row_sampled = {index_by_id[weight] for weight in learner.row_sampled_weight_ids}
        #: The indices of each part's variables.
        self._parts: dict[str, list[int]] = {}
        for part, members in learner.parts().items():
            if members:
                self._parts[part] = [index_by_id[id(variable)] for variable in members]
        self._measure: Callable = self._grams if learner.run_eagerly else _compiled(self._grams)

    def __call__(self, images: Any, labels: Any) -> tuple[dict[str, dict[str, float]], np.ndarray]:
        """Measure a batch.

        Args:
            images: (B, H, W, 3).
            labels: (B,) integers.

        Returns:
            By name, `terms`, what each objective adds to the loss: its value times its weight;
            `gradient_norm`, by part, of the gradient of the loss before any clipping; and
            `gradient_share`, of each term. The (B, d) embeddings.
        """
        values = [list(map(_value, group)) for group in self._variables]
        # Whatever the training is shared out over, this is the work of one device.
        batch = keras.tree.map_structure(np.asarray, images), np.asarray(labels).astype(np.int32)
        terms, embeddings, grams = self._measure(*values, *batch)
        grams = {part: np.asarray(gram, np.float64) for part, gram in grams.items()}
        of_embedder = [gram for part, gram in grams.items() if part != "objectives"]
        shares = gradient_shares(np.sum(of_embedder, axis=0))
        norms = {part: float(np.sqrt(max(gram.sum(), 0.0))) for part, gram in grams.items()}
        names = [objective.name for objective in self._learner.objectives]
        values_of_terms = np.asarray(terms, np.float64).tolist()
        sample = {
            "terms": dict(zip(names, values_of_terms, strict=True)),
            "gradient_norm": norms,
            "gradient_share": dict(zip(names, shares.tolist(), strict=True)),
        }
        return sample, np.asarray(embeddings)

    def _grams(self, trained, constants, images, labels):
        """Return the weighted terms (T,), the embeddings, and by part the (T, T) products of the
        terms' gradients."""
        terms, embeddings, gradients = _gradients(
            lambda values: self._terms(values, constants, images, labels),
            trained,
            self._row_sampled,
        )
        grams = {part: _gram(gradients, indices) for part, indices in self._parts.items()}
        return terms, embeddings, grams

    def _terms(self, trained, constants, images, labels):
        """Return the weighted terms (T,), and the embeddings."""
        learner = self._learner
        mapping = list(zip(itertools.chain(*self._variables), [*trained, *constants], strict=True))
        with keras.StatelessScope(mapping, initialize_variables=False):
            representations = learner.represent_labeled(
                learner(images, training=True), labels, training=True
            )
            terms = [
                objective.weight * objective.term(representations, labels, training=True).value
                for objective in learner.objectives
            ]
        return ops.stack(terms), ops.cast(representations["embedding"], "float32")


def _gram(gradients: list[list], indices: list[int]) -> Any:
    """Return the (T, T) products of the terms' gradients by some of the variables."""
    rows = []
    for gradient in gradients:
        products = [_product(gradient, other, indices) for other in gradients]
        rows.append(ops.stack(products))
    return ops.stack(rows)


def _product(gradient: list, other: list, indices: list[int]) -> Any:
    total = 0
    for index in indices:
        factors = ops.cast(gradient[index], "float32"), ops.cast(other[index], "float32")
        total = total + ops.sum(factors[0] * factors[1])
    return total


def _gradients(
    function: Callable[[Any], Any], x: list, row_sampled: set[int]
) -> tuple[Any, Any, list[list]]:
    """Return the values (T,) of a function at x, what it returns besides, and the gradient of each
    value.

    On TensorFlow a gradient is that of the rows alone at the indices in `row_sampled`, and a scalar
    0 where there is none.
    """
    if keras.backend.backend() == "jax":
        import jax

        values, backward, others = jax.vjp(function, x, has_aux=True)
        directions = jax.numpy.eye(len(values), dtype=values.dtype)
        return values, others, [backward(direction)[0] for direction in directions]
    x = [tf.identity(value) for value in x]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        values, others = function(x)
        terms = tf.unstack(values)
    gradients = []
    for term in terms:
        parts = enumerate(tape.gradient(term, x))
        # On JAX a gradient is never of some rows alone.
        gradients.append([_dense(part, place in row_sampled) for place, part in parts])
    return values, others, gradients


def _dense(gradient: Any, is_row_sampled: bool) -> tf.Tensor:
    """Return a gradient as a tensor: the rows alone of a variable of which rows are sampled, and 0
    where there is none."""
    if gradient is None:
        return tf.convert_to_tensor(0.0)
    return tf.convert_to_tensor(gradient.values if is_row_sampled else gradient)


def _compiled(function: Callable) -> Callable:
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return tf.function(function, autograph=False)


def _value(variable: Any):
    """Return what a variable holds."""
    if keras.backend.backend() == "jax":
        value = variable.value
        return np.asarray(value if value.is_fully_addressable else value.addressable_data(0))
    return tf.convert_to_tensor(variable.value)


def spread(embeddings: np.ndarray) -> dict[str, float]:
    """How far embeddings spread, and over how many directions.

    With the eigenvalues l_1 .. l_d of their covariance and p_i = l_i / sum_j l_j:

        variance = sum_i l_i
        effective_rank = exp(-sum_i p_i ln p_i)

    The rank lies between 1 and min(B - 1, d). Of unit vectors the variance is at most 1, and half
    the mean squared distance of two of them (drawn with replacement).

    Args:
        embeddings: (B, d).

    Returns:
        Both by name; of images that all have one embedding, variance 0 and rank 1.

    Example:
        >>> spread(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))["effective_rank"]
        2.0

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    x = np.asarray(embeddings, np.float64)
    # The singular values of the centered rows are those of the covariance, of the smaller of both
    # sizes.
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 / len(x)
    total = float(values.sum())
    # Rounding of float32 is no direction.
    if total <= 1e-12:
        return {"variance": total, "effective_rank": 1.0}
    shares = values[values > 0] / total
    return {"variance": total, "effective_rank": float(np.exp(-(shares * np.log(shares)).sum()))}


def gradient_shares(gram: np.ndarray) -> np.ndarray:
    """Return the share of each term's gradient g_t in their sum g: <g_t, g> / |g|^2, which add up
    to 1.

    A share below 0 pulls against the sum of all.

    Args:
        gram: (T, T) <g_s, g_t>.

    Returns:
        (T,); 0 where the gradients cancel out.
    """
    total = float(gram.sum())
    return gram.sum(axis=1) / total if total > 0 else np.zeros(len(gram))


# A batch whose variance has fallen to this share of its highest, or its effective rank to that
# one's, has collapsed.
_COLLAPSED = {"variance": 0.1, "effective_rank": 0.25}
_ADVICE = (
    "lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another "
    "mining)"
)


def collapse(sample: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> str:
    """Return what in a sample shows a collapsed embedding, against the best of earlier ones; empty:
    nothing.

    The variance is below a tenth of its highest so far; or the effective rank is below a quarter
    of its highest so far, or of C - 1 where that is less: images of C classes, each drawn together
    to a point, as training wants them, still span C - 1 directions.

    Args:
        sample: With `variance`, `effective_rank` and `classes`, the number of classes in the batch.
        earlier: The samples before.
    """
    most = {"variance": np.inf, "effective_rank": sample["classes"] - 1}
    for name, share in _COLLAPSED.items() if earlier else ():
        best = max(earlier, key=lambda other: other[name])
        if sample[name] < share * min(best[name], most[name]):
            measure = name.replace("_", " ")
            return (
                f"the {measure} of a batch is {sample[name]:.2g}, after {best[name]:.3g} at step "
                f"{best['step']}"
            )
    return ""


@dataclasses.dataclass
class Watcher:
    """What a run is watched by, in the process that writes its folder; it changes nothing of the
    training.

    Args:
        components: The objects of the run, its learner built.
        samples: What was seen so far.
        alarms: Those that were raised so far.
    """

    components: Components
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    alarms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _stream: Iterator[tuple[np.ndarray, np.ndarray]] | None = None
    _probe: GradientProbe | None = None
    _too_large: bool = False

    def resume(self, step: int) -> None:
        """Take up what was seen before this step; what came of steps that are made again comes
        again."""
        if self.components.folder.watch.is_file():
            before = read_json(self.components.folder.watch, {"samples": list, "alarms": list})
            self.samples = [sample for sample in before["samples"] if sample["step"] < step]
            self.alarms = [alarm for alarm in before["alarms"] if alarm["step"] < step]

    @property
    def every(self) -> int:
        """After how many steps a batch is looked at: whole executions."""
        steps = self.components.learner.steps_per_execution
        return -(-self.components.experiment.watch_every // steps) * steps

    def is_due(self, step: int) -> bool:
        """Whether the batch of this step, from 0, is to be looked at: never the first."""
        return self.every > 0 and step > 0 and step % self.every == 0 and not self._too_large

    def look(self, step: int, writer: Any) -> None:
        """Look at the batch that the next step will learn from, and print the alarms that it
        raises.

        Args:
            step: How many steps have been made.
            writer: TensorBoard's.
        """
        self._stream = self._stream or sampled_batches(self.components, step, self.every)
        self._probe = self._probe or GradientProbe(self.components.learner)
        images, labels = next(self._stream)
        try:
            values, embeddings = self._probe(images, labels)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(
                error, tf.errors.ResourceExhaustedError
            ):
                raise
            logging.warning(
                "a look at a batch does not fit the memory: the run continues unwatched"
            )
            self._too_large = True
            return
        if not np.isfinite(embeddings).all():
            return  # the step itself will raise
        classes = len(np.unique(labels, axis=0))
        sample = {
            "step": step,
            **values,
            **spread(embeddings),
            "classes": classes,
            "images": len(labels),
        }
        reason = collapse(sample, self.samples)
        sample["collapsed"] = bool(reason)
        if reason and not self.samples[-1]["collapsed"]:  # what lasts is not raised again
            line = (
                f"collapse at step {step} (well at step {self.samples[-1]['step']}): {reason}; "
                f"{_ADVICE}"
            )
            logging.warning("%s", line)
            self.alarms.append({"step": step, "line": line})
        self.samples.append(sample)
        content = {"every": self.every, "samples": self.samples, "alarms": self.alarms}
        write_json(self.components.folder.watch, content)
        shown = {name: sample[name] for name in (*values, "variance", "effective_rank")}
        with writer.as_default(step=step):
            for name, value in flat(shown).items():
                tf.summary.scalar(f"watch/{name}", value)
            writer.flush()

    def forget_batches(self) -> None:
        """Drop the batches that were made ahead."""
        self._stream = None


def sampled_batches(
    components: Components, first_step: int, every: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what is looked at of a step and of every so many after it: one device's share, if
    its memory takes it.

    Args:
        components: The objects of the run.
        first_step: The step.
        every: After how many steps the next.
    """
    batch_size = components.sampler.batch_size
    most = components.learner.gradient_cache or batch_size
    devices = components.strategy.num_replicas_in_sync
    count = next(
        count
        for count in range(devices, batch_size + 1)
        if batch_size % count == 0 and batch_size // count <= most
    )
    batches = training_batches(
        components.splits.train,
        Share(components.sampler, 0, count),
        components.train_view,
        seed=components.experiment.seed,
        first_step=first_step,
        every=every,
    )
    yield from own_threads(batches).as_numpy_iterator()


def check_logger(path: str) -> None:
    """Refuse what makes a logger where the user has not named its module; see `logger_of`.

    Raises:
        UserError: As `check_allowed`.
    """
    if path:
        check_allowed(path.rpartition(".")[0], log_to=path)


def logger_of(path: str) -> list[keras.callbacks.Callback]:
    """Return the Keras callback that logs a run, as a list of it; empty without a path.

    Args:
        path: What makes it, by its import path, such as `my_logging.start`; modules of the working
            folder are found.

    Raises:
        UserError: As `import_allowed`; or it cannot be called, or makes something else.
    """
    if not path:
        return []
    module, _, name = path.rpartition(".")
    functions = import_allowed(module, log_to=path)
    # Whatever the module of a user, or a server that is not there, raises.
    with user_errors(Exception, ERROR_TEXT, named=True, log_to=path):
        callback = getattr(functions, name)()
    if not isinstance(callback, keras.callbacks.Callback):
        raise UserError(
            f"makes a {type(callback).__name__}, not a keras.callbacks.Callback", log_to=path
        )
    return [callback]

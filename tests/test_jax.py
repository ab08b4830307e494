"""The backend-free part on Keras's JAX backend, in a process of its own, against the same references."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import references, references_moments
from tests.losses.references import draw_probabilities
from tests.marks import JAX
from tests.mathematics import assert_close, finite_differences, random_batch
from tests.objectives import references_classes, references_memory, references_rankmi
from tfdml.layers.moments import MODES

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


def kernel_mean(gram):
    return lambda labels, x, tau: float(np.mean(gram(x, tau)))


def similarity(gram):
    return lambda labels, x, tau: references.joint_representation_similarity(labels, [gram(x, tau)])


def joint_norms(kind):
    return lambda y, x, t: references_classes.joint_norms(y, [references.polynomial(x, degree=2)], kind)


def density(**options):
    targets = 0.5 if options else [0.5] * 3
    return lambda y, x, t: references_classes.density_adaptivity(y, x, targets, [1.0, 2.0, 0.5], **options)


def with_memory():
    """The images are compared with the batch as it is: no gradient reaches them as references."""
    memory = list(enumerate(np.eye(4)[:3]))

    def value(y, x, t, batch):
        return references_memory.reference(references_memory.contrastive, y, x, memory, compared=batch)

    return value


def of_clean_labels():
    prism = references_memory.PrismReference(0.3, 5, 5, 0)

    def value(y, x, t, batch):
        prism.memory, prism.thresholds = list(enumerate(np.eye(4)[:3])), []
        memory = list(prism.memory)
        kept = prism.step(y, x)
        assert not kept.all()
        contrastive = references_memory.contrastive
        return references_memory.reference(contrastive, y[kept], x[kept], memory, compared=batch[kept])

    return value


GRAMS = {
    "gaussian": (lambda x, tau: references.gaussian(x, tau=tau), references.squared_distance),
    "laplace": (lambda x, tau: references.laplace(x, tau=tau), references.absolute_distance),
    "polynomial": (lambda x, tau: references.polynomial(x, degree=3), None),
    "exponential": (lambda x, tau: references.exponential(x), None),
}
# Name -> (input, reference(labels, x, tau), distance whose mean is tau).
CASES = {
    "contrastive": ("embedding", lambda y, x, t: references.contrastive(y, x, 1.3, "euclidean"), None),
    "contrastive sum": ("embedding", lambda y, x, t: references.contrastive(y, x, reduction="sum"), None),
    "binomial": ("embedding", lambda y, x, t: references.binomial(y, x), None),
    "am": ("class", lambda y, x, t: references.am_softmax(y, x), None),
    "norm": ("class", lambda y, x, t: references.norm_softmax(y, x), None),
    "energy": ("embedding", lambda y, x, t: references_classes.energy_confusion(y, x), None),
    "energy of mean": ("embedding", lambda y, x, t: references_classes.energy_confusion(y, x, "log_of_mean"), None),
    "density": ("embedding", density(), None),
    "density hard": ("embedding", density(constraint="hard"), None),
    "entropy": ("embedding", lambda y, x, t: references_classes.entropy_of_pairs(y, x), None),
    "nearest": ("embedding", lambda y, x, t: references_classes.nearest_entropy(y, x), None),
    "orthogonal": ("embedding", lambda y, x, t: references_classes.global_orthogonal(y, x), None),
    "joint mmd": ("embedding", joint_norms("mmd"), None),
    "joint intra": ("embedding", joint_norms("intra"), None),
    "intra class": ("embedding", lambda y, x, t: references.intra_class_penalty(y, x, "mean"), None),
    "metric": ("pooled", lambda y, x, t: references.contrastive(y, x), None),
    "cross batch": ("embedding", with_memory(), None),
    "prism": ("embedding", of_clean_labels(), None),
    **{name: ("embedding", kernel_mean(gram), spread) for name, (gram, spread) in GRAMS.items()},
    **{f"jrs {name}": ("pooled", similarity(gram), spread) for name, (gram, spread) in GRAMS.items()},
}


WITH_MEMORY = ("cross batch", "prism")


@pytest.fixture(scope="module")
def inputs():
    labels, embedding = random_batch(3, 6, 3, 4)
    pooled = random_batch(4, 6, 1, 5, unit=False)[1] / 2
    classes = np.random.default_rng(5).uniform(-1, 1, (6, 3)).astype("float32")
    return {"labels": labels, "embedding": embedding, "pooled": pooled, "class": classes}


@pytest.fixture(scope="module")
def outputs(inputs, tmp_path_factory):
    folder, root = tmp_path_factory.mktemp("jax"), pathlib.Path(__file__).resolve().parents[1]
    np.savez(folder / "in.npz", **inputs)
    command = [sys.executable, "-m", "tests.jax_values", str(folder / "in.npz"), str(folder / "out.npz")]
    result = subprocess.run(command, cwd=root, env=JAX, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(np.load(folder / "out.npz"))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_references(inputs, outputs, name):
    by, reference, spread = CASES[name]
    labels, x = inputs["labels"], inputs[by]
    tau = references.bandwidth(x, kind=spread) if spread else None
    batch = {"batch": x} if name in WITH_MEMORY else {}
    assert_close(outputs[f"{name}|value"], reference(labels, x, tau, **batch))
    (expected,) = finite_differences(lambda e: reference(labels, e, tau, **batch), x)
    assert_close(outputs[f"{name}|gradient"], expected)


def test_learned_margin_equals_its_reference_without_a_gradient_through_its_negatives(inputs, outputs):
    labels, x = inputs["labels"], inputs["embedding"]
    drawn = draw_probabilities(labels, x)

    def reference(e):
        return references_classes.learned_margin(labels, e, [0.8] * 3, probabilities=drawn)

    assert_close(outputs["learned margin|value"], reference(x))
    assert_close(outputs["learned margin|gradient"], finite_differences(reference, x)[0])


def test_products_of_pairs_are_of_full_precision_on_any_device(outputs):
    rounded = {key: int(value) for key, value in outputs.items() if key.endswith("|rounded")}
    # The projections of HORDE are as large as a network's layers, and rounded as these are.
    assert {key for key, count in rounded.items() if count} == {f"horde {mode}|rounded" for mode in MODES}


@pytest.mark.parametrize("mode", ["cascaded", "independent", "random"])
def test_moments_equal_their_reference(inputs, outputs, mode):
    weights = [outputs[key] for key in sorted(outputs) if key.startswith(f"horde {mode}|weight")]
    # W' is (300, 2), A_k (300, 3).
    matrices, dense = ([weight for weight in weights if weight.shape[1] == size] for size in (2, 3))
    assert (len(matrices), len(dense)) == (4 if mode == "cascaded" else 9, 3)

    def reference(x):
        vectors = references_moments.embeddings(x.reshape(-1, 2, 2), matrices, dense, (2, 3, 4), mode)
        return references_moments.moment_loss(inputs["labels"], vectors, references.binomial)

    x = inputs["embedding"]
    assert_close(outputs[f"horde {mode}|value"], reference(x))
    assert_close(outputs[f"horde {mode}|gradient"], finite_differences(reference, x)[0])


def test_rank_mi_equals_its_reference_in_both_phases(inputs, outputs):
    labels, x = inputs["labels"], inputs["embedding"]
    weights = [outputs[f"rank mi|weight {i}"] for i in range(6)]
    beta = float(outputs["rank mi root|value"])
    assert abs(references_rankmi.statistic(weights, beta)) < 1e-5
    assert not np.any(outputs["rank mi root|gradient"])

    def v_of(weights):
        return lambda d: references_rankmi.statistic(weights, d)

    def embedders(e):
        return references_rankmi.violating_pairs(labels, e, v_of(weights), beta, 0.5)

    def statistics(*weights):
        return references_rankmi.all_pairs(labels, x, v_of(weights))

    assert_close(outputs["rank mi|value"], embedders(x))
    assert_close(outputs["rank mi|gradient"], finite_differences(embedders, x)[0])
    assert_close(outputs["rank mi statistics|value"], statistics(*weights))
    for i, expected in enumerate(finite_differences(statistics, *weights)):
        assert_close(outputs[f"rank mi statistics|gradient {i}"], expected, floor=1e-7)


def test_v_trains_within_the_steps_of_the_learner(outputs):
    assert outputs["rank mi changes"].all()
    bounds = outputs["rank mi bound"]
    assert np.all(np.isfinite(bounds))
    assert bounds[-5:].max() > bounds[:5].max()


def test_degenerate_batches_are_finite(outputs):
    degenerate = {key: value for key, value in outputs.items() if key.startswith(("identical", "zero"))}
    # Value and gradient of 17 losses and objectives, on identical and on zero vectors.
    assert len(degenerate) == 2 * 17 * 2
    for key, value in degenerate.items():
        assert np.all(np.isfinite(value)), key


def test_labels_that_floats_merge_make_the_loss_nan(inputs, outputs):
    merged = {name: value for name, value in outputs.items() if name.startswith("merged|")}
    assert len(merged) == 6
    assert np.isnan([*merged.values()]).all()
    assert_close(outputs["whole floats"], references.contrastive(inputs["labels"], inputs["embedding"]))


def test_large_ids_do_not_collide_although_jax_has_no_64_bit_integers(inputs, outputs):
    labels, x = np.array([0, 1, 0, 2, 3, 2]), inputs["embedding"]
    assert_close(outputs["far|loss"], references.contrastive(labels, x))
    assert_close(outputs["far|jrs"], references.joint_representation_similarity(labels, [references.gaussian(x)]))


def test_learner_trains(outputs):
    assert np.all(np.isfinite(outputs["fit"]))
    assert outputs["fit"][-1] < 0.9 * outputs["fit"][0]


def test_an_ensemble_trains(outputs):
    assert np.all(np.isfinite(outputs["ensemble fit"]))
    assert outputs["ensemble fit"][-1] < outputs["ensemble fit"][0]
    assert_close(np.linalg.norm(outputs["ensemble embedding"], axis=1), np.ones(12))
    assert_close(outputs["ensemble heads"].reshape(12, 6) / np.sqrt(3), outputs["ensemble embedding"])

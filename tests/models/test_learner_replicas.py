"""The gradient of a learner on several replicas is that of one device on the whole batch."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fork_server import fork_server
from tests.mathematics import assert_close
from tests.models.networks import SIZE, coloured_batch, jrd, tiny_embedder
from tests.played_replicas import play
from tfdml import kernels, losses, objectives, pairwise, replicas
from tfdml.models import MetricLearner

TERMS = {
    "pairs": lambda: losses.ContrastiveLoss(1.3, "euclidean"),
    "pairs sum": lambda: losses.BinomialDevianceLoss(reduction="sum"),
    "joint": jrd,
    "proxy anchor": lambda: objectives.ProxyLoss(losses.ProxyAnchorLoss(4.0), 3),
    "proxies sum": lambda: objectives.ProxyLoss(losses.AMSoftmaxLoss(reduction="sum"), 3, weight=0.1),
    "moments": lambda: objectives.HighOrderMomentLoss(losses.ContrastiveLoss(1.3, "euclidean"), 3, 8),
    "moments of classes": lambda: objectives.HighOrderMomentLoss(
        losses.AMSoftmaxLoss(), 3, 8, num_classes=3, weight=0.1
    ),
    "energy": lambda: objectives.EnergyConfusion(),
    "density": lambda: objectives.DensityAdaptivity(3, reference_density=[1.0, 2.0, 0.5]),
    "spread": lambda: [objectives.EntropySpread(), objectives.GlobalOrthogonal()],
    "joint norms": lambda: objectives.JointMMD(("pooled", "embedding")),
    "density hard sum": lambda: objectives.DensityAdaptivity(
        3, reference_density=[1.0, 2.0, 0.5], constraint="hard", reduction="sum"
    ),
    "energy of mean": lambda: objectives.EnergyConfusion("log_of_mean"),
    "nearest": lambda: objectives.EntropySpread("nearest"),
    "intra class": lambda: objectives.IntraClassPenalty(),
    "kernels of largest values": lambda: objectives.JointRepresentationSimilarity(
        "embedding", kernels.Polynomial(2), weight=0.1
    ),
    "rank mi": lambda: objectives.RankMI(1.5, hidden=8, depth=1, negatives="all"),
    "learned margin": lambda: objectives.LearnedMargin(3, beta=0.6, nu=0.1),
}


def learner(terms):
    keras.utils.set_random_seed(3)
    model = MetricLearner(tiny_embedder(batch_norm="statistics"), terms)
    # As the layers of a user may be: it counts once, however many replicas there are.
    model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    model.build((None, SIZE, SIZE, 3))
    return model


def step(model, sizes):
    """The loss, summed over replicas as Keras does, its gradients, and the value of each term over the images."""
    labels, x = coloured_batch()
    reported = []

    def loss(y, images):
        model.reset_metrics()
        value = model.compute_loss(images, y, model(images, training=True), training=True)
        reported.append([float(tracker.result()) for tracker in model.term_trackers])
        return value

    with tf.GradientTape() as tape:
        if len(sizes) == 1:
            total = loss(tf.constant(labels), tf.constant(x))
        else:
            parts = zip(tf.split(tf.constant(labels), sizes), tf.split(tf.constant(x), sizes), strict=True)
            total = tf.add_n(play(loss, *parts))
    gradients = tape.gradient(total, [variable.value for variable in model.trainable_variables])
    return total.numpy(), gradients, np.average(reported[-len(sizes) :], axis=0, weights=sizes)


# A loss over the pairs of all replicas, and one whose images each replica averages by itself.
QUICK = ("pairs", "joint")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TERMS]
)
def test_the_gradient_is_that_of_one_device(name):
    model = learner(TERMS[name]())
    value, expected, terms = step(model, [12])
    largest = max(np.abs(gradient).max() for gradient in expected if gradient is not None)
    assert largest > 1e-3
    _, gradients, _ = step(model, [7, 5])
    for actual, wanted in zip(gradients, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert_close(actual, wanted, 1e-5, floor=1e-6 * largest)
    total, _, reported = step(model, [6, 6])
    assert_close(total, value)
    assert_close(reported, terms)


def test_what_objectives_observe_is_that_of_the_global_batch():
    terms = [objectives.DensityAdaptivity(3, constraint=None), objectives.EnergyConfusion()]
    model = learner(terms)
    step(model, [12])
    expected = {name: float(tracker.result()) for name, tracker in model.observation_trackers.items()}
    assert set(expected) == {"density_adaptivity_d_avg", "density_adaptivity_target", "energy_confusion_energy"}
    step(model, [7, 5])
    for name, tracker in model.observation_trackers.items():
        assert_close(tracker.result(), expected[name])
        assert expected[name] > 0


def test_the_statistics_see_the_pairs_of_all_replicas():
    model = learner([objectives.RankMI(1.5, hidden=8, depth=1), losses.ContrastiveLoss()])
    model.compile(keras.optimizers.SGD(0.1))
    model._set_phase("statistics")
    value, expected, _ = step(model, [12])
    total, gradients, _ = step(model, [7, 5])
    assert_close(total, value)
    some = False
    for actual, wanted in zip(gradients, expected, strict=True):
        if wanted is not None:
            some = some or np.any(wanted)
            assert_close(actual, wanted, 1e-5, floor=1e-7)
    assert some


WITHOUT_PAIRS = {"proxy anchor", "moments of classes", "proxies sum"}
WHOLE = {"rank mi", "joint norms", "kernels of largest values", "energy of mean", "spread"}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", sorted(set(TERMS) - WHOLE - WITHOUT_PAIRS))
def test_a_replica_makes_no_more_than_its_own_rows(name, monkeypatch):
    model = learner(TERMS[name]())
    made = []

    def watched(function):
        def watching(*args, **kwargs):
            result = function(*args, **kwargs)
            made.append(tuple(result.shape))
            return result

        return watching

    for function in ("dot_products", "squared_distances", "absolute_distances", "together"):
        monkeypatch.setattr(pairwise, function, watched(getattr(pairwise, function)))
    step(model, [7, 5])
    # In the first round replicas take themselves for the others; distances within a replica are logged.
    assert {(7, 12), (5, 12)} <= set(made)
    assert (12, 12) not in made


@pytest.mark.parametrize("case", ["metric cached/10", "auto/10"])
def test_two_logical_devices_make_the_step_of_one(case, tmp_path):
    """By chunks, and with weights that are measured: what replicas played in one process cannot do."""
    path = str(tmp_path / "steps.npz")
    script = f"from tests import distribution_steps\ndistribution_steps.quick({path!r}, {case!r})\n"
    assert fork_server().run_script(script).returncode == 0
    arrays = dict(np.load(path))
    one = {key: value for key, value in arrays.items() if "|1|" in key}
    assert any("ratios" in key and np.all(value[-1].max(axis=-1) > 0) for key, value in one.items()) == ("auto" in case)
    largest = max(np.abs(value).max() for key, value in one.items() if "ratios" not in key)
    assert largest > 1e-3
    for key, expected in one.items():
        assert_close(arrays[key.replace("|1|", "|2|")], expected, 1e-5, floor=1e-6 * largest)


def test_a_replica_without_images_is_refused():
    model = learner(losses.ContrastiveLoss())
    x = coloured_batch()[1]
    refused = pytest.raises(ValueError, match=r"fewer images than there are replicas .*drop_remainder=True")
    with refused, replicas.explaining_empty_replicas():
        play(model, [x[:2]], [x[:0]])
    with pytest.raises(ValueError, match="first batch cannot be split"), replicas.explaining_empty_replicas():
        tf.add_n([tf.zeros((2, 1)), tf.zeros((1, 1))])
    with pytest.raises(ZeroDivisionError), replicas.explaining_empty_replicas():
        raise ZeroDivisionError


def test_fit_explains_a_replica_without_images(monkeypatch):
    def fail(*arguments, **options):
        raise tf.errors.InvalidArgumentError(None, None, "a batch has fewer images than there are replicas")

    monkeypatch.setattr(keras.Model, "fit", fail)
    with pytest.raises(ValueError, match="drop_remainder=True"):
        learner(losses.ContrastiveLoss()).fit(*reversed(coloured_batch()))


UNEVEN = """
import keras, numpy as np, tensorflow as tf
from tests.models.networks import coloured_batch, tiny_embedder
from tfdml import losses
from tfdml.models import MetricLearner
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
labels, x = coloured_batch()
for size in (3, 7, 5):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        learner = MetricLearner(tiny_embedder(), [losses.ContrastiveLoss()])
        learner.compile("sgd")
    try:
        learner.fit(x[:size], labels[:size], batch_size=4, verbose=0)
        print(size, "trained")
    except ValueError as error:
        print(size, error)
"""


@pytest.mark.slow
def test_uneven_batches_train_on_two_devices_or_are_refused():
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", UNEVEN]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("3 the first batch cannot be split equally among the replicas")
    assert lines[1] == "7 trained"
    assert lines[2].startswith("5 a batch has fewer images than there are replicas")

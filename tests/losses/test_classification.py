import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.losses.references import arc_face
from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tfdml import losses
from tfdml.layers import CosineProxies

CASES = {
    "am": (losses.AMSoftmaxLoss(), lambda y, c: references.am_softmax(y, c)),
    "am cars": (losses.AMSoftmaxLoss(20.0, 0.05), lambda y, c: references.am_softmax(y, c, 20.0, 0.05)),
    "am steep": (losses.AMSoftmaxLoss(64.0, 0.35), lambda y, c: references.am_softmax(y, c, 64.0, 0.35)),
    "am sum": (losses.AMSoftmaxLoss(reduction="sum"), lambda y, c: references.am_softmax(y, c, reduction="sum")),
    "norm": (losses.NormSoftmaxLoss(), lambda y, c: references.norm_softmax(y, c)),
    "norm flat": (losses.NormSoftmaxLoss(1.0), lambda y, c: references.norm_softmax(y, c, 1.0)),
    "norm sum": (losses.NormSoftmaxLoss(reduction="sum"), lambda y, c: references.norm_softmax(y, c, reduction="sum")),
}


def smoothed(reference, share):
    """The cross-entropy with a target that is partly even: (1 - e) L_y + (e / C) sum over classes of L as their own.

    Of logits that hold the margin of the label, L_c - L_y = z_y - z_c.
    """

    def value(labels, cosines, logits_of):
        found = []
        for label, row in zip(labels, cosines, strict=True):
            own = reference([label], [row])
            logits = logits_of(int(label), row)
            every = [own + logits[int(label)] - logit for logit in logits]
            found.append((1 - share) * own + share * sum(every) / len(every))
        return np.mean(found)

    return value


def am_logits(label, row):
    return [20.0 * (float(c) - 0.1 * (j == label)) for j, c in enumerate(row)]


def arc_logits(label, row):
    """Of margin 0.5."""
    angle = np.arccos(float(row[label]))
    own = np.cos(angle + 0.5) if angle + 0.5 < np.pi else float(row[label]) - 0.5 * np.sin(0.5)
    return [64.0 * (own if j == label else float(c)) for j, c in enumerate(row)]


CASES |= {
    "am smoothed": (
        losses.AMSoftmaxLoss(label_smoothing=0.2),
        lambda y, c: smoothed(references.am_softmax, 0.2)(y, c, am_logits),
    ),
    "norm smoothed": (
        losses.NormSoftmaxLoss(label_smoothing=0.1),
        lambda y, c: smoothed(references.norm_softmax, 0.1)(y, c, lambda _, row: [20.0 * float(x) for x in row]),
    ),
}
every_case = pytest.mark.parametrize(("loss", "reference"), CASES.values(), ids=CASES)


def similarities(seed, size, classes):
    generator = np.random.default_rng(seed)
    return generator.integers(0, classes, size), generator.uniform(-1, 1, (size, classes)).astype("float32")


@every_case
@pytest.mark.parametrize(("size", "classes"), [(1, 2), (1, 1), (8, 3), (5, 40), (30, 2)])
def test_equals_the_formula(loss, reference, size, classes):
    for seed in range(4):
        labels, cosines = similarities(seed, size, classes)
        assert_close(loss(labels, cosines), reference(labels, cosines), floor=1e-12)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_equals_finite_differences(loss, reference, mode):
    labels, cosines = similarities(3, 6, 5)
    value, (gradient,) = value_and_gradients(lambda c: loss(labels, c), cosines, mode=mode)
    (expected,) = finite_differences(lambda c: reference(labels, c), cosines)
    assert_close(value, reference(labels, cosines))
    assert_close(gradient, expected)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_degenerate_similarities_are_finite(loss, reference, mode):
    labels, ones = tf.constant([0, 1, 2, 0]), np.ones((4, 3))

    def run(cosines):
        with tf.GradientTape() as tape:
            tape.watch(cosines)
            value = loss(labels, cosines)
        return value, tape.gradient(value, cosines)

    run = run if mode == "eager" else tf.function(run, jit_compile=True, autograph=False)
    for cosines in (0 * ones, ones, -ones, np.eye(4)[:, :3]):
        value, gradient = run(tf.constant(cosines, tf.float32))
        assert_close(value, reference(labels, cosines), floor=1e-12)
        assert_close(gradient, finite_differences(lambda c: reference(labels, c), cosines)[0], floor=1e-6)


@every_case
def test_one_class_teaches_nothing(loss, reference):
    value, (gradient,) = value_and_gradients(lambda c: loss([0, 0], c), [[0.3], [-0.8]])
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 1)))


@pytest.mark.parametrize("make", [losses.ArcFaceLoss, losses.SubCenterArcFaceLoss])
def test_a_smoothed_angular_margin(make):
    for seed in range(4):
        labels, cosines = similarities(seed, 6, 5)
        expected = smoothed(arc_face, 0.1)(labels, cosines, arc_logits)
        assert_close(make(label_smoothing=0.1)(labels, cosines), expected)


def test_smoothing_is_keras_s_own():
    labels, cosines = similarities(2, 6, 5)
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.3)
    expected = keras_loss(np.eye(5)[labels], 20.0 * cosines)
    assert_close(losses.NormSoftmaxLoss(label_smoothing=0.3)(labels, cosines), expected)


def test_confident_images_keep_their_digits():
    labels, cosines = [0], np.array([[1.0, -1.0, -1.0]], "float32")
    assert_close(losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines), references.am_softmax(labels, cosines, 20.0, 0.0))
    assert losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines) > 0


@every_case
@pytest.mark.parametrize("label", [3, -1, 2**40])
def test_label_without_a_proxy_cannot_pass_unseen(loss, reference, label):
    values = np.asarray(loss.call([0, label], np.zeros((2, 3), "float32")))
    assert np.isfinite(values[0])
    assert np.isnan(values[1])


def test_many_classes():
    labels, cosines = similarities(0, 120, 11318)
    value, (gradient,) = value_and_gradients(lambda c: losses.AMSoftmaxLoss()(labels, c), cosines)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


def test_worked_examples_of_the_docstrings():
    cosines = np.array([[0.9, 0.1, -0.3]], "float32")
    assert_close(losses.AMSoftmaxLoss(20.0, 0.1)([0], cosines), references.am_softmax([0], cosines))
    assert_close(losses.NormSoftmaxLoss(1.0)([0], [[0.0, 0.0]]), np.log(2))


@pytest.mark.parametrize("rows", [(4,), (4, 3, 2)])
def test_something_other_than_class_similarities_is_refused(rows):
    with pytest.raises(ValueError, match="expected class similarities"):
        losses.AMSoftmaxLoss()([0, 1, 2, 0], np.zeros(rows, "float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.AMSoftmaxLoss(scale=0), "scale must be positive"),
        (lambda: losses.AMSoftmaxLoss(margin=-0.1), "margin must be at least 0 and at most 2"),
        (lambda: losses.NormSoftmaxLoss(scale=-1), "scale must be positive"),
        (lambda: losses.AMSoftmaxLoss(label_smoothing=1.0), "label_smoothing must be below 1"),
        (lambda: losses.ArcFaceLoss(label_smoothing=-0.1), "label_smoothing must be at least 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradient_through_cosines_reaches_embeddings_and_proxies():
    labels, x = random_batch(2, 6, 4, 5, unit=False)
    layer = CosineProxies(4)
    layer.build((None, 5))

    def value(embeddings, proxies):
        layer_proxies = proxies / np.linalg.norm(proxies, axis=1, keepdims=True)
        return references.am_softmax(labels, references.class_similarities(embeddings, layer_proxies))

    proxies = keras.ops.convert_to_numpy(layer.proxies)
    with tf.GradientTape() as tape:
        embeddings = tf.constant(x)
        tape.watch(embeddings)
        loss = losses.AMSoftmaxLoss()(labels, layer(embeddings))
    gradients = tape.gradient(loss, [embeddings, layer.proxies.value])
    assert_close(loss, value(x, proxies))
    for actual, expected in zip(gradients, finite_differences(value, x, proxies), strict=True):
        assert_close(actual, expected)

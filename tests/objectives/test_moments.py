import keras
import pytest
import tensorflow as tf

from tests.marks import first_quick
from tests.mathematics import assert_close, random_batch
from tests.models.networks import SIZE, colored_batch, config_of, tiny_embedder, values
from tests.objectives.cases import moments
from tfdml import losses
from tfdml.models import MetricLearner
from tfdml.objectives import HighOrderMomentLoss, MetricLoss


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_maps_do_not_overflow(dtype):
    labels, x = random_batch(0, 6, 3, 4, unit=False)
    case = moments("pairs", orders=6)
    features = tf.cast(500 * x.reshape(6, 2, 1, 2), dtype)
    expected = case.reference(labels, tf.cast(features, "float32").numpy(), *values(case.weights))
    assert_close(case.objective({"feature_map": features}, labels), expected)


def learner(objectives, **options):
    keras.utils.set_random_seed(0)
    built = MetricLearner(tiny_embedder(batch_norm="train", **options), objectives)
    built.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
    built.build((None, SIZE, SIZE, 3))
    return built


def terms(**options):
    base = losses.ContrastiveLoss()
    return [MetricLoss(base), HighOrderMomentLoss(base, orders=4, dim=300, weight=0.5, name="horde", **options)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", first_quick([{}, {"mode": "random"}, {"reduce_to": 4, "mode": "independent"}]), ids=str
)
def test_learner_is_saved_and_loaded_whole(tmp_path, options):
    labels, x = colored_batch()
    model = learner([*terms(**options), HighOrderMomentLoss(losses.AMSoftmaxLoss(), 3, 16, num_classes=3, name="am")])
    model.fit(x, labels, batch_size=len(x), verbose=0)
    model.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert config_of(again) == config_of(model)
    expected = model.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True)
    for name, value in again.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True).items():
        assert value == pytest.approx(expected[name], rel=1e-6), name

"""The share of a training step outside the backbone, for each method at its paper's settings.

    python -m benchmarks.step_shares
    python -m benchmarks.step_shares --backbone="mobilenetv2(alpha=1.0)" --batch=120

What comes after the backbone is measured on a feature map of its shape, for a whole batch: pooling, projection, losses
and objectives, backwards to the feature map, and the update of their weights. The backbone's own step, forwards,
backwards and its update, is measured on two batches that fit the memory, and continued in a straight line to the whole
batch: its time is an affine function of the number of images.
"""

import statistics
import time

import keras
import numpy as np

from benchmarks.learners import Factor, FeatureEmbedder
from tfdml import backbones
from tfdml.models import MetricLearner
from tfdml.training.expressions import parse_call
from tfdml.training.terms import build_objectives
from tools.numbers import Results, command_line

# Dimensions and batches of the papers: images of a class.
IDEAS = {
    "AMSoftmax alone": (512, 2, "am_softmax(scale=20, margin=0.05)"),
    "JRD": (512, 2, "am_softmax(scale=20, margin=0.05) + jrs"),
    "ECAML": (512, 2, "binomial_deviance(reduction=sum) + 0.13 * ecaml(reduction=sum)"),
    "DML-DA": (128, 10, "contrastive(margin=1, distance=sqeuclidean, reduction=sum) + 10 * density(constraint=none)"),
    "RankMI, mean of its two steps": (128, 5, "rank_mi(margin=0.2, statistics_steps=1)"),
    "HORDE, 5 orders of 8,192": (512, 8, "binomial_deviance + horde(loss=binomial_deviance, orders=5, dim=8192)"),
}


def seconds_of(step, rounds, warm_up=2):
    """The median time of a call."""
    times = []
    for turn in range(warm_up + rounds):
        began = time.perf_counter()
        step()
        if turn >= warm_up:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def backbone_seconds(model, size, batch, rounds):
    """A step of the backbone by itself: a loss that takes no time, on its pooled output."""
    pooled = keras.layers.GlobalAveragePooling2D()(model.output)
    alone = keras.Model(model.input, pooled)
    alone.compile(keras.optimizers.Adam(1e-5), loss=lambda y, x: keras.ops.mean(x * y, axis=1))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(batch, size, size, 3)).astype("float32")
    target = rng.normal(size=(batch, pooled.shape[-1])).astype("float32")
    return seconds_of(lambda: alone.train_on_batch(images, target), rounds)


def forward_seconds(model, size, batch, rounds):
    """A pass forward of the backbone, which is all that a step of RankMI's statistics takes of it."""
    images = np.random.default_rng(0).normal(size=(batch, size, size, 3)).astype("float32")
    return seconds_of(lambda: model.predict_on_batch(images), rounds)


def extrapolate(measure, batches, batch):
    """Return the time at `batch`, on the line through those at two smaller batches."""
    less, more = (measure(size) for size in batches)
    return more + (more - less) * (batch - batches[1]) / (batches[1] - batches[0])


def rest_seconds(shape, batch, dim, per_class, objectives, rounds):
    """A step of all that comes after the backbone; the mean of two, of which the second may be of the statistics."""
    keras.utils.set_random_seed(0)
    batch -= batch % per_class
    x = np.maximum(np.random.default_rng(0).normal(size=(batch, *shape)), 0).astype("float32")
    labels = np.arange(batch) // per_class
    learner = MetricLearner(FeatureEmbedder(shape, dim, Factor()), build_objectives(objectives, batch // per_class))
    learner.build((None, *shape))
    learner.compile(keras.optimizers.Adam(1e-4))

    def two_steps():
        learner.train_on_batch(x, labels)
        learner.train_on_batch(x, labels)

    return seconds_of(two_steps, rounds) / 2


def main():
    """Print a row for each method."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", default="resnet50", help="backbone, with its options")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=120, help="images of a step")
    parser.add_argument("--measured", type=int, nargs=2, default=(12, 24), help="two batches of the backbone alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="methods, by parts of their names")
    options = parser.parse_args()
    call = parse_call(options.backbone, "--backbone")
    model = backbones.resolve(call.name, options.size, **call.arguments).model
    shape = tuple(model.output.shape[1:])

    def of_the_backbone(function):
        return extrapolate(
            lambda size: function(model, options.size, size, options.rounds), options.measured, options.batch
        )

    whole, forward = of_the_backbone(backbone_seconds), of_the_backbone(forward_seconds)
    print(
        f"{options.backbone}, {options.batch} images of {options.size} px: {whole:.2f} s, forward alone {forward:.2f} s"
    )
    columns = ("outside the backbone, ms a step", "share of the step")
    row = Results(options.json).table("table", "regularizer", *columns)
    for name, (dim, per_class, objectives) in IDEAS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        rest = rest_seconds(shape, options.batch, dim, per_class, objectives, options.rounds)
        backbone = (whole + forward) / 2 if "two steps" in name else whole
        row(name, f"{1000 * rest:,.0f}", f"{100 * rest / (rest + backbone):.1f} %")
        keras.backend.clear_session()


if __name__ == "__main__":
    main()

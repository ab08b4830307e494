"""Where the time of a step goes, by operation of the network.

    python -m benchmarks.layers --json=docs/numbers/layers.json
    ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.layers

Forward and backward of MobileNetV2 alpha 0.35 with frozen BatchNorm, 100 images of 96 px, random
weights, on one thread. The times of operations are those of TensorFlow's profiler, medians of
--rounds steps. `apart` has padding, convolution and BatchNorm as layers of their own, `joined` is
what an embedder does. GFLOPS and GB/s are those of `joined`, next to what a product of matrices and
a sum of two arrays reach here. A multiplication and an addition are two operations; what is moved
is what the operation reads and writes at least.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdml
from tfdml.models import Embedder
from tfdml.models.normalization import keep_statistics
from tfdml.workarounds import layers_of
from tools.numbers import Results, command_line

IMAGES, SIZE = 100, 96
FLOAT = 4
# Of operations by their types; the first part that is in a type's name decides.
KINDS = {
    "DepthwiseConv2dNativeBackpropInput": "depthwise, gradient of inputs",
    "DepthwiseConv2dNativeBackpropFilter": "depthwise, gradient of kernels",
    "DepthwiseConv2dNative": "depthwise",
    "Conv2DBackpropInput": "convolution, gradient of inputs",
    "Conv2DBackpropFilter": "convolution, gradient of kernels",
    "Conv2D": "convolution",
    "Relu6Grad": "ReLU6, gradient",
    "Relu6": "ReLU6",
    "Pad": "zeros",
    "Slice": "zeros, gradient",
}
REST = "additions, products, sums and the rest"


def make_step(joined):
    """Return a function of a batch that makes all gradients, and its embedder."""
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("mobilenetv2", SIZE, None, alpha=0.35)
    embedder = Embedder(backbone, 128, image_size=SIZE)
    embedder.build((None, SIZE, SIZE, 3))
    if not joined:
        keep_statistics(embedder.backbone, "frozen", {x.name for x in layers_of(embedder)})

    @tf.function(autograph=False)
    def step(images):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(embedder(images, training=True)[:, 0])
        return tape.gradient(value, embedder.trainable_variables)

    return step, embedder


def profile(step, images):
    """Return the milliseconds of each kind of operation in a step, and of all."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        step(images)[0].numpy()
        tf.profiler.experimental.stop()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    times = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                # The type of an operation; other events have none.
                operation = plane.event_metadata[event.metadata_id].display_name
                if operation:
                    times[kind_of(operation)] += event.duration_ps / 1e9
    times["together"] = sum(times.values())
    return times


def kind_of(operation):
    """Return the kind of an operation by the name of its type."""
    for part, kind in KINDS.items():
        if part in operation:
            return kind
    return REST


def work_of(embedder):
    """Return the operations and the bytes of each kind in a step, in billions."""
    work = collections.defaultdict(lambda: np.zeros(2))
    is_first = True
    for layer in layers_of(embedder.backbone):
        if isinstance(layer, keras.layers.DepthwiseConv2D):
            kind, products = "depthwise", np.prod(layer.kernel_size)
        elif isinstance(layer, keras.layers.Conv2D):
            kind, products = "convolution", np.prod(layer.kernel.shape[:-1])
        else:
            continue
        read = IMAGES * np.prod(layer.input.shape[1:])
        written = IMAGES * np.prod(layer.output.shape[1:])
        amounts = np.array([2 * written * products, FLOAT * (read + written)]) / 1e9
        for name in KINDS.values():
            # Nothing needs the gradient of the images.
            is_needed = not (is_first and name == "convolution, gradient of inputs")
            if name.startswith(kind) and is_needed:
                work[name] += amounts
        is_first = False
    return work


def limits():
    """Return the GFLOPS of a product of matrices, and the GB/s of a sum of two arrays."""
    square, array = tf.random.normal((2048, 2048)), tf.random.normal((2**25,))
    reached = []
    for function, amount in (
        (lambda: tf.linalg.matmul(square, square), 2 * 2048**3),
        (lambda: array + array, 2 * FLOAT * 2**25),
    ):
        seconds = []
        for _ in range(6):
            started = time.process_time()
            function().numpy()
            seconds.append(time.process_time() - started)
        reached.append(amount / min(seconds) / 1e9)
    return reached


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    images = tf.random.uniform((IMAGES, SIZE, SIZE, 3), 0, 255, seed=0)
    steps = {"apart": make_step(False), "joined": make_step(True)}
    rounds = collections.defaultdict(list)
    for number in range(arguments.rounds + 2):
        for name, (step, _) in steps.items():
            times = profile(step, images)
            if number > 1:
                rounds[name].append(times)
    work = work_of(steps["joined"][1])
    columns = ["operations", "ms, apart", "ms, joined", "GFLOPS", "GB/s"]
    add = Results(arguments.json).table("operations", *columns)
    for kind in (*KINDS.values(), REST, "together"):
        apart, joined = (
            statistics.median(times[kind] for times in rounds[name]) for name in ("apart", "joined")
        )
        reached = ["", ""]
        if kind in work:
            reached = [f"{amount / joined * 1000:.1f}" for amount in work[kind]]
        add(kind, f"{apart:.1f}", f"{joined:.1f}", *reached)
    products, sums = limits()
    add("product of matrices", "", "", f"{products:.1f}", "")
    add("sum of two arrays", "", "", "", f"{sums:.1f}")


if __name__ == "__main__":
    main()

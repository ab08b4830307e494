"""Peak memory and time of a training step with high-order moments, streamed and not.

    python -m benchmarks.moments_memory
    python -m benchmarks.moments_memory --batch=8 --dim=1024 --steps=3

Each variant runs in a process of its own, on CPU: one step is the gradient of HORDE over the contrastive loss, to the
feature map and to all weights, and an update by Adam. By default the paper's sizes: 40 images of 256 pixels, whose map
is 8 x 8 x 1024, 8,192 moments, orders 2 to 5. Reported is the largest resident memory of the process (`ru_maxrss`),
and what it exceeds that of the baseline by: the same step, with the same weights, on two images of a single position.

- naive: plain Keras operations, which keep the products of all orders at all positions for the gradient;
- streamed: `tfdml.layers.HighOrderMoments`;
- K maps: the arithmetic, K x batch x positions x dim x 4 bytes.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from tools.numbers import Results, command_line

VARIANTS = ("baseline", "naive", "streamed")


def step_function(arguments, naive):
    """A compiled training step, and the feature maps and labels to call it on."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdml import layers, losses, objectives

    def average_of_whole_maps(self, features):
        moments, product = {}, self.dim**-0.5
        for k, weight in enumerate(self.projections, start=1):
            product = product * keras.ops.matmul(features, keras.ops.transpose(weight))
            if k in self.orders:
                moments[k] = keras.ops.mean(product, axis=(1, 2))
        return moments

    if naive:
        layers.HighOrderMoments.call = average_of_whole_maps
    keras.utils.set_random_seed(0)
    objective = objectives.HighOrderMomentLoss(
        losses.ContrastiveLoss(0.5, "cosine"), orders=arguments.orders, dim=arguments.dim, embedding_dim=512
    )
    shape = (arguments.batch, arguments.size, arguments.size, arguments.channels)
    maps = np.abs(np.random.default_rng(0).normal(size=shape)).astype("float32")
    objective.build_from({"feature_map": shape})
    objective.built = True
    optimizer = keras.optimizers.Adam(1e-5)
    optimizer.build(objective.trainable_variables)

    variables = objective.trainable_variables

    @tf.function(jit_compile=arguments.jit)
    def step(maps, labels):
        with tf.GradientTape() as tape:
            tape.watch(maps)
            loss = objective({"feature_map": maps}, labels)
        of_maps, *of_weights = tape.gradient(loss, [maps, *(variable.value for variable in variables)])
        optimizer.apply(of_weights, variables)
        return loss, tf.reduce_sum(tf.abs(of_maps))

    return step, tf.constant(maps), tf.range(arguments.batch) % 5


def measure(arguments):
    """Run one variant in this process: its loss, seconds a step, and peak memory in MB."""
    if arguments.variant == "baseline":
        arguments.batch, arguments.size = 2, 1
    step, maps, labels = step_function(arguments, naive=arguments.variant == "naive")
    seconds = []
    for _ in range(1 + arguments.steps):
        start = time.perf_counter()
        loss, of_maps = (float(value) for value in step(maps, labels))
        seconds.append(time.perf_counter() - start)
    # Kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"loss": loss, "of_maps": of_maps, "seconds": statistics.median(seconds[1:]), "peak_mb": peak}


def in_own_process(variant, argv):
    """Return what `measure` returns, from a new process without a GPU."""
    command = [sys.executable, "-m", "benchmarks.moments_memory", *argv, f"--variant={variant}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    """Measure every variant, and print a table."""
    parser = command_line(__doc__)
    for name, default in (("batch", 40), ("size", 8), ("channels", 1024), ("dim", 8192), ("orders", 5), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--jit", action="store_true", help="compile the step with XLA")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    measurements = {variant: in_own_process(variant, sys.argv[1:]) for variant in VARIANTS}
    base = measurements["baseline"]["peak_mb"]
    maps = arguments.orders * arguments.batch * arguments.size**2 * arguments.dim * 4 / 1e6
    row = Results(arguments.json).table("table", "", "peak, MB", "above the baseline, MB", "seconds a step")
    for variant in VARIANTS:
        peak = measurements[variant]["peak_mb"]
        row(variant, f"{peak:,.0f}", f"{peak - base:,.0f}", f"{measurements[variant]['seconds']:.2f}")
    row("the K maps", "", f"{maps:,.0f}", "")
    difference = abs(measurements["streamed"]["loss"] - measurements["naive"]["loss"])
    naive = measurements["naive"]["loss"]
    print(f"loss after {arguments.steps + 1} steps: naive {naive:.6f}, differs by {difference:.1e}")


if __name__ == "__main__":
    main()

"""Peak memory and time of a training step: a large batch, plain and by chunks, and a small batch.

    python -m benchmarks.gradient_cache
    python -m benchmarks.gradient_cache --backbone="conv4(width=8)" --size=32 --small=16 --large=128 --steps=2

Each variant runs in a process of its own, on the GPU if there is one: steps of the whole learner, embedder, loss over
pairs and update by Adam, on random images. Reported are the largest memory (of a GPU what TensorFlow had allocated,
else the resident memory of the process), its excess over that of a step on two images, and the median time of a step
after the first:

- small: a plain step on --small images;
- large: a plain step on --large images. Where it does not fit, or by the line through the small batch and one of twice
  its size would not, its memory is that of the line, and the table marks it;
- cached: a step on --large images in chunks of --small (`MetricLearner(..., gradient_cache=)`).

A batch of B needs its images and the B x B matrices of its pairs, whatever the chunk. The last line prints their size.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from tools.numbers import Results, command_line

VARIANTS = ("base", "small", "double", "large", "cached")


def sizes(arguments, variant):
    """Images of a step, and of a chunk."""
    return {
        "base": (2, 0),
        "small": (arguments.small, 0),
        "double": (2 * arguments.small, 0),
        "large": (arguments.large, 0),
        "cached": (arguments.large, arguments.small),
    }[variant]


def measure(arguments):
    """Run one variant in this process: seconds a step and peak memory in MB."""
    import numpy as np
    import tensorflow as tf

    from benchmarks.learners import make_learner
    from tfdml.training.terms import build_objectives

    batch, chunk = sizes(arguments, arguments.variant)
    learner = make_learner(arguments.backbone, arguments.size, build_objectives(arguments.objectives, 100))
    learner.gradient_cache = chunk
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (batch, arguments.size, arguments.size, 3), np.uint8)
    labels = np.arange(batch) // 2 % 100
    seconds = []
    for _ in range(1 + arguments.steps):
        start = time.perf_counter()
        learner.train_on_batch(images, labels)
        seconds.append(time.perf_counter() - start)
    if tf.config.list_physical_devices("GPU"):
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    else:
        # Kilobytes on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": statistics.median(seconds[1:]), "peak_mb": peak / 1e6}


def in_own_process(variant, argv):
    """Return what `measure` returns, from a new process; None where that process fails."""
    command = [sys.executable, "-m", "benchmarks.gradient_cache", *argv, f"--variant={variant}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False, text=True)
    if result.returncode and variant != "large":
        sys.exit(f"the variant {variant} ended with status {result.returncode}")
    return None if result.returncode else json.loads(result.stdout.splitlines()[-1])


def memory_there_is():
    """Return the memory of the GPU in MB if there is one (its process fails when it is full), else the free memory."""
    from tfdml.memory import free_memory
    from tfdml.training.distributed import on_gpu

    return float("inf") if on_gpu() else free_memory() / 1e6


def main():
    """Measure every variant, and print a table."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", default="mobilenetv2(alpha=0.35)", help="as in tfdml train")
    parser.add_argument("--objectives", default="contrastive", help="as in tfdml train")
    for name, default in (("size", 96), ("small", 128), ("large", 4096), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", choices=VARIANTS, help="run this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    measurements = {variant: in_own_process(variant, sys.argv[1:]) for variant in ("base", "small", "double")}
    slope = (measurements["double"]["peak_mb"] - measurements["small"]["peak_mb"]) / arguments.small
    line = measurements["small"]["peak_mb"] + slope * (arguments.large - arguments.small)
    fits = line < memory_there_is()
    measurements["large"] = in_own_process("large", sys.argv[1:]) if fits else None
    if not fits:
        print("the large step does not fit; its memory is on the line through two smaller ones")
    measurements["large"] = measurements["large"] or {"peak_mb": line}
    measurements["cached"] = in_own_process("cached", sys.argv[1:])
    columns = ("images", "peak memory", "above a step on two images", "time an image")
    row = Results(arguments.json).table("table", "", *columns)
    for variant in VARIANTS[1:]:
        batch, chunk = sizes(arguments, variant)
        peak, seconds = measurements[variant]["peak_mb"], measurements[variant].get("seconds")
        memory = f"{peak:,.0f} MB", f"{peak - measurements['base']['peak_mb']:,.0f} MB"
        name = f"in chunks of {chunk}" if chunk else "plain"
        row(name, f"{batch:,}", *memory, f"{1e3 * seconds / batch:.1f} ms" if seconds else "")
    images, matrix = arguments.large * arguments.size**2 * 3 / 1e6, 4 * arguments.large**2 / 1e6
    print(f"\nof which for {arguments.large} images: {images:.0f} MB images, {matrix:.0f} MB each matrix of pairs")


if __name__ == "__main__":
    main()

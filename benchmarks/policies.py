"""The augmentation policies' speed: images per second, and per second of CPU time, by two threads of `tf.data`.

python -m benchmarks.policies
python -m benchmarks.policies --policies rand_augment color_jitter --size 96
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from tfdml.data import Policy, Step, policies
from tools.numbers import Results, command_line


def measure(name: str, size: int, seconds: float) -> tuple[float, float]:
    """Images per second, and per second of CPU time."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, size, size, 3), dtype=np.uint8)
    policy, keys = Policy((Step(name),)), rng.integers(0, 2**46, (64, 2))
    batches = tf.data.Dataset.from_tensor_slices((images, keys)).repeat().map(policy, num_parallel_calls=2).batch(32)
    stream = iter(batches)
    next(stream)
    started, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < seconds:
        next(stream)
        count += 32
    return count / (time.perf_counter() - started), count / (time.process_time() - cpu)


def main() -> None:
    """Prints a table."""
    parser = command_line(__doc__)
    parser.add_argument("--policies", nargs="+", choices=policies.names(), default=policies.names())
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each policy")
    arguments = parser.parse_args()
    row = Results(arguments.json).table("table", "policy", "images / s", "images / CPU s")
    for name in arguments.policies:
        rate, cpu_rate = measure(name, arguments.size, arguments.seconds)
        row(name, f"{rate:,.0f}", f"{cpu_rate:,.0f}")


if __name__ == "__main__":
    main()

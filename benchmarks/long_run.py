"""Memory, threads and open files of a long training, and the files of its run folder.

    python -m benchmarks.long_run --run_dir=runs/long --picture=docs/images/long_run.svg --flagfile=FILE [flags]

Starts `tfdml train` with the flags of a run, and `FLAGS`: more epochs than it can end, an evaluation of held-out
classes after each, checkpoints between, watching. Every --every seconds it sums over the processes of the
run. After --minutes it sends SIGTERM, as a queue does. Growth is the slope of a line through the second half,
with its standard error.
"""

import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil

from tools.numbers import Results, command_line

FLAGS = ("--epochs=1000", "--evaluate_every=1", "--checkpoint_steps=50", "--watch_every=20")
KINDS = {
    "checkpoints": "checkpoints/*",
    "event files": "tensorboard/**/*",
    "metrics.jsonl": "metrics.jsonl",
    "watch.json": "watch.json",
}


def sample(process, folder):
    """Return what a process and its children hold, and what is in a folder, by name."""
    memory = files = threads = proportional = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            with one.oneshot():
                full = one.memory_full_info()
                memory, proportional = memory + full.rss, proportional + full.pss
                files, threads = files + one.num_fds(), threads + one.num_threads()
        except psutil.Error:  # it has ended meanwhile
            continue
    sample_values = {"RSS, MB": memory / 1e6, "PSS, MB": proportional / 1e6, "open files": files, "threads": threads}
    for kind, pattern in KINDS.items():
        sizes = []
        for path in folder.glob(pattern):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # an older checkpoint
                continue
        sample_values[f"{kind}, files"], sample_values[f"{kind}, kB"] = len(sizes), sum(sizes) / 1e3
    return sample_values


def write_picture(path, minutes, samples):
    """Draw memory, open files and threads, and the files of the run folder."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
    of_run = [f"{kind}, kB" for kind in KINDS if kind != "checkpoints"]
    for axis, names in zip(axes, (["RSS, MB", "PSS, MB"], ["open files", "threads"], of_run), strict=True):
        for name in names:
            axis.plot(minutes, [one[name] for one in samples], label=name, linewidth=1)
        axis.set(xlabel="minutes", ylim=(0, None))
        axis.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def main():
    """Run, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two looks")
    parser.add_argument("--picture", default="", help="an SVG of all samples")
    parser.add_argument("--run_dir", required=True, help="the folder of the run")
    arguments, flags = parser.parse_known_args()
    words = [sys.executable, "-m", "tfdml", "train", *flags, *FLAGS, f"--run_dir={arguments.run_dir}"]
    process = psutil.Popen(words)
    start, minutes, samples = time.monotonic(), [], []
    while process.poll() is None and time.monotonic() < start + 60 * arguments.minutes:
        time.sleep(arguments.every)
        minutes.append((time.monotonic() - start) / 60)
        samples.append(sample(process, pathlib.Path(arguments.run_dir)))
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    results = Results(arguments.json)
    results.value("status", status)
    results.value("minutes", round(minutes[-1]))
    row = results.table("table", "of all processes", "first", "half way", "highest", "last", "growth in an hour")
    late = np.array(minutes) > minutes[-1] / 2
    for name in samples[0]:
        values = np.array([one[name] for one in samples])
        x, y = np.array(minutes)[late] / 60, values[late]
        (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
        growth = f"{round(slope):+,d} ± {covariance[0, 0] ** 0.5:,.0f}"
        row(name, *(f"{value:,.0f}" for value in (values[0], values[late][0], values.max(), values[-1])), growth)
    if arguments.picture:
        write_picture(arguments.picture, minutes, samples)


if __name__ == "__main__":
    main()

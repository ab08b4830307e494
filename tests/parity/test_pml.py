"""Our losses against pytorch-metric-learning itself: values and gradients, live. docs/parity.md has
the results."""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from tests.parity.pml_cases import CASES, MINERS, PROXIES, batches, proxies, rows
from tfdml import mining
from tfdml.pairs import Pairs

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = pathlib.Path(os.environ.get("TFDML_PML_PYTHON", ROOT / ".venv-pml" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="no pytorch-metric-learning here: make parity-pml"
    ),
]
BATCHES = batches()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Every case on every batch, of one process there: "index|batch|what"."""
    folder = tmp_path_factory.mktemp("pml")
    arrays = {
        f"{name}|labels": np.asarray(labels, "int64") for name, (labels, _) in BATCHES.items()
    }
    arrays |= {f"{name}|x": np.asarray(x, "float64") for name, (_, x) in BATCHES.items()}
    counts = {case.proxies for case in CASES.values()} - {0}
    arrays |= {
        f"{name}|proxies{k}": proxies(name, k).astype("float64") for name in BATCHES for k in counts
    }
    np.savez(folder / "batches.npz", **arrays)
    (folder / "cases.json").write_text(json.dumps(rows()))
    files = [str(folder / name) for name in ("cases.json", "batches.npz", "values.npz")]
    command = [str(PYTHON), str(ROOT / "tests" / "parity" / "pml_values.py"), *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(np.load(folder / "values.npz"))


def ours(case, batch):
    labels, x = BATCHES[batch]
    x, variables = tf.constant(x), []
    if case.proxies:
        objective = case.objective(PROXIES)
        objective.build({"embedding": tuple(x.shape)})
        objective.class_proxies.proxies.assign(proxies(batch, case.proxies))
        variables = [objective.class_proxies.proxies.value]
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = objective({"embedding": x}, labels) if case.proxies else case.ours(labels, x)
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(value, [x, *variables], unconnected_gradients=zero)
    names = ["gradient", "proxies"][: len(gradients)]
    return {"value": value.numpy(), **{n: g.numpy() for n, g in zip(names, gradients, strict=True)}}


def found(theirs, name, batch):
    index = [*CASES, *MINERS].index(name)
    start = f"{index}|{batch}|"
    return {
        key.removeprefix(start): value for key, value in theirs.items() if key.startswith(start)
    }


# What is 0 on a batch but for rounding, by the start of the loss's name: theirs is 1e-8 or less,
# and ours float32's.
VANISHING = {
    # Copies have one gradient, along the vector, which the normalization takes away; pairs of a dot
    # product cancel.
    ("", "all identical", "gradient"),
    # Every precision is 1: the loss is 0 at its minimum.
    ("fast ap", "no negative", "value"),
    ("fast ap", "no negative", "gradient"),
    ("fast ap", "duplicates in one class", "gradient"),
    # Cosines of a zero vector are 0 whatever the proxies are.
    ("proxy nca", "all zero", "proxies"),
    # log(1 + 1e-14) keeps one digit in float64, and all in our log1p.
    ("multi-similarity", "two images of two classes", "value"),
}


def agree(actual, expected, relative=2e-5):
    """To `relative` of the largest entry."""
    allowed = relative * np.max(np.abs(expected), initial=0.0)
    return (
        bool(np.all(np.isfinite(actual)))
        and np.max(np.abs(actual - expected), initial=0.0) <= allowed
    )


def vanishes(case, actual, expected, value):
    """Whether `case`, (name, batch, what), is known to be 0, and is 0 up to the rounding of terms
    that cancel."""
    known = any(case[0].startswith(start) and case[1:] == tuple(rest) for start, *rest in VANISHING)
    largest = np.max(np.abs(expected), initial=0.0)
    return (
        known
        and largest < 1e-7
        and np.max(np.abs(actual), initial=0.0) <= 1e-6 * max(1.0, np.abs(value))
    )


def known_to_differ(name, batch, theirs):
    """The differences that docs/parity.md names."""
    family = name.split(" ")[0]
    if "error" in theirs:
        assert family == "histogram", theirs
        return "index" in str(theirs["error"])
    if name.startswith(
        "generalized lifted"
    ):  # anchors without a positive or a negative count there
        return batch in ("no positive", "no negative")
    if name.startswith("tuplet margin"):  # the arc cosine of a cosine beyond 1, by rounding
        return not np.isfinite(theirs["gradient"]).all()
    no_loss = name.startswith("sup con") and batch in ("no negative",)
    return no_loss or (name.startswith("fast ap") and batch == "a zero vector")


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_theirs(name, theirs):
    """Value, gradient and gradient of the proxies, on every batch."""
    compared, differing = 0, []
    for batch in BATCHES:
        expected = found(theirs, name, batch)
        if not expected:
            continue
        if known_to_differ(name, batch, expected):
            differing.append((batch, expected))
            continue
        actual = ours(CASES[name], batch)
        for what, value in expected.items():
            mine = actual[what]
            if what == "gradient":
                # A zero vector's gradient is divided by 1e-12 there, and 0 here.
                rows = np.linalg.norm(BATCHES[batch][1], axis=1) > 0
                value, mine = value[rows], mine[rows]
                if name.startswith("angular"):
                    # Negatives are not normalized there: on unit vectors the tangents agree.
                    x = np.asarray(BATCHES[batch][1], "float64")[rows]
                    value = value - x * np.sum(x * value, axis=1, keepdims=True)
            case = (name, batch, what)
            holds = agree(mine, value) or vanishes(case, mine, value, expected["value"])
            assert holds, f"{batch}: {what}\n{mine}\n{value}"
            compared += 1
    assert compared >= 2
    for batch, expected in differing:
        actual = ours(CASES[name], batch)
        assert "error" in expected or not all(
            agree(actual[what], value) for what, value in expected.items()
        ), batch


def test_miners_keep_the_same_pairs_and_draw_with_the_same_probabilities(theirs):
    for batch in MINERS["pairs"].batches:
        labels, x = BATCHES[batch]
        kept = mining.multi_similarity_pairs(Pairs.of_batch(x, labels))
        for name in ("positives", "negatives"):
            np.testing.assert_array_equal(getattr(kept, name), found(theirs, "pairs", batch)[name])
    for batch in MINERS["weights"].batches:
        labels, x = BATCHES[batch]
        expected = found(theirs, "weights", batch)["weights"]
        drawn = np.all(
            np.isfinite(expected), axis=1
        )  # without a near negative there is no draw there
        assert np.any(drawn)
        assert agree(
            np.asarray(mining.negative_probabilities(Pairs.of_batch(x, labels)))[drawn],
            expected[drawn],
        )

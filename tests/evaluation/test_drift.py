"""Later queries compared with those of a calibration: what is seen, and how often in vain."""

import json

import numpy as np
import pytest

from tests.evaluation.test_calibration import images
from tfdml.errors import UserError
from tfdml.evaluation import Calibration, calibrate
from tfdml.evaluation.drift import Spread


class Source:
    """Made images of 90 classes: a gallery of 60, known queries of these, and two times 15 classes
    of strangers, one for the calibration and one for the weeks."""

    def __init__(self, seed=0):
        x, labels = images(seed, 90, 18, dim=16)
        part = np.arange(len(labels)) % 3
        in_gallery = labels < 60
        gallery = in_gallery & (part == 0)
        queries = (in_gallery & (part == 1)) | ((labels >= 60) & (labels < 75))
        self.gallery, self.gallery_labels = x[gallery], labels[gallery]
        sides = {"gallery": self.gallery, "gallery_labels": self.gallery_labels}
        self.calibration = calibrate(x[queries], labels[queries], fpir=0.05, **sides)
        self.known = x[in_gallery & (part == 2)]
        self.strangers = x[labels >= 75]
        self.share = self.calibration.basis.unknown / queries.sum()

    def week(self, seed, count=120, share=None):
        rng = np.random.default_rng(seed)
        unknown = rng.binomial(count, self.share if share is None else share)
        known = rng.choice(self.known, count - unknown, replace=False)
        return np.concatenate([known, rng.choice(self.strangers, unknown, replace=False)])

    def watch(self, week, **options):
        return self.calibration.watch(week, self.gallery, self.gallery_labels, **options)


@pytest.fixture(scope="module")
def source():
    return Source()


@pytest.mark.slow
def test_weeks_without_a_change_are_within_the_intervals(source):
    shifts = [source.watch(source.week(seed)).has_shifted for seed in range(200)]
    assert np.mean(shifts) <= 0.08


def test_a_row_is_what_it_is_called(source):
    week = source.week(0)
    drift = source.watch(week)
    refused, further, classes = drift.rows
    far = np.linalg.norm(week[:, None].astype(np.float64) - source.gallery[None], axis=2)
    accepted = far.min(axis=1) <= source.calibration.threshold
    assert refused.now == pytest.approx(1 - accepted.mean())
    # Five in a hundred strangers are accepted, and of the known as many as are near.
    baseline = source.calibration.baseline
    known, unknown = baseline.known, baseline.unknown
    total = known.count + unknown.count
    mean = (known.count * known.refused + unknown.count * unknown.refused) / total
    assert refused.baseline == pytest.approx(mean)
    assert further.baseline == pytest.approx(0.5, abs=1e-9)
    found = source.gallery_labels[far.argmin(axis=1)][accepted]
    assert drift.compared == drift.count == 120
    assert classes.now == pytest.approx(len(np.unique(found)) / 60)


@pytest.mark.parametrize("kind", ["strangers", "other images", "few classes"])
def test_a_change_is_seen(source, kind):
    week, names = source.week(1), []
    rng = np.random.default_rng(2)
    if kind == "strangers":
        week = source.week(1, share=0.8)
        names = ["refused, so unknown"]
    elif kind == "other images":  # noise on all
        week = week + 0.15 * rng.normal(size=week.shape).astype("float32")
        names = ["further from the gallery than before"]
    else:
        week = np.concatenate([source.known[:12]] * 10)
        names = ["classes that queries find"]
    shifted = [row.name for row in source.watch(week).rows if row.has_shifted]
    assert set(names) <= set(shifted)


def test_fewer_strangers_are_no_change_where_they_are_expected(source):
    week = source.week(3, share=0.05)
    assert source.watch(week).has_shifted
    assert not source.watch(week, unknown_share=0.05).has_shifted


def test_images_of_one_class_count_as_one_where_classes_are_known(source):
    rng = np.random.default_rng(0)
    week = np.repeat(source.week(4, count=24), 10, axis=0)
    week = week + 0.01 * rng.normal(size=week.shape).astype("float32")
    classes = np.repeat(np.arange(24), 10)
    drift = source.watch(week, classes=classes)
    assert drift.clusters == 24
    alone = source.watch(week)
    for row, narrow in zip(drift.rows[:2], alone.rows[:2], strict=True):
        assert row.high - row.low > narrow.high - narrow.low


def test_a_baseline_is_stored_and_read(source):
    text = json.dumps(source.calibration.to_dict())
    assert len(text) < 12_000
    read = Calibration.from_dict(json.loads(text))
    assert read.baseline == source.calibration.baseline
    week = source.week(0)
    sides = source.gallery, source.gallery_labels
    assert read.watch(week, *sides) == source.watch(week)


def test_what_cannot_be_compared_is_refused(source):
    x, labels = images(0, 12, 6)
    pairs = calibrate(x, labels, far=0.05)
    with pytest.raises(UserError, match="calibrate with fpir"):
        pairs.watch(x, x, labels)
    within = calibrate(x, labels, fpir=0.1)
    assert within.watch(x, x, labels).rows[0].baseline == within.baseline.known.refused
    with pytest.raises(UserError, match="has no unknown queries"):
        within.watch(x, x, labels, unknown_share=0.5)
    for other in (x[:-1], x[:, ::-1]):
        with pytest.raises(UserError, match="of another gallery"):
            within.watch(x, other, labels[: len(other)])
    with pytest.raises(UserError, match="neither of them 0"):
        within.watch(x[:0], x, labels)
    before = {**within.to_dict()}
    del before["baseline"]
    with pytest.raises(UserError, match="measure it again with tfdml evaluate --target"):
        Calibration.from_dict(before)


def test_the_correlation_within_classes_is_that_of_the_analysis_of_variance():
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(2000), 5)
    values = 0.5 * rng.normal(size=2000)[classes] + rng.normal(size=10_000)
    assert Spread.of(values, classes).correlation == pytest.approx(0.2, abs=0.02)
    assert Spread.of(values, np.arange(10_000)).correlation == 0.0
    assert Spread.of(np.ones(10), np.arange(10) // 5).correlation == 0.0

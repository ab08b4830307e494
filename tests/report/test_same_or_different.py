"""The section "Same or different?": its threshold, its numbers, and which pairs of images it shows."""

import re

import numpy as np

from tests.report.pages import Page, embedded, made, rows_of
from tfdml.evaluation import accepted_rates, calibrate, verification
from tfdml.report import same_or_different
from tfdml.report.same_or_different import drawn_classes, sampled_images, verification_html


def percent(interval):
    return [f"{100 * interval.mean:.3g}", f"{100 * interval.low:.3g} – {100 * interval.high:.3g}"]


def test_a_threshold_of_held_out_classes_on_the_test_images():
    embeddings, labels = embedded()
    held_out = embedded(3, classes=9)
    text = str(verification_html(embeddings, made(labels), "cosine", held_out))
    calibration = calibrate(*held_out, far=0.01)
    measured = verification(embeddings, labels)
    rates = accepted_rates(embeddings, labels, calibration.threshold)
    page = Page(text)
    assert (
        f"The threshold is {calibration.threshold:.4g}, calibrated to a false accept rate of at most 1 %"
        in (page.all("p")[0]["text"])
    )
    assert "on 63 images of 9 held-out classes. Below are 6 classes of the test images." in page.all("p")[0]["text"]
    assert rows_of(text, "Rates at the threshold") == [
        [name, *percent(getattr(calibration, kind)), *percent(getattr(rates, kind))]
        for name, kind in (("False accept rate", "far"), ("True accept rate", "tar"), ("Precision", "precision"))
    ]
    assert rows_of(text, "True accept rates by false accept rate") == [
        [f"{100 * far:g}", *percent(point.tar), f"{point.threshold:.4g}"] for far, point in measured.points.items()
    ]
    rates = f"AUC {measured.auc:.4f}. Equal error rate {100 * measured.eer:.2f}%"
    assert rates in "".join(p["text"] for p in page.all("p"))
    roc, histogram = (e["aria-label"] for e in page.all("svg", role="img"))
    assert "true accept rate by false accept rate" in roc
    assert histogram.endswith(f"threshold {calibration.threshold:.3g}")


def test_without_held_out_classes_half_of_them_calibrate():
    embeddings, labels = embedded(classes=8)
    text = str(verification_html(embeddings, made(labels), "euclidean", target={"precision": 0.5}))
    half = np.isin(labels, drawn_classes(labels)[::2])
    calibration = calibrate(embeddings[half], labels[half], precision=0.5, distance="euclidean")
    rates = accepted_rates(embeddings[~half], labels[~half], calibration.threshold, distance="euclidean")
    assert "a precision of at least 50 % on 28 images of 4 of the classes, drawn at random" in text
    assert rows_of(text, "Rates at the threshold")[2] == [
        "Precision",
        *percent(calibration.precision),
        *percent(rates.precision),
    ]


def test_few_pairs_have_no_calibrated_threshold():
    embeddings, labels = embedded(classes=3, per_class=3)
    text = str(verification_html(embeddings, made(labels), "cosine"))
    assert "There are too few pairs to calibrate one on other classes" in text
    assert len(rows_of(text, "Rates at the threshold")[0]) == 3
    alone = verification_html(embeddings, made(np.arange(9)), "cosine")
    assert "There are not both pairs of one class and pairs of different classes" in alone


def test_of_many_images_whole_classes_are_drawn(monkeypatch):
    monkeypatch.setattr(same_or_different, "_MOST_IMAGES", 20)
    labels = np.random.default_rng(0).permutation(np.repeat([3, 5, 8, 9], [4, 7, 6, 30]))
    for seed in range(5):
        monkeypatch.setattr(
            same_or_different, "drawn_classes", lambda x, s=seed: np.random.default_rng(s).permutation(np.unique(x))
        )
        kept = sampled_images(labels)
        classes = np.unique(labels[kept])
        assert kept.sum() == np.isin(labels, classes).sum()
        assert len(classes) == 2 or kept.sum() <= 20
    monkeypatch.undo()
    embeddings, labels = embedded()
    monkeypatch.setattr(same_or_different, "_MOST_IMAGES", 21)
    text = str(verification_html(embeddings, made(labels), "cosine", embedded(3, classes=9)))
    assert "Their classes are a random sample" in text
    assert re.search(r"Below are 3 classes", text)

"""Thresholds: chosen by searches and by pairs, moved to other vectors, stored and read."""

import json
from fractions import Fraction

import numpy as np
import pytest

from tests.retrieval.identities import distances_by_hand, made
from tfdml.arguments import count_of_share
from tfdml.errors import UserError
from tfdml.evaluation import (
    Calibration,
    KNNClassifier,
    calibrate,
    evaluate_classification,
    identification,
    identification_rates,
    target_of,
    verification,
)
from tfdml.evaluation.calibration import (
    _threshold_of_equal_count,
    calibration_in,
    images_of_drawn_classes,
    stored_calibration,
)
from tfdml.registry import PER_CLASS


def images(seed, num_classes, per_class, dim=8, spread=0.5):
    """Unit vectors around random centers, some classes wider than others, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(num_classes), per_class)
    widths = spread * rng.uniform(0.3, 1.2, num_classes)[labels, None]
    points = rng.normal(size=(num_classes, dim))[labels] + widths * rng.normal(
        size=(len(labels), dim)
    )
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype("float32"), labels


def searches_by_hand(queries, labels, gallery, gallery_labels, distance, own=None):
    """Of each query, in float64: the distance to other classes, that to all, whether it is right,
    and known."""
    rows = []
    for i, (x, label) in enumerate(zip(queries.astype(np.float64), labels, strict=True)):
        far = []
        for j, (y, other) in enumerate(
            zip(gallery.astype(np.float64), gallery_labels, strict=True)
        ):
            if own is not None and own[i] == j:
                continue
            cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
            value = {"euclidean": np.linalg.norm(x - y), "cosine": 1 - cosine, "dot": -(x @ y)}[
                distance
            ]
            far.append((value, other == label))
        rows.append(
            (min(d for d, same in far if not same), *min(far), any(same for _, same in far))
        )
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("within", [True, False])
def test_rates_are_those_of_searches_by_hand(distance, within):
    x, labels = images(0, 12, 6)
    x, labels = x[:-3] * 2, labels[:-3]
    if within:
        queries, query_labels, own = x, labels, np.arange(len(x))
        sides = {}
    else:
        queries, query_labels = images(1, 16, 5)
        # The first twelve classes are those of the gallery.
        queries[:60] = x[np.searchsorted(labels, query_labels[:60])] + 0.2 * queries[:60]
        own, sides = None, {"gallery": x, "gallery_labels": labels}
    unknown, nearest, right, known = searches_by_hand(
        queries, query_labels, x, labels, distance, own
    )
    # Classes of the gallery are unknown only in a search without them.
    strangers = np.ones(len(queries), bool) if within else query_labels >= 12
    unknown = unknown[strangers]
    calibration = calibrate(queries, query_labels, fpir=0.1, distance=distance, **sides)
    t = calibration.threshold
    # The largest: with the next query, and those as far away, there would be too many.
    beyond = np.sort(unknown)[int(0.1 * len(unknown))]
    assert t == pytest.approx(beyond, abs=1e-5)
    assert calibration.rates["fpir"].mean == pytest.approx(
        np.mean(unknown < beyond - 1e-5), abs=1e-12
    )
    assert calibration.rates["tpir"].mean == pytest.approx(np.mean((right & (nearest <= t))[known]))
    basis = calibration.basis
    assert (basis.images, basis.classes, basis.left_out) == (len(x), 12, within)
    assert (basis.known, basis.unknown) == (known.sum(), strangers.sum())
    assert (basis.known_classes, basis.unknown_classes) == (12, 12 if within else 4)
    assert (calibration.kind, calibration.rate, calibration.distance) == ("fpir", 0.1, distance)
    measured = identification_rates(queries, query_labels, t, distance=distance, **sides)
    for name, rate in measured.items():
        assert rate.mean == calibration.rates[name].mean
        # For as many other classes: those vary as much as these.
        assert calibration.rates[name].standard_error == pytest.approx(2**0.5 * rate.standard_error)
        assert rate.low <= rate.mean <= rate.high


def test_a_distance_at_the_threshold_is_accepted():
    x, labels = [[0.0], [1.0], [5.0], [7.0]], [0, 0, 1, 1]
    fpirs = [
        identification_rates(x, labels, threshold)["fpir"].mean
        for threshold in (3.9, 4.0, 5.0, 6.0)
    ]
    assert fpirs == [0, 0.5, 0.75, 1]


def test_standard_errors_count_a_class_as_queries_and_as_what_queries_find():
    x, labels = images(5, 14, 6, dim=4)
    threshold = calibrate(x, labels, fpir=0.3).threshold
    far = np.linalg.norm(x[:, None].astype(np.float64) - x[None], axis=2)
    far[labels[:, None] == labels[None]] = np.inf
    hits = far.min(axis=1) <= threshold
    # What the queries of each class find no more in a gallery without another class.
    lost = np.zeros((14, 14))
    for found in range(14):
        stays = far[:, labels != found].min(axis=1) <= threshold
        lost[:, found] = np.bincount(labels[hits & ~stays], minlength=14)
    assert (lost * lost.T).any()
    assert lost.sum() < hits.sum()
    queries = np.array([np.sum(hits[labels == own] - hits.mean()) for own in range(14)])
    both = queries + lost.sum(axis=0) - lost.sum() / 14
    twice = np.triu(np.square(lost + lost.T)).sum()
    variance = max(np.square(queries).sum(), np.square(both).sum() - twice)
    assert variance > np.square(queries).sum()
    expected = np.sqrt(variance * 14 / 13) / len(x)
    assert identification_rates(x, labels, threshold)["fpir"].standard_error == pytest.approx(
        expected
    )
    # A gallery of one's own stays as it is when other strangers come.
    strangers = x[labels >= 7], labels[labels >= 7]
    gallery = {"gallery": x[labels < 7], "gallery_labels": labels[labels < 7]}
    threshold = calibrate(*strangers, fpir=0.3, **gallery).threshold
    hits = far[labels >= 7][:, labels < 7].min(axis=1) <= threshold
    queries = np.bincount(strangers[1] - 7, weights=hits - hits.mean())
    expected = np.sqrt(np.square(queries).sum() * 7 / 6) / len(hits)
    of_strangers = identification_rates(*strangers, threshold, **gallery)["fpir"]
    assert of_strangers.standard_error == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.009, 0.07, 0.29, 0.57, 0.58, 1 - 0.99, 1 / 49, 0.1])
def test_a_whole_count_of_a_share_is_that_count(share):
    """Also of the searches, pairs and classes that it is asked of."""
    written = Fraction(share).limit_denominator(10_000)
    for whole in range(1, 400, 7):
        count = int(whole * written.denominator)
        expected = int(whole * written.numerator)
        assert count_of_share(share, count) == count_of_share(share, count, up=True) == expected
        assert count_of_share(share, count + 1) == expected
        assert count_of_share(share, count + 1, up=True) == expected + 1
        assert count_of_share(share, count - 1) == expected - 1


def test_each_rate_of_a_whole_count_accepts_that_count():
    # 3,000 strangers, the i-th at the distance i: 27 are 0.009 of them.
    strangers = np.arange(1, 3001, dtype=np.float64)[:, None]
    names = np.arange(1, 3001)
    sides = {"gallery": [[0.0]], "gallery_labels": [0]}
    rates = calibrate(strangers, names, fpir=0.009, **sides).rates
    assert rates["fpir"].mean * 3000 == pytest.approx(27)
    assert calibrate(strangers[:49], names[:49], fpir=1 / 49, **sides).rates["fpir"].mean == 1 / 49
    # FNIR at an FPIR: the 27 known queries that are nearer than the 28th stranger.
    known = np.linspace(0.5, 27.5, 28)[:, None]
    classifier = KNNClassifier([[0.0]], [0], k=1)
    measures = evaluate_classification(
        classifier,
        np.concatenate([known, strangers]),
        np.append(np.zeros(28, int), names),
        fpirs=(0.009,),
    )
    assert measures["fnir@fpir=0.009"] == 0
    # 1,000 pairs of different classes, 29 of which are 0.029 of them.
    x = np.concatenate([np.zeros(1), np.arange(1, 1001)])[:, None]
    y = np.append(0, np.ones(1000, int))
    assert calibrate(x, y, far=0.029).rates["far"].mean * 1000 == pytest.approx(29)
    assert verification(x, y, fars=[0.029]).points[0.029].far.mean * 1000 == pytest.approx(29)


def test_only_strangers_are_impostors_and_trained_classes_of_the_catalog_are_not():
    """Classes that lie far from one another, as trained ones do, would widen the threshold."""
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(40), 20)
    centers = rng.normal(size=(40, 16))
    centers[:20] *= 4
    x = centers[labels] + 0.7 * rng.normal(size=(800, 16))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    gallery = (labels < 20) & (np.arange(800) % 2 == 0)
    sides = {"gallery": x[gallery], "gallery_labels": labels[gallery]}
    queries, query_labels = x[~gallery], labels[~gallery]
    by_class = calibrate(queries, query_labels, fpir=0.05, **sides)
    assert by_class.rates["fpir"].mean == 0.05
    assert by_class.basis.unknown == np.sum(query_labels >= 20)
    assert by_class.basis.known == np.sum(query_labels < 20)
    assert not by_class.basis.left_out
    named = calibrate(queries, query_labels, fpir=0.05, unknown=query_labels >= 20, **sides)
    assert named.to_dict() == by_class.to_dict()
    measured = identification_rates(queries, query_labels, by_class.threshold, **sides)
    assert {name: rate.mean for name, rate in measured.items()} == {
        name: rate.mean for name, rate in by_class.rates.items()
    }
    alone = calibrate(x[labels >= 20], labels[labels >= 20], fpir=0.05, **sides)
    assert (sorted(alone.rates), alone.threshold) == (
        ["fpir"],
        pytest.approx(by_class.threshold, abs=0.1),
    )
    assert "tpir not measured: there are 0 known images" in str(alone)
    assert f"of {by_class.basis.known} known images of 20 classes" in str(by_class)
    with pytest.raises(UserError, match="classes that the gallery does not have, the first is 20"):
        calibrate(queries, query_labels, fpir=0.05, unknown=query_labels >= 21, **sides)
    with pytest.raises(UserError, match="calls no query unknown"):
        calibrate(queries, query_labels, fpir=0.05, unknown=query_labels > 99, **sides)


def test_a_precision_is_that_of_the_prior():
    x, labels = images(3, 30, 10)
    prior = 0.005
    calibration = calibrate(x, labels, precision=0.8, prior=prior)
    rates = calibration.rates
    accepted_same, accepted_other = (
        prior * rates["tar"].mean,
        (1 - prior) * rates["far"].mean,
    )
    expected = accepted_same / (accepted_same + accepted_other)
    assert rates["precision"].mean == pytest.approx(expected)
    assert 0.8 <= rates["precision"].mean < 0.81
    assert calibration.threshold < calibrate(x, labels, precision=0.8).threshold
    # The prior of the images themselves changes nothing.
    own = calibrate(x, labels, far=0.01)
    same = calibrate(x, labels, far=0.01, prior=own.prior)
    assert same.rates["precision"].mean == pytest.approx(own.rates["precision"].mean)


@pytest.mark.parametrize("text", ["far=0.0.1", "far=", "far", "far=nan", "fnr=0.1", "far=2"])
def test_a_target_is_one_kind_and_a_share(text):
    with pytest.raises(UserError, match="a number from 0 to 1"):
        target_of(text)
    assert target_of("precision=1e-3") == {"precision": 0.001}


def test_a_threshold_moves_with_the_vectors_by_the_same_pairs():
    x, labels = images(4, 40, 12, dim=12)
    other = x.astype(np.float64) + 0.05 * np.random.default_rng(1).normal(size=x.shape)
    before = calibrate(x, labels, far=0.02)
    moved = before.moved_to(x, other, labels)
    expected = calibrate(other, labels, far=0.02)
    assert moved.moved.low < expected.threshold < moved.moved.high
    assert moved.threshold == pytest.approx(expected.threshold, abs=2e-3)
    assert moved.threshold > before.threshold + 0.003
    assert (moved.rates, moved.basis) == (before.rates, before.basis)
    # All twice as far apart: exactly twice the distance.
    twice = before.moved_to(x, 2 * x, labels)
    assert twice.threshold == pytest.approx(2 * before.threshold, rel=1e-3)
    # What rounding does is no reason to measure.
    assert before.moved_to(x, x + np.float32(1e-7), labels).threshold == before.threshold
    few = calibrate(x, labels, fpir=0.01)
    with pytest.raises(UserError, match="too few to show how other vectors move it"):
        few.moved_to(x[:48], other[:48], labels[:48])


@pytest.mark.parametrize("within", [0, 5])
def test_a_threshold_moves_by_pairs_that_one_class_may_fill(within):
    # Every pair near enough, but for a few, has an image of class 0.
    rng = np.random.default_rng(0)
    first, second = np.repeat(np.triu_indices(10, 1), 20, axis=1)
    distances = rng.uniform(1, 2, len(first)) * np.where(first == 0, 0.1, 1)
    accepted = distances <= np.sort(distances[first > 0])[within] - 1e-9
    threshold, variance = _threshold_of_equal_count(first, second, accepted, distances)
    thresholds = []
    for left_out in [*range(10), None]:
        kept = (first != left_out) & (second != left_out)
        count, ascending = accepted[kept].sum(), np.sort(distances[kept])
        thresholds.append((ascending[max(count - 1, 0)] + ascending[count]) / 2)
    jackknife = (10 - 2) / 2 * np.var(thresholds[:-1])
    assert threshold == pytest.approx(thresholds[-1], rel=1e-9)
    assert variance == pytest.approx(jackknife, rel=1e-9)


def test_a_stored_threshold_is_of_its_queries_and_says_what_it_was_measured_on():
    calibration = calibrate(*images(0, 12, 6), fpir=0.1)
    calibration = calibration.measured_on(gallery="cars", model="sha256:a", queries="texts")
    document = json.loads(json.dumps({"calibration": calibration.to_dict()}))
    again = stored_calibration(document, "t.json", "texts")
    assert again.basis == calibration.basis
    assert "72 images of 12 classes (cars)" in str(again)
    with pytest.raises(UserError, match="has the threshold of texts as queries, not of images"):
        stored_calibration(document, "t.json")
    assert stored_calibration({"calibration": None}, "t.json") is None
    with pytest.raises(UserError, match=r"t.json has no threshold"):
        calibration_in({}, "t.json")
    with pytest.raises(UserError, match="cannot be used"):
        stored_calibration({"calibration": {**calibration.to_dict(), "basis": {"images": 3}}}, "t")


def test_whole_classes_are_drawn():
    labels = np.repeat(np.arange(50), 7)
    drawn = images_of_drawn_classes(labels, 30)
    assert np.unique(labels[drawn], return_counts=True)[1].tolist() == [7] * 5
    assert images_of_drawn_classes(labels, 1000).all()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 1], fpir=0.01), "at least 100 queries"),
        (lambda: calibrate([[0.0], [1.0], [2.0]], [0, 0, 0], fpir=0.5), "two classes"),
        (lambda: calibrate([[0.0]] * 4, [0, 0, 1, 1], fpir=0.5), "copy"),
        (lambda: calibrate([[0.0]], [0], far=0.5, unknown=[True]), "go with fpir="),
        (lambda: identification_rates([[0.0], [1.0]], [1, 2], np.nan), "threshold"),
        (
            lambda: identification_rates([[0.0]], ["a"], 1.0, gallery=[[1.0]], gallery_labels=[1]),
            "labels",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_the_rate_in_parts_of_the_gallery_is_the_chance_and_grows_as_measured():
    x, labels = images(8, 160, 10, dim=16)
    strangers = labels >= 100
    gallery = ~strangers & (np.arange(len(labels)) % 2 == 0)
    small = gallery & (labels < 25)
    queries = {"embeddings": x[strangers], "labels": labels[strangers]}
    calibration = calibrate(**queries, fpir=0.1, gallery=x[gallery], gallery_labels=labels[gallery])
    # The mean over random quarters of the classes.
    rng, rates = np.random.default_rng(0), []
    for _ in range(60):
        part = gallery & np.isin(labels, rng.permutation(100)[:25])
        sides = {"gallery": x[part], "gallery_labels": labels[part]}
        rates.append(
            identification_rates(**queries, threshold=calibration.threshold, **sides)["fpir"].mean
        )
    among = calibration.fpir_among(gallery.sum() // 4)
    assert among.mean == pytest.approx(np.mean(rates), abs=0.004)
    assert calibration.fpir_among(gallery.sum()).mean == calibration.rates["fpir"].mean
    # From a quarter of the classes to all.
    calibration = calibrate(**queries, fpir=0.1, gallery=x[small], gallery_labels=labels[small])
    among = calibration.fpir_among(gallery.sum())
    sides = {"gallery": x[gallery], "gallery_labels": labels[gallery]}
    grown = identification_rates(**queries, threshold=calibration.threshold, **sides)["fpir"].mean
    assert among.low < grown < among.high
    assert among.mean > 1.5 * calibration.rates["fpir"].mean
    assert calibration.fpir_among(100 * gallery.sum()) is None
    again = json.loads(json.dumps({"calibration": calibration.to_dict()}))
    assert stored_calibration(again, "t.json").growth == calibration.growth


def test_the_warning_of_a_larger_gallery_names_the_rate(caplog):
    calibration = calibrate(*images(0, 30, 6), fpir=0.1)
    rate = calibration.fpir_among(720)
    calibration.for_searches("euclidean", 720)
    assert f"accepts about {100 * rate.mean:.3g} % [" in caplog.text


def test_the_worst_tenth_of_the_classes_is_that_of_each_class_by_hand():
    x, labels = images(2, 30, 8)
    for rate in ({"far": 0.02}, {"fpir": 0.1}):
        calibration = calibrate(x, labels, **rate)
        far = np.linalg.norm(x[:, None].astype(np.float64) - x[None], axis=2)
        np.fill_diagonal(far, np.inf)
        same, accepted = labels[:, None] == labels[None], far <= calibration.threshold
        shares = []
        for label in range(30):
            mine = labels == label
            if "far" in rate:
                hits = np.mean(accepted[mine][:, ~mine]), accepted[mine][:, mine].sum() / (8 * 7)
            else:
                others = np.where(same, np.inf, far)[mine].min(axis=1) <= calibration.threshold
                right = far[mine][:, mine].min(axis=1) <= np.minimum(
                    far[mine].min(axis=1), calibration.threshold
                )
                hits = np.mean(others), np.mean(right)
            shares.append(hits)
        false, true = np.sort(np.transpose(shares), axis=1)
        names = ("far", "tar") if "far" in rate else ("fpir", "tpir")
        assert calibration.worst[names[0]] == pytest.approx(false[-3:].mean())
        assert calibration.worst[names[1]] == pytest.approx(true[:3].mean())
        assert "of the worst tenth of the classes" in str(calibration)


@pytest.mark.parametrize("rule", PER_CLASS)
@pytest.mark.parametrize("is_own", [True, False])
def test_a_threshold_of_a_rule_is_that_of_searches_by_hand(rule, is_own):
    """Known and unknown distances, with each image of the gallery left out of its own class."""
    images, labels, groups = made(classes=8, per_class=4)
    queries, query_labels, _ = made(1, classes=11, per_class=3)
    given = {"gallery": images, "gallery_labels": labels}
    if is_own:
        queries, query_labels, given = images, labels, {}
    if rule != "nearest":
        given["groups"] = groups
    calibration = calibrate(queries, query_labels, fpir=0.3, per_class=rule, **given)
    nearest, unknown, is_right = [], [], []
    for row, (query, label) in enumerate(zip(queries, query_labels, strict=True)):
        left_out = row if is_own else -1
        far = distances_by_hand(
            query.astype(np.float64), images, labels, groups, rule, "euclidean", left_out
        )
        if is_own or label >= 8:
            unknown.append(np.delete(far, label).min() if is_own else far.min())
        if label < 8:
            nearest.append(far.min())
            is_right.append(far.argmin() == label)
    threshold = calibration.threshold
    assert calibration.rates["fpir"].mean == np.mean(np.array(unknown) <= threshold)
    within = np.array(nearest) <= threshold
    assert calibration.rates["tpir"].mean == np.mean(within & np.array(is_right))
    # The next unknown query is refused.
    assert np.sort(unknown)[int(0.3 * len(unknown))] == pytest.approx(threshold, rel=1e-5)
    assert calibration.basis.per_class == rule
    sizes = [size for size, _ in calibration.growth]
    assert (len(images) if rule == "nearest" else 8) in sizes
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again.basis == calibration.basis
    rates = identification_rates(queries, query_labels, threshold, per_class=rule, **given)
    assert rates["tpir"].mean == calibration.rates["tpir"].mean
    measured = identification(queries, query_labels, per_class=rule, **given)
    assert measured.basis == calibration.basis


def test_a_threshold_of_another_rule_is_refused():
    x, labels = images(0, 20, 6)
    by_means = calibrate(x, labels, fpir=0.1, per_class="mean")
    assert by_means.for_searches("euclidean", 20, "mean") is by_means
    assert "by per_class=mean" in str(by_means)
    with pytest.raises(UserError, match="of per_class='mean', the search of 'nearest'"):
        by_means.for_searches("euclidean", 20)
    with pytest.raises(UserError, match="cannot move"):
        by_means.moved_to(x, x + 0.1, labels)
    assert by_means.moved_to(x, x, labels).threshold == by_means.threshold
    with pytest.raises(UserError, match="goes with fpir="):
        calibrate(x, labels, far=0.1, per_class="mean")
    rows = np.roll(np.arange(len(x)), 6)
    gallery = {"gallery": x, "gallery_labels": labels, "own_rows": rows}
    with pytest.raises(UserError, match="rows of other classes"):
        calibrate(x, labels, fpir=0.1, per_class="mean", **gallery)

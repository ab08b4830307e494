"""`tfdml evaluate`: the same numbers wherever a model lies, comparisons, and whitening."""

import json

import numpy as np
import pytest

from tests.cli.commands import write_embedder, write_noise
from tfdml.data import load
from tfdml.embeddings import load_backend
from tfdml.errors import UserError
from tfdml.evaluation import (
    Calibration,
    KNNClassifier,
    calibrate,
    evaluate_classification,
    evaluate_retrieval,
    set_distances,
    verification,
    verify_pairs,
)
from tfdml.retrieval import fit_whitening, open_gallery

# Ranks of all but equal distances may swap between two graphs.
BETWEEN_GRAPHS = 5e-3
DATA = ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32"]


@pytest.fixture(scope="module")
def forms(finished_run, commands, tmp_path_factory):
    """Where the embedder of the run lies as a SavedModel, and its stored embeddings."""
    folder = tmp_path_factory.mktemp("forms")
    export = [f"--run_dir={finished_run}", f"--out={folder / 'versions'}"]
    assert "cosine min 1.000000" in commands.printed("export", *export)
    embed = [f"--model={finished_run}", f"--out={folder / 'stored'}", "--split=test"]
    commands.printed("embed", *embed)
    return {"run": finished_run, "stored": folder / "stored", "saved_model": folder / "versions"}


@pytest.mark.slow
def test_the_same_numbers_for_the_same_model(forms, commands, tmp_path):
    places = {
        "run": [f"--model={forms['run']}"],
        "stored": [f"--model={forms['stored']}"],
        "keras": [f"--model={forms['run'] / 'embedder.keras'}", *DATA],
        "saved_model": [f"--model={forms['saved_model']}", *DATA],
    }
    results = {}
    for name, flags in places.items():
        printed = commands.printed("evaluate", *flags, f"--json={tmp_path / name}.json")
        assert "428 images of 107 classes" in printed
        result = json.loads((tmp_path / f"{name}.json").read_text())
        results[name] = {
            key: value for key, value in result.items() if key not in ("model", "dataset")
        }
        assert name == "stored" or result["dataset"] == "glyphs"
    trained = json.loads((forms["run"] / "result.json").read_text())["metrics"]
    for metric in ("recall@1", "recall@8", "map@r", "r_precision"):
        assert results["run"][metric] == pytest.approx(trained[metric], abs=1e-6)
        assert results["saved_model"][metric] == pytest.approx(trained[metric], abs=BETWEEN_GRAPHS)
    assert results["keras"] == results["stored"] == results["run"]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A folder of .npz files."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 20)
    points = rng.normal(size=(12, 8))[labels] + rng.normal(size=(240, 8))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype("float32")
    np.savez(folder / "good.npz", embeddings=points, labels=labels)
    np.savez(
        folder / "roles.npz", embeddings=points, labels=labels, is_query=np.arange(240) % 2 == 0
    )
    return folder


def measured(commands, file, *flags):
    """What a file of vectors measures, as JSON, and what is printed."""
    path = file.with_suffix(".json")
    status, said, errors = commands.run("evaluate", f"--model={file}", f"--json={path}", *flags)
    assert status == 0, errors
    return json.loads(path.read_text()), said


def test_an_archive_is_measured_as_its_arrays_are(commands, vectors):
    arrays = np.load(vectors / "roles.npz")
    points, labels, query = arrays["embeddings"], arrays["labels"], arrays["is_query"]
    options = "--intervals=queries", "--metrics=recall,map,nmi", "--ks=1,3"
    found, said = measured(commands, vectors / "good.npz", *options)
    expected = evaluate_retrieval(
        points, labels, metrics=["recall", "map", "nmi"], ks=(1, 3), intervals="queries"
    )
    interval = expected["intervals"]["recall@1"]
    expected["intervals"] = {name: list(value) for name, value in expected["intervals"].items()}
    assert {key: found[key] for key in expected} == expected
    assert "12 classes" in said
    assert f"[{100 * interval.low:.2f}, {100 * interval.high:.2f}]" in said

    found, _ = measured(commands, vectors / "roles.npz", "--distance=cosine")
    expected = evaluate_retrieval(
        points[query], labels[query], points[~query], labels[~query], distance="cosine"
    )
    assert {key: found[key] for key in expected} == expected
    assert found["num_gallery"] == 120

    found, _ = measured(commands, vectors / "good.npz", "--metrics=recall@1", "--generalization")
    assert found["generalization"]["unseen_recall@1"] == found["recall@1"]


def test_pairs_of_sets(commands, vectors, tmp_path):
    """The rule, the groups and the names are those of `set_distances`."""
    stored = np.load(vectors / "good.npz")
    points = stored["embeddings"]
    rng = np.random.default_rng(0)
    sets = np.array([f"set {number}" for number in rng.integers(0, 30, len(points))])
    groups = rng.integers(0, 3, len(points))
    path = tmp_path / "sets.npz"
    np.savez(path, embeddings=points, labels=sets, group=groups)
    pairs = [["set 1", f"set {number}"] for number in range(2, 22)]
    similar = np.arange(20) % 2
    lines = [f"{a},{b},{value}" for (a, b), value in zip(pairs, similar, strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["a,b,similar", *lines]))
    flags = ("--task=verification", f"--set_pairs={tmp_path / 'pairs.csv'}", "--distance=cosine")
    order = np.random.default_rng(0).permutation(20)
    for rule, grouped in (("nearest", False), ("mean", True), ("max_of_means", False)):
        asked = [f"--per_class={rule}"] + ["--groups"] * grouped
        result, text = measured(commands, path, *flags, *asked)
        options = {"per_class": rule, "distance": "cosine", "groups": groups if grouped else None}
        distances = set_distances(points, sets, pairs, **options)
        expected = verify_pairs(distances[order], similar[order])
        assert {name: result[name] for name in expected} == expected
        assert "20 pairs of sets, 10 of one class; cosine, by per_class=" + rule in text
    for line, message in (
        ("set 1,nobody,1", "1 set has no image, the first is 'nobody'"),
        ("set 1,set 2,junk", "0 or 1"),
    ):
        (tmp_path / "pairs.csv").write_text("\n".join(["a,b,similar", *lines, line]))
        status, _, error = commands.run("evaluate", f"--model={path}", *flags)
        assert status == 2
        assert message in error
    (tmp_path / "pairs.csv").write_text("\n".join(["a,b,similar", *lines]))
    status, _, error = commands.run("evaluate", f"--model={path}", *flags, "--groups")
    assert status == 2
    assert "per_class='mean'" in error


@pytest.mark.slow
def test_embeddings_of_other_images_than_the_data_set(
    finished_run, commands, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    dataset = load("glyphs", split="test", images_per_class=4, size=32)
    points = np.random.default_rng(0).normal(size=(428, 4)).astype(np.float32)
    np.savez(tmp_path / "same.npz", embeddings=points, labels=dataset.labels + 1000)
    np.savez(tmp_path / "bare.npz", embeddings=points)
    np.savez(tmp_path / "other.npz", embeddings=points, labels=np.roll(dataset.labels, 1))
    lines = [
        ["--model=same.npz", *DATA, "--json=same.json"],
        ["--model=bare.npz", *DATA, "--json=bare.json"],
        ["--model=other.npz", *DATA],
        [
            f"--model={finished_run}",
            "--report=run.html",
            "--task=verification",
            "--target=far=0.02",
        ],
    ]
    answers = [commands.run("evaluate", *flags) for flags in lines]
    assert [status for status, _, _ in answers] == [0, 0, 2, 0], answers
    same, bare = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("same", "bare"))
    assert {k: v for k, v in same.items() if k != "model"} == {
        k: v for k, v in bare.items() if k != "model"
    }
    assert "calibrated to far=0.02" in (tmp_path / "run.html").read_text()


def test_thresholds_and_classes_of_stored_embeddings(commands, vectors):
    points, labels = (np.load(vectors / "good.npz")[name] for name in ("embeddings", "labels"))
    flags = "--task=verification", "--target=far=0.01", "--distance=cosine"
    result, _ = measured(commands, vectors / "good.npz", *flags)
    expected = verification(points, labels, distance="cosine")
    assert (result["auc"], result["eer"], result["num_same"]) == (
        expected.auc,
        expected.eer,
        12 * 190,
    )
    assert result["tar@far=0.01"] == expected.points[0.01].tar.mean
    calibration = Calibration.from_dict(result["calibration"])
    assert calibration.threshold == calibrate(points, labels, far=0.01, distance="cosine").threshold

    flags = "--task=classification", "--neighbors=3", "--target=fpir=0.02"
    result, _ = measured(commands, vectors / "good.npz", *flags)
    gallery = (labels < 6) & (np.arange(240) % 2 == 0)
    classifier = KNNClassifier(points[gallery], labels[gallery], k=3, distance="euclidean")
    expected = evaluate_classification(classifier, points[~gallery], labels[~gallery])
    assert {name: result[name] for name in expected} == expected
    # The threshold is of searches of all images.
    calibration = calibrate(points, labels, fpir=0.02)
    assert Calibration.from_dict(result["calibration"]).rates == calibration.rates
    flags = "--task=classification", "--target=fpir=0.02", "--per_class=mean"
    result, _ = measured(commands, vectors / "good.npz", *flags)
    classifier = KNNClassifier(points[gallery], labels[gallery], per_class="mean")
    expected = evaluate_classification(classifier, points[~gallery], labels[~gallery])
    assert {name: result[name] for name in expected} == expected
    calibration = calibrate(points, labels, fpir=0.02, per_class="mean")
    assert Calibration.from_dict(result["calibration"]).rates == calibration.rates
    assert result["calibration"]["basis"]["per_class"] == "mean"
    status, _, errors = commands.run("evaluate", f"--model={vectors / 'good.npz'}", *DATA)
    assert (status, "240 embeddings" in errors) == (2, True), errors


@pytest.mark.slow
def test_whitening_of_a_run_and_of_its_export(finished_run, commands, tmp_path):
    models, file = tmp_path / "models", tmp_path / "served.json"
    export = [f"--run_dir={finished_run}", f"--out={models}", "--whitening=dim=8, power=0.5"]
    commands.printed("export", *export)
    evaluate = [f"--model={models}", *DATA, "--metrics=recall@1,map@r", f"--json={file}"]
    commands.printed("evaluate", *evaluate)
    train, test = (
        load("glyphs", split=split, images_per_class=4, size=32) for split in ("train", "test")
    )
    backend = load_backend(str(finished_run))
    embeddings = backend.embed(test, 100)
    whitening = fit_whitening(backend.embed(train, 100), 8, power=0.5)
    names = ["recall@1", "map@r"]
    expected = evaluate_retrieval(whitening(embeddings), test.labels, metrics=names)
    served = json.loads((tmp_path / "served.json").read_text())
    card = json.loads((tmp_path / "models" / "1" / "model_card.json").read_text())
    assert (card["embedding_dim"], card["whitening"], card["metrics"]) == (
        8,
        {"dim": 8, "power": 0.5},
        None,
    )
    for name in names:
        assert served[name] == pytest.approx(expected[name], abs=BETWEEN_GRAPHS)


def test_a_threshold_of_a_gallery_by_known_queries_and_strangers(commands, tmp_path):
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(30), 20)
    points = (rng.normal(size=(30, 8))[labels] + 0.6 * rng.normal(size=(600, 8))).astype("float32")
    names = np.array([f"class {label:02}" for label in labels])
    sides = {
        "gallery": (labels < 15) & (np.arange(600) % 2 == 0),
        "known": (labels < 15) & (np.arange(600) % 2 == 1),
        "strangers": labels >= 15,
    }
    for side, rows in sides.items():
        np.savez(tmp_path / f"{side}.npz", embeddings=points[rows], labels=names[rows])
    flags = [f"--{side}={tmp_path / side}.npz" for side in sides]
    flags += ["--task=classification", "--target=fpir=0.05", f"--json={tmp_path / 't.json'}"]
    status, said, errors = commands.run("evaluate", *flags)
    assert status == 0, errors
    calibration = Calibration.from_dict(
        json.loads((tmp_path / "t.json").read_text())["calibration"]
    )
    queries = np.concatenate([points[sides["strangers"]], points[sides["known"]]])
    query_names = np.concatenate([names[sides["strangers"]], names[sides["known"]]])
    gallery = {"gallery": points[sides["gallery"]], "gallery_labels": names[sides["gallery"]]}
    expected = calibrate(queries, query_names, fpir=0.05, **gallery)
    assert (calibration.threshold, calibration.rates) == (expected.threshold, expected.rates)
    assert f"150 images of 15 classes ({tmp_path}/gallery.npz)" in said
    assert "of 300 unknown images of 15 classes" in said
    assert "of 150 known images of 15 classes" in said

    without = [flag for flag in flags if "--known" not in flag]
    assert "tpir not measured" in commands.run("evaluate", *without)[1]
    for changed, message in (
        (f"--strangers={tmp_path / 'known.npz'}", "are in the gallery, such as class 00"),
        (f"--known={tmp_path / 'strangers.npz'}", "that the gallery does not have"),
        ("--strangers=", "go together"),
        ("--target=far=0.0.1", "write fpir="),
        (f"--gallery={tmp_path}", "found no image"),
    ):
        status, _, errors = commands.run("evaluate", *flags, changed)
        assert (status, message in errors) == (2, True), (changed, errors)


def test_classes_that_are_numbers_are_not_those_of_another_file(commands, tmp_path):
    points = np.random.default_rng(3).normal(size=(240, 8)).astype("float32")
    labels = np.repeat(np.arange(24), 10)
    for name in ("gallery", "known"):
        np.savez(tmp_path / f"{name}.npz", embeddings=points, labels=labels)
    np.savez(tmp_path / "strangers.npz", embeddings=points + 0.1, labels=labels + 100)
    flags = [f"--{side}={tmp_path / side}.npz" for side in ("gallery", "known", "strangers")]
    flags += ["--task=classification", "--target=fpir=0.2"]
    for side in ("known", "strangers"):
        status, _, errors = commands.run("evaluate", *flags, f"--{side}={tmp_path}/known.npz")
        message = "classes or those of the gallery are numbers, such as 0, which mean something"
        assert (status, message in errors) == (2, True), errors
    flags = [flag for flag in flags if "--known" not in flag]
    status, text, errors = commands.run("evaluate", *flags)
    assert (status, "tpir not measured" in text) == (0, True), errors
    search = [f"--gallery={tmp_path}/gallery.npz", f"--queries={tmp_path}/known.npz", "--k=1"]
    status, text, errors = commands.run("search", *search)
    assert (status, "nothing is counted; store names" in text) == (0, True), errors
    assert "Recall" not in text


@pytest.fixture
def catalog(tmp_path):
    """Embeddings of a gallery, in a file and in a database, of known queries and of strangers, and
    the flags that calibrate with them."""
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(60), 20)
    points = (rng.normal(size=(60, 8))[labels] + 0.6 * rng.normal(size=(1200, 8))).astype("float32")
    names = np.array([f"class {label:02}" for label in labels])
    part = np.arange(1200) % 4
    rows = {
        "gallery": (labels < 30) & (part < 2),
        "known": (labels < 30) & (part == 2),
        "strangers": (labels >= 30) & (labels < 45),
        "week": ((labels < 30) & (part == 3)) | (labels >= 45),
    }
    for side, chosen in rows.items():
        np.savez(tmp_path / f"{side}.npz", embeddings=points[chosen], labels=names[chosen])
    uri = f"lancedb://{tmp_path / 'db'}?table=catalog"
    with open_gallery(uri) as gallery:
        ids = np.flatnonzero(rows["gallery"]).astype(str).tolist()
        classes = names[rows["gallery"]].tolist()
        gallery.add(ids, points[rows["gallery"]], {"class": classes})
    flags = [f"--{side}={tmp_path / side}.npz" for side in ("known", "strangers")]
    return uri, ["--task=classification", "--target=fpir=0.05", *flags]


def test_a_database_is_a_gallery_as_its_file(catalog, commands, tmp_path):
    uri, flags = catalog
    results = []
    for gallery in (uri, f"{tmp_path / 'gallery.npz'}"):
        target = f"--json={tmp_path / 't.json'}"
        status, _, errors = commands.run("evaluate", *flags, f"--gallery={gallery}", target)
        assert status == 0, errors
        results.append(json.loads((tmp_path / "t.json").read_text())["calibration"])
    assert results[0]["threshold"] == results[1]["threshold"]
    assert results[0]["rates"] == results[1]["rates"]
    for changed, message in (
        ("--distance=cosine", "is euclidean"),
        (f"--gallery=lancedb://{tmp_path / 'db'}?table=none", "is empty"),
        (f"--strangers={uri}", "is a database"),
    ):
        command = ("evaluate", *flags, f"--gallery={uri}", changed)
        status, _, errors = commands.run(*command)
        assert (status, message in errors) == (2, True), (changed, errors)


def test_a_week_is_watched(catalog, commands, tmp_path):
    uri, flags = catalog
    baseline = tmp_path / "threshold.json"
    status, _, errors = commands.run("evaluate", *flags, f"--gallery={uri}", f"--json={baseline}")
    assert status == 0, errors
    watch = [f"--watch={baseline}", f"--gallery={uri}", f"--json={tmp_path / 'drift.json'}"]
    status, said, errors = commands.run("evaluate", *watch, f"--queries={tmp_path / 'week.npz'}")
    assert status == 0, (said, errors)
    assert "450 queries" in said
    names = ("refused, so unknown", "further from the gallery", "classes that queries find")
    assert all(name in said for name in names)
    strangers = (f"--queries={tmp_path / 'strangers.npz'}", "--unknown_share=0.1")
    status, said, errors = commands.run("evaluate", *watch, *strangers)
    assert (status, "shifted" in said) == (3, True), (said, errors)
    result = json.loads((tmp_path / "drift.json").read_text())
    assert result["has_shifted"]
    assert [len(row) for row in result["rows"]] == [5, 5, 5]

    pairs = tmp_path / "pairs.json"
    flags = ["--task=verification", "--target=far=0.05", f"--json={pairs}"]
    assert commands.run("evaluate", f"--model={tmp_path / 'known.npz'}", *flags)[0] == 0
    document = json.loads(baseline.read_text())
    del document["calibration"]["baseline"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    week = f"--queries={tmp_path / 'week.npz'}"
    for changed, message in (
        (f"--watch={pairs}", "calibrate with fpir"),
        (f"--watch={tmp_path / 'old.json'}", "measure it again with tfdml evaluate --target"),
        (f"--watch={tmp_path / 'drift.json'}", "has no threshold"),
        (f"--gallery={tmp_path / 'known.npz'}", "of another gallery"),
        ("--distance=cosine", "--distance"),
        ("--gallery=", "needs the --gallery"),
    ):
        status, _, errors = commands.run("evaluate", *watch, week, changed)
        assert (status, message in errors) == (2, True), (changed, errors)


def test_no_threshold_is_chosen_on_trained_classes(commands, tmp_path):
    write_noise(tmp_path / "more", "abcdef", 6)
    write_embedder(tmp_path / "model.keras")
    (tmp_path / "model_card.json").write_text(json.dumps({"trained_on": [*"bcdef"]}))
    flags = [f"--model={tmp_path / 'model.keras'}", "--dataset=folder"]
    flags += [f"--data_dir={tmp_path / 'more'}", "--dataset_options=test_fraction=0.5"]
    status, said, errors = commands.run("evaluate", *flags, "--metrics=recall@1")
    assert status == 0, errors
    assert "the model was trained on" in said
    status, _, errors = commands.run(
        "evaluate", *flags, "--task=classification", "--target=fpir=0.2"
    )
    assert (status, "no threshold is chosen on such" in errors) == (2, True), errors
    stored = f"{tmp_path / 'stored'}"
    status, _, errors = commands.run("embed", *flags, "--split=all", f"--out={stored}")
    assert status == 0, errors
    status, _, errors = commands.run(
        "evaluate", f"--model={stored}", "--task=classification", "--target=fpir=0.2"
    )
    assert (status, "no threshold is chosen on such" in errors) == (2, True), errors
    status, _, errors = commands.run(
        "evaluate", *flags, "--task=classification", "--target=fpir=0.2", "--split=train"
    )
    assert (status, "--split=test" in errors) == (2, True), errors


@pytest.fixture
def upgrade(tmp_path):
    """Embeddings of the same images, in other orders, by an old and by a new model whose vectors
    are turned, with all images' classes."""
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(20), 12)
    classes = rng.normal(size=(20, 8))[labels]
    names = np.array([f"{label}/{row}.jpg" for row, label in enumerate(labels)])
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    old = (classes + rng.normal(size=(240, 8))).astype("float32")
    new = ((classes + 0.3 * rng.normal(size=(240, 8))) @ turn).astype("float32")
    order = rng.permutation(240)
    np.savez(tmp_path / "old.npz", embeddings=old, labels=labels, path=names)
    new = {"embeddings": new[order], "labels": labels[order], "path": names[order]}
    np.savez(tmp_path / "new.npz", **new)
    return tmp_path


def test_a_new_model_searches_the_gallery_of_an_old_one(commands, upgrade):
    """Each image leaves itself out by its name, and the threshold is that of both models."""
    old, new = (np.load(upgrade / f"{name}.npz") for name in ("old", "new"))
    row_of = {name: row for row, name in enumerate(new["path"])}
    across = new["embeddings"][[row_of[name] for name in old["path"]]]
    path = upgrade / "result.json"
    flags = [f"--model={upgrade}/new.npz", f"--gallery={upgrade}/old.npz", f"--json={path}"]
    status, text, errors = commands.run("evaluate", *flags, "--target=fpir=0.1", "--ks=1")
    assert status == 0, errors
    assert "240 queries in 240 images, each without its own\n" in text
    result = json.loads(path.read_text())
    labels, rows = old["labels"], np.arange(240)
    sides = {"gallery": old["embeddings"], "gallery_labels": labels, "own_rows": rows}
    expected = {
        "old-old": evaluate_retrieval(old["embeddings"], labels, ks=[1], metrics=["recall"]),
        "new-old": evaluate_retrieval(across, labels, **sides, ks=[1], metrics=["recall"]),
        "new-new": evaluate_retrieval(across, labels, ks=[1], metrics=["recall"]),
    }
    for name, values in expected.items():
        assert {key: result[name][key] for key in values} == values
    difference = expected["new-old"]["recall@1"] - expected["old-old"]["recall@1"]
    assert result["difference"]["recall@1"][0] == pytest.approx(difference)
    calibration = Calibration.from_dict(result["calibration"])
    pair = calibrate(across, labels, **sides, fpir=0.1)
    assert (calibration.threshold, calibration.rates) == (pair.threshold, pair.rates)
    own = calibrate(old["embeddings"], labels, fpir=0.1).threshold
    assert result["threshold of old-old"]["threshold"] == own

    # Some images of each model alone: the rest search the whole old gallery.
    part = {name: new[name][:150] for name in new}
    part["path"] = np.where(np.arange(150) < 10, "other", part["path"])
    part["path"][:10] = [f"other/{row}" for row in range(10)]
    np.savez(upgrade / "new.npz", **part)
    status, text, errors = commands.run("evaluate", *flags, "--metrics=recall@1")
    assert status == 0, errors
    assert "140 queries in 240 images" in text
    assert "left out: 10 images of --model, not in --gallery; no new-new" in text
    rows = np.array([np.flatnonzero(old["path"] == name)[0] for name in part["path"][10:]])
    rows.sort()
    sides["own_rows"] = rows
    expected = evaluate_retrieval(across[rows], labels[rows], **sides, metrics=["recall@1"])
    assert json.loads(path.read_text())["new-old"]["recall@1"] == expected["recall@1"]


def test_an_old_gallery_that_cannot_be_compared_is_refused(commands, upgrade):
    old = dict(np.load(upgrade / "old.npz"))
    flags = [f"--model={upgrade}/new.npz", f"--gallery={upgrade}/wrong.npz"]
    nameless = {name: old[name] for name in ("embeddings", "labels")}
    twice = old["path"].copy()
    twice[1] = twice[0]
    for wrong, message in (
        ({**old, "embeddings": old["embeddings"][:, :5]}, "has 5 dimensions, and --model 8"),
        ({**old, "path": [f"x{name}" for name in old["path"]]}, "none of the images of --model"),
        ({**old, "path": twice}, "1 image whose names are there already"),
        ({**old, "labels": np.roll(old["labels"], 1)}, "same images in other classes"),
        (nameless, "no names of images"),
        ({name: old[name] for name in ("embeddings", "path")}, "has no classes"),
    ):
        np.savez(upgrade / "wrong.npz", **wrong)
        status, _, errors = commands.run("evaluate", *flags)
        assert (status, message in errors) == (2, True), (message, errors)
        assert errors.count("\n") <= 2, errors
    status, _, errors = commands.run("evaluate", *flags[:1], f"--gallery={upgrade}")
    assert (status, "holds no stored embeddings" in errors) == (2, True), errors


def test_the_threshold_of_one_model_is_refused_where_another_searches(commands, upgrade):
    models = {"old": "sha256:" + 64 * "a", "new": "sha256:" + 64 * "b"}
    old = np.load(upgrade / "old.npz")
    calibration = calibrate(old["embeddings"], old["labels"], fpir=0.1)
    own = calibration.measured_on(model=models["old"])
    pair = calibration.measured_on(model=models["new"], gallery_model=models["old"])
    own.check_models(models["old"], models["old"])
    # A threshold of an earlier run holds for the final model of the same training.
    own.check_models(models["new"], models["new"])
    pair.check_models(models["new"], models["old"])
    pair.check_models("", models["old"])
    for threshold, searched in (
        (own, ("new", "old")),
        (pair, ("old", "old")),
        (pair, ("old", "new")),
    ):
        with pytest.raises(UserError, match="the threshold is of"):
            threshold.check_models(*(models[name] for name in searched))

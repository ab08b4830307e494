"""The images of a run: splits, samplers, views and what is kept in memory."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from tests.data.trees import pictures, table
from tests.training.runs import learner, noise
from tfdml import data
from tfdml.data import sampling
from tfdml.data.dataset import ImageDataset, PairList, Protocol
from tfdml.data.pipeline import training_batches
from tfdml.data.policies import Policy, Step
from tfdml.data.sampling import ShuffleSampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.evaluation import dataset_protocol
from tfdml.mining import shares_a_label
from tfdml.training import Experiment, run_data
from tfdml.training.choices import Random, Stratified
from tfdml.training.run_data import (
    Splits,
    leave_out,
    load_splits,
    make_sampler,
    make_transforms,
    plan_cache,
    split_training_classes,
    vector_splits,
)
from tfdml.training.settings import DataSettings


def experiment(**changes):
    settings = Experiment(
        run_dir="runs/any", dataset="glyphs", image_size=28, resize=32, backbone="conv4", flip=False
    )
    return dataclasses.replace(settings, **changes)


def test_stratified_classes_are_one_of_each_size():
    sizes = np.array([3, 50, 4, 52, 9, 10, 49, 3, 9, 51, 10, 4])
    labels = np.repeat(7 * np.arange(12), sizes)
    train = ImageDataset(images=np.zeros((len(labels), 2, 2, 3), np.uint8), labels=labels)
    drawn = set()
    for seed in range(20):
        seen, held_out = split_training_classes(train, 0.25, seed, Stratified())
        assert sorted([*seen.classes, *held_out.classes]) == sorted(train.classes)
        found = sorted(sizes[held_out.classes // 7])
        assert all(
            low <= size <= high
            for size, low, high in zip(found, (3, 9, 49), (4, 10, 52), strict=True)
        )
        drawn |= set(held_out.classes)
    assert len(drawn) == 12


def test_images_of_a_run_are_told_from_others():
    splits = Splits(noise("train", 3, 0), None, noise("test", 2, 1))
    before = splits.identity()
    assert set(before) == {"train", "test"}
    assert (before["train"]["images"], before["train"]["classes"]) == (12, 3)
    relabeled = dataclasses.replace(splits.test, labels=[0] * 4 + [2] * 4)
    for name, test in (("content", noise("test", 2, 2)), ("names and labels", relabeled)):
        now = dataclasses.replace(splits, test=test).identity()
        assert now["train"] == before["train"]
        assert [key for key in now["test"] if now["test"][key] != before["test"][key]] == [name]


def test_a_second_data_set_is_measured_and_identified(tmp_path):
    for name in ("bus", "van"):
        (tmp_path / name).mkdir()
        for row in range(3):
            Image.new("RGB", (40, 40), (row, 0, 0)).save(tmp_path / name / f"{row}.png")
    settings = {"dataset_options": "images_per_class=2, size=32"}
    splits = load_splits(DataSettings(**settings, also_measure=f"folder:{tmp_path}"), 0)
    assert list(splits.evaluated()) == ["test", "also"]
    assert (splits.also.split, splits.also.num_classes, len(splits.also)) == ("test", 1, 3)
    assert splits.identity()["also"]["images"] == 3
    for text in ("none:x", "folder"):
        with pytest.raises(UserError, match=f"also_measure={text}[ :]"):
            load_splits(DataSettings(**settings, also_measure=text), 0)


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    "objectives",
    ["rank_mi", "triplet(mining=distance_weighted) + horde(loss=am_softmax, orders=3, dim=16)"],
)
def test_objectives_are_tried_without_a_trace(objectives):
    settings = experiment(objectives=objectives)
    first, second = (learner(settings, 5) for _ in range(2))
    assert len(first.variables) == len(second.variables)
    for metric in first.metrics:
        assert metric.name == "loss" or not np.any(
            [np.asarray(variable) for variable in metric.variables]
        )
    for one, other in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_views_of_the_flags():
    flags = {
        "augmentation": "multi_resolution",
        "policy": "0.5 * blur",
        "resize_mode": "squash",
        "resize": 40,
    }
    policy = Policy((Step("blur", {}, 0.5),))
    train = TrainTransform(
        "multi_resolution", 40, 28, "squash", scale=(0.08, 1.0), flip=False, policy=policy
    )
    assert make_transforms(experiment(**flags)) == (train, EvaluationTransform(40, 28, "squash"))


NEEDED = 100 * 20 * 20 * 3 + 30 * 16 * 16 * 3


@pytest.mark.parametrize(
    ("spare", "cache", "drawn", "kept"),
    [
        (NEEDED, "auto", 1000, True),
        (NEEDED - 1, "auto", 1000, False),
        (NEEDED - 1, "true", 1000, True),
        (NEEDED, "auto", 199, False),  # a run that sees its images hardly once gains nothing
    ],
)
def test_auto_keeps_what_fits(spare, cache, drawn, kept, monkeypatch):
    monkeypatch.setattr(run_data, "memory_to_spare", lambda limit: spare)
    images = np.zeros((100, 40, 40, 3), np.uint8)
    splits = [
        ImageDataset(images=images[:count], labels=np.zeros(count, int)) for count in (100, 30)
    ]
    settings = DataSettings(image_size=16, resize=20, cache=cache)
    transform = TrainTransform("random_crop", 20, 16)
    assert plan_cache(settings, Splits(splits[0], None, splits[1]), transform, drawn).kept == kept


def made():
    """36 images of 12 classes of 1 to 5 images, of 3 super-classes."""
    counts = np.array([1, 2, 3, 4, 5, 3] * 2)
    classes, images = np.repeat(np.arange(12), counts), np.zeros((36, 4, 4, 3), np.uint8)
    return ImageDataset(images=images, labels=classes, super_labels=classes // 4)


def batches_of(**settings):
    return Experiment(
        **{
            "run_dir": "none",
            "classes_per_batch": 4,
            "images_per_class": 2,
            "batch_size": 8,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda d: sampling.ClassBalancedSampler(d.labels, 4, 2, 7)),
        (
            {"sampling": "neighbors(anchor_classes=2)"},
            lambda d: sampling.NeighborSampler(d.labels, 4, 2, 7, "repeat", 2),
        ),
        ({"sampling": "whole_classes"}, lambda d: sampling.WholeClassSampler(d.labels, 8, 7)),
        (
            {"sampling": "hierarchical(short_classes=drop)", "classes_per_batch": 3},
            lambda d: sampling.HierarchicalSampler(
                d.labels, d.super_labels, 3, 2, 1, 7, "proportional", "drop"
            ),
        ),
    ],
)
def test_the_sampler_of_the_flags(settings, expected):
    data = made()
    run = batches_of(seed=7, **settings)
    assert Experiment.from_flags(run.as_flags()) == run
    for step in range(20):
        assert (
            make_sampler(run, data, run.seed).batch(step).tolist()
            == expected(data).batch(step).tolist()
        )


@pytest.mark.parametrize("sampling", [Random, Stratified])
def test_each_class_is_in_one_of_the_parts(sampling):
    train = data.load("glyphs", split="train", images_per_class=2)
    parts = [split_training_classes(train, 0.25, 3, sampling(part)) for part in (1, 2, 3, 4)]
    held_out = [set(held.classes) for _, held in parts]
    assert sorted(map(len, held_out)) == [53, 53, 53, 54]
    assert set.union(*held_out) == set(train.classes)
    for (kept, _), held in zip(parts, held_out, strict=True):
        assert set(kept.classes) == set(train.classes) - held
    with pytest.raises(UserError, match="there are 4 parts"):
        split_training_classes(train, 0.25, 3, sampling(5))


@pytest.mark.parametrize(("classes", "expected"), [(12, 12), (25, 20)])
def test_a_batch_has_20_classes_or_all_where_there_are_fewer(classes, expected):
    labels = np.arange(classes).repeat(4)
    train = ImageDataset(images=np.zeros((len(labels), 8, 8, 3), np.uint8), labels=labels)
    batch = make_sampler(batches_of(classes_per_batch=0), train, seed=0).batch(0)
    assert (len(batch), len(set(labels[batch]))) == (2 * expected, expected)


def with_texts(tmp_path, *rows, columns="path,split,text"):
    """The settings of a run on a list with texts."""
    pictures(tmp_path, [f"{name}.jpg" for name in "abcde"])
    table(tmp_path / "list.csv", [columns, *rows])
    place = {"dataset": "list", "data_dir": str(tmp_path / "list.csv")}
    return DataSettings(**place, text_backbone="bytes", sampling="texts", batch_size=3)


def test_images_with_texts_and_without_labels_are_measured_by_texts_alone(tmp_path):
    rows = ["a.jpg,train,one", "a.jpg,train,two", "b.jpg,train,one", "c.jpg,train,three"]
    settings = with_texts(tmp_path, *rows, "d.jpg,test,four", "d.jpg,test,five", "e.jpg,test,six")
    splits = load_splits(settings, seed=0)
    assert splits.train.texts.tolist() == ["one", "two", "one", "three"]
    assert splits.train.labels.tolist() == [0, 0, 1, 2]
    run_data.check_measurable(splits, (1,))
    assert not splits.searched_by_images("test")
    assert [len(splits.test), splits.views["test"].texts] == [2, ["five", "four", "six"]]
    sampler = make_sampler(settings, splits.train, seed=0)
    for step in range(5):
        assert sorted(splits.train.texts[sampler.batch(step)]) == ["one", "three", "two"]
    with pytest.raises(UserError, match="3 different texts"):
        make_sampler(dataclasses.replace(settings, batch_size=4), splits.train, seed=0)


def test_an_image_with_several_texts_is_measured_once_and_an_empty_text_refused(tmp_path):
    rows = [
        "a.jpg,train,x,one",
        "b.jpg,train,y,one",
        "c.jpg,test,z,two",
        "c.jpg,test,z,three",
        "d.jpg,test,z,two",
    ]
    splits = load_splits(with_texts(tmp_path, *rows, columns="path,split,label,text"), seed=0)
    assert [len(splits.test), splits.test.num_classes, len(set(splits.test.names))] == [2, 1, 2]
    assert splits.searched_by_images("test")
    assert splits.views["test"].texts == ["three", "two"]
    with pytest.raises(UserError, match="line 3"):
        load_splits(
            with_texts(tmp_path, "a.jpg,train,one", "b.jpg,train, ", "c.jpg,test,two"), seed=0
        )


def stored(tmp_path, **changes):
    """A file of 12 vectors of 4 classes."""
    arrays = {
        "embeddings": np.arange(36, dtype=np.float32).reshape(12, 3),
        "labels": np.repeat([5, 2, 9, 7], 3),
    }
    path = tmp_path / "vectors.npz"
    np.savez(
        path, **{name: array for name, array in {**arrays, **changes}.items() if array is not None}
    )
    return str(path)


def test_the_last_classes_of_stored_vectors_are_the_test_classes(tmp_path):
    path = stored(tmp_path)
    splits = load_splits(DataSettings(features=path, holdout_classes=0.3), seed=0)
    assert splits.test.classes.tolist() == [7, 9]
    assert splits.train.num_classes == splits.validation.num_classes == 1
    rows = [
        int(name) for part in (splits.train, splits.validation, splits.test) for name in part.names
    ]
    assert sorted(rows) == list(range(12))
    found = np.concatenate(
        [part.vectors for part in (splits.train, splits.validation, splits.test)]
    )
    np.testing.assert_array_equal(found, np.arange(36, dtype=np.float32).reshape(12, 3)[rows])
    splits = load_splits(DataSettings(features=path, dataset_options="test_fraction=0.25"), seed=0)
    assert (splits.train.num_classes, splits.test.classes.tolist()) == (3, [9])
    for changes, says in (
        ({"labels": None}, "no labels"),
        ({"embeddings": np.full((12, 3), np.nan)}, "not finite"),
    ):
        with pytest.raises(UserError, match=says):
            load_splits(DataSettings(features=stored(tmp_path, **changes)), seed=0)


def test_vectors_of_texts_that_are_not_finite_are_refused(tmp_path):
    texts = np.ones((12, 2), np.float32)
    texts[4] = np.inf
    np.save(tmp_path / "texts.npy", texts)
    with pytest.raises(UserError, match=r"1 vector is not finite, the first in row 4"):
        vector_splits(stored(tmp_path), texts=str(tmp_path / "texts.npy"))


def test_default_ks_are_measured_as_far_as_there_are_images(tmp_path, caplog):
    splits = load_splits(DataSettings(features=stored(tmp_path), holdout_classes=0), seed=0)
    with caplog.at_level("WARNING", logger="absl"):
        run_data.check_measurable(splits, (1, 2, 4, 8))
    assert "K = 1,2,4 alone" in caplog.text
    with pytest.raises(UserError, match="compared with 5"):
        run_data.check_measurable(splits, (1, 8))


def test_roles_of_stored_vectors_are_the_split_and_their_paths_the_names(tmp_path):
    roles = np.array(["train"] * 6 + ["query"] * 3 + ["gallery"] * 3)
    names = np.array([f"{row}.jpg" for row in range(12)])
    train, test = vector_splits(stored(tmp_path, roles=roles, names=names), "photos").values()
    assert train.names == tuple(f"photos/{row}.jpg" for row in range(6))
    assert test.is_query.tolist() == [True] * 3 + [False] * 3


def test_given_pairs_of_stored_vectors_go_by_their_names(tmp_path):
    names = np.array([f"{row}.jpg" for row in range(12)])
    roles = np.array(["train", "test"] * 6)
    (tmp_path / "pairs.csv").write_text(
        "a,b,similar\n0.jpg,2.jpg,1\n2.jpg,4.jpg,0\n1.jpg,5.jpg,1\n0.jpg,1.jpg,0\n"
    )
    train, test = vector_splits(
        stored(tmp_path, labels=None, roles=roles, names=names), pairs="pairs.csv"
    ).values()
    assert train.pairs.scored().tolist() == [[0, 1, 1], [1, 2, 0]]
    assert test.pairs.scored().tolist() == [[0, 2, 1]]
    assert (train.num_classes, test.num_classes) == (5, 5)
    assert dataset_protocol(np.zeros((6, 1)), test)["relevance"].matches.tolist() == [
        1,
        0,
        1,
        0,
        0,
        0,
    ]


def test_pairs_and_label_rows_decide_what_belongs_together():
    given = PairList(np.array([[0, 5], [1, 2]]), np.array([1, 0]))
    plain = ImageDataset(images=np.zeros((6, 2, 2, 3), np.uint8), labels=[0, 0, 1, 1, 2, 2])
    with_pairs = dataclasses.replace(plain, pairs=given)
    assert plain.relation is None
    np.testing.assert_array_equal(with_pairs.relation.pairs, [[0, 5, 1], [1, 2, 0]])
    sets = dataclasses.replace(plain, label_rows=np.eye(6, 3))
    assert sets.relation is shares_a_label
    levels = dataclasses.replace(sets, protocol=Protocol(("recall",), levels=sets.label_rows))
    assert levels.relation.column == 0
    settings = batches_of(sampling="pairs", batch_size=4)
    assert sorted(make_sampler(settings, with_pairs, seed=0).batch(0)) == [0, 1, 2, 5]
    with pytest.raises(UserError, match="no given pairs"):
        make_sampler(settings, plain, seed=0)
    with pytest.raises(UserError, match="no given pair or triplet"):
        with_pairs.take([0, 1]).relation  # noqa: B018
    view = TrainTransform(resize=2, image_size=2)
    ((_, ids),) = training_batches(with_pairs, ShuffleSampler(6, 6), view, num_steps=1)
    assert sorted(ids.numpy()) == list(range(6))
    ((_, rows),) = training_batches(sets, ShuffleSampler(6, 6), view, num_steps=1)
    assert rows.shape == (6, 3)


@pytest.mark.slow
def test_images_that_a_file_says_to_drop_are_left_out_and_recorded(tmp_path):
    few = DataSettings(dataset="glyphs", dataset_options="images_per_class=2")
    whole = load_splits(few, seed=0)
    names, others = whole.train.names, whole.test.names
    path = tmp_path / "audit.csv"
    path.write_text(f"image,action\n{names[3]},drop\n{names[4]},keep\n{others[0]},drop\n")
    splits = load_splits(dataclasses.replace(few, drop=str(path)), seed=0)
    assert splits.train.names == (*names[:3], *names[4:])
    assert splits.test.names == others
    assert splits.identity()["train"]["dropped"] == [names[3]]
    final = load_splits(dataclasses.replace(few, drop=str(path), final_of="measured"), seed=0)
    assert final.train.names == (*names[:3], *names[4:], *others[1:])
    assert final.identity()["train"]["dropped"] == sorted([names[3], others[0]])
    path.write_text("image,action\nnone.jpg,drop\n")
    with pytest.raises(UserError, match=r"none\.jpg"):
        load_splits(dataclasses.replace(few, drop=str(path)), seed=0)


def test_vectors_of_texts_are_paired_by_name_or_refused(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(12, 5)).astype(np.float32)
    names = np.array([f"{row}.jpg" for row in range(12)])
    order = rng.permutation(12)
    path = tmp_path / "texts.npz"

    def tokens(image_names, **columns):
        np.savez(path, embeddings=vectors[order], **columns)
        named = {} if image_names is None else {"names": image_names}
        splits = vector_splits(stored(tmp_path, **named), texts=str(path))
        return np.concatenate([splits["train"].tokens, splits["test"].tokens])

    np.testing.assert_array_equal(tokens(names, names=names[order]), vectors)
    for image_names, columns in ((names, {}), (None, {"names": names[order]}), (None, {})):
        np.testing.assert_array_equal(tokens(image_names, **columns), vectors[order])
    # Repeated names have an order alone.
    repeated = np.repeat(names[:6], 2)
    np.testing.assert_array_equal(tokens(repeated, names=repeated), vectors[order])
    for text_names in (repeated[order], np.char.add("x", names)):
        with pytest.raises(UserError, match=r"texts\.npz names .* paired by the name of their ima"):
            tokens(names, names=text_names)


@pytest.mark.parametrize("choice", ["shuffle", "class_balanced", "whole_classes"])
def test_batches_of_a_single_class_are_refused(choice):
    images = np.zeros((8, 2, 2, 3), np.uint8)
    train = ImageDataset(images=images, labels=np.full(8, 3))
    with pytest.raises(UserError, match="training needs images of two classes or more"):
        make_sampler(batches_of(sampling=choice, batch_size=4), train, 0)


def test_dropped_images_do_not_train_and_those_that_measure_stay(tmp_path):
    names = [f"{label}/{number}.jpg" for label in "abcd" for number in range(3)]
    pictures(tmp_path, names)
    splits = [data.load("folder", str(tmp_path), split) for split in ("train", "test")]

    def left_out(*rows):
        table(tmp_path / "audit.csv", ["image,action", *rows])
        return leave_out(*splits, str(tmp_path / "audit.csv"), str(tmp_path))

    kept, dropped = left_out("a/1.jpg,drop", "b/2.jpg,keep", "d/0.jpg,drop")
    assert dropped == ("a/1.jpg",)
    assert kept.labels.tolist() == [0, 0, 1, 1, 1]
    assert "a/1.jpg" not in "".join(kept.images.names)
    with pytest.raises(UserError, match=r"1 image that .* such as 'a/9\.jpg'"):
        left_out("a/9.jpg,drop")
    with pytest.raises(UserError, match="leaves no training image"):
        left_out(*(f"{name},drop" for name in names[:6]))

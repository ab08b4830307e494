"""Proxies that are of no use, planted."""

import numpy as np
import pytest

from tfdml.losses import AMSoftmaxLoss
from tfdml.objectives import ProxyLoss
from tfdml.training.watching.proxies import ProxyWatch

CLASSES = 6


def watch_of(proxies, per_class=1):
    objective = ProxyLoss(AMSoftmaxLoss(), num_classes=CLASSES, proxies_per_class=per_class, name="am")
    objective.build({"embedding": (None, proxies.shape[-1])})
    objective.class_proxies.proxies.assign(proxies)
    return ProxyWatch(objective)


def test_idle_is_the_nearest_of_none_of_twenty_images_of_its_class():
    proxies = np.eye(CLASSES, dtype=np.float32)
    proxies[4] = -1  # where no image is
    watch = watch_of(proxies)
    images, labels = np.repeat(np.eye(CLASSES), 5, axis=0), np.repeat(np.arange(CLASSES), 5)
    for _ in range(3):
        watch.follow(images, labels)
        assert watch.idle().tolist() == []
    watch.follow(images[labels != 5], labels[labels != 5])
    # Class 5 has been drawn 15 times, its proxy being used or not.
    assert watch.idle().tolist() == [4]
    assert watch.dead() == (
        "1 proxies (classes 4) are the nearest of none of the last 20 sampled images of their classes, of the 6 "
        "proxies of am"
    )
    watch.follow(-np.ones((1, CLASSES)), np.array([0]))
    assert watch.idle().tolist() == []
    assert watch.dead() == ""


def test_several_proxies_of_a_class_wait_for_as_many_more_images():
    proxies = np.stack([np.eye(CLASSES), -np.eye(CLASSES)], axis=1).astype(np.float32)
    watch = watch_of(proxies, per_class=2)
    for _ in range(2):
        assert watch.idle().tolist() == []
        watch.follow(np.repeat(np.eye(CLASSES), 20, axis=0), np.repeat(np.arange(CLASSES), 20))
    assert watch.idle().tolist() == [1, 3, 5, 7, 9, 11]


def test_few_idle_proxies_of_many_are_no_alarm():
    # One of twelve.
    proxies = np.stack([np.eye(CLASSES), np.eye(CLASSES) + 0.1 * np.roll(np.eye(CLASSES), 1, 1)], 1).astype(np.float32)
    watch = watch_of(proxies, per_class=2)
    images = np.concatenate([proxies[:, 0], proxies[1:, 1]])
    labels = np.concatenate([np.arange(CLASSES), np.arange(1, CLASSES)])
    for _ in range(40):
        watch.follow(images, labels)
    assert watch.idle().tolist() == [1]
    assert watch.dead() == ""


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_unmoved_has_not_turned_whatever_its_length(decay):
    rng = np.random.default_rng(0)
    proxies = rng.normal(size=(CLASSES, 4)).astype(np.float32)
    watch = watch_of(proxies)
    assert watch.dead() == ""
    watch.begin_epoch()
    moved = proxies + 0.1 * rng.normal(size=proxies.shape).astype(np.float32)
    moved[2] = decay * proxies[2]
    watch.objective.class_proxies.proxies.assign(moved)
    assert watch.unmoved().tolist() == [2]
    assert watch.dead() == "1 proxies (classes 2) got no gradient in an epoch, of the 6 proxies of am"


def test_where_none_moves_none_is_told():
    watch = watch_of(np.eye(CLASSES, dtype=np.float32))
    watch.begin_epoch()
    assert watch.dead() == ""

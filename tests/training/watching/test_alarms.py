"""When an alarm is raised, and when not."""

import pytest

from tfdml.training.watching import alarms


def sample(step, variance=0.5, rank=20.0, classes=25, norm=1.0, **norms):
    return {
        "step": step,
        "variance": variance,
        "effective_rank": rank,
        "classes": classes,
        "gradient_norm": {"backbone": norm, **norms},
    }


def along(*samples):
    """The alarms of a run that looks at these."""
    seen, found = [], []
    for one in samples:
        found += alarms.new_alarms(one, seen)
        seen.append(one)
    return [(alarm["kind"], alarm["step"], alarm["well"]) for alarm in found]


@pytest.mark.parametrize(
    ("change", "raised"),
    [
        ({"variance": 0.0501}, False),
        ({"variance": 0.0499}, True),
        ({"rank": 5.01}, False),
        ({"rank": 4.99}, True),
        # Of 5 classes, each at a point, 4 directions are left.
        ({"rank": 1.01, "classes": 5}, False),
        ({"rank": 1.0, "classes": 6}, True),
        ({"rank": 1.0, "classes": 2}, False),
    ],
)
def test_collapse_is_measured_by_the_best_so_far(change, raised):
    best, later = sample(100), sample(200, variance=0.3, rank=12.0)
    assert along(best, later, sample(300, **change)) == ([("collapse", 300, 200)] if raised else [])


def test_a_point_is_a_collapse_at_the_first_look():
    (found,) = alarms.new_alarms(sample(100, variance=1e-8, rank=1.0), [])
    assert found["line"] == (
        "collapse at step 100 (at the first look): the embeddings of a batch have a variance of 1.0e-08: they are one "
        "point; lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another mining)"
    )


@pytest.mark.parametrize(("norms", "raised"), [((1, 2, 3, 19), False), ((1, 2, 3, 21), True), ((1, 2, 99), False)])
def test_explosion_is_ten_times_the_running_median(norms, raised):
    samples = [sample(step, norm=norm) for step, norm in enumerate(norms)]
    assert along(*samples) == ([("explosion", len(norms) - 1, len(norms) - 2)] if raised else [])


def test_a_loss_that_is_often_0_does_not_explode():
    assert along(*[sample(step, norm=norm) for step, norm in enumerate([1.0, 0, 0, 0, 0, 0.5, 0, 0, 0.9])]) == []
    assert along(*[sample(step, norm=norm) for step, norm in enumerate([1.0, 0, 0, 0, 0, 1.1])]) == [
        ("explosion", 5, 4)
    ]


def test_only_the_last_twenty_count_and_the_part_is_named():
    large = [sample(step, norm=100.0, projection=1.0) for step in range(10)]
    small = [sample(step, norm=1.0, projection=1.0) for step in range(10, 30)]
    (found,) = alarms.new_alarms(sample(30, norm=11.0, projection=10.0), [{**s, "alarms": []} for s in large + small])
    assert found["seen"] == "the gradient norm of the backbone is 11, 1 in the median of 20"


def test_what_lasts_is_told_once_and_again_when_it_returns():
    good, bad = {"variance": 0.5}, {"variance": 0.01}
    states = [good, bad, bad, good, bad]
    found = along(*[sample(100 * step, **state) for step, state in enumerate(states)])
    assert found == [("collapse", 100, 0), ("collapse", 400, 300)]

"""From --objectives to objectives."""

import pytest

from tfdml.errors import UserError
from tfdml.kernels import GaussianMixture, Laplace
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.mining import GivenPairs, shares_a_label
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import JointRepresentationSimilarity, MetricLoss, ProxyLoss
from tfdml.objectives.terms import build_objectives, check_objectives
from tfdml.registry import registered


def test_every_public_loss_and_objective_can_be_named():
    assert {"am_softmax", "norm_softmax", "contrastive", "binomial_deviance"} <= set(registered("loss"))
    assert "joint_representation_similarity" in registered("loss")
    assert not {"objective", "metric", "proxy"} & set(registered("loss"))


def test_jrd_as_the_paper_has_it():
    proxy, jrs = build_objectives("am_softmax(scale=20, margin=0.05) + 0.4 * jrs", num_classes=7)
    assert isinstance(proxy, ProxyLoss)
    assert isinstance(proxy.loss, AMSoftmaxLoss)
    assert (proxy.loss.scale, proxy.loss.margin, proxy.class_proxies.num_classes) == (20.0, 0.05, 7)
    assert isinstance(jrs, JointRepresentationSimilarity)
    assert (proxy.weight, jrs.weight, jrs.levels) == (1.0, 0.4, ("pooled", "embedding", "class"))


def test_terms_that_provide_representations_come_first():
    names = [objective.name for objective in build_objectives("jrs + contrastive + am_softmax", 3)]
    assert names == ["am_softmax", "jrs", "contrastive"]


def test_arguments_reach_the_loss_its_wrapper_and_its_kernels():
    contrastive, proxy, jrs = sorted(
        build_objectives(
            "contrastive(margin=0.5, representation=projection) + norm_softmax(scale=9, proxies_per_class=2)"
            " + jrs(levels=[pooled, embedding], kernels=[laplace, gaussian_mixture(multipliers=[1])])".replace(
                "[laplace,", "[laplace(),"
            ),
            4,
        ),
        key=lambda objective: ["contrastive", "norm_softmax", "jrs"].index(objective.name),
    )
    assert isinstance(contrastive, MetricLoss)
    assert isinstance(contrastive.loss, ContrastiveLoss)
    assert (contrastive.loss.margin, contrastive.representation) == (0.5, "projection")
    assert proxy.class_proxies.proxies_per_class == 2
    assert isinstance(jrs.kernels["pooled"], Laplace)
    assert isinstance(jrs.kernels["embedding"], GaussianMixture)
    assert jrs.kernels["embedding"].multipliers == (1.0,)


def test_miners_are_named_alone_or_with_arguments():
    terms = build_objectives(
        "contrastive(mining=batch_hard) + nt_xent(temperature=0.1, mining=easy_positive(negatives=all))"
        " + triplet(margin=soft, mining=hard) + horde(loss=contrastive(mining=angular(angle_degrees=30)))"
        " + infonce(mining=angular, name=b)",
        3,
    )
    horde, contrastive, nt_xent, triplet, angular = terms
    assert repr(contrastive.loss.mining) == "BatchHardMiner()"
    assert (nt_xent.loss.temperature, nt_xent.loss.mining.negatives) == (0.1, "all")
    assert (triplet.loss.margin, triplet.loss.mining) == ("soft", "hard")
    assert horde.terms[0].loss.mining.angle_degrees == 30.0
    assert angular.loss.mining.angle_degrees == 20.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contrastive(mining=hardest)", "contrastive: mining must be one of all, angular"),
        ("contrastive(mining=hard_aware(fraction=2))", "hard_aware: fraction must be above 0 and at most 1, not 2"),
        ("nonsense", "unknown loss or objective 'nonsense'; one of"),
        ("0 * contrastive", "every term has the factor 0"),
        ("am_softmax(marginn=1)", "no argument 'marginn'"),
        ("jrs(kernels=sinc())", "unknown kernel or loss 'sinc'"),
        ("jrs(kernels=[laplace, laplace])", "jrs: 2 kernels for 3 levels"),
        ("jrs(unit_length=pool)", "jrs: unit_length=['pool'], but the levels are"),
        ("jrs(kernels=laplace(multiplier=-1))", "multiplier must be positive"),
    ],
)
def test_a_wrong_term_is_one_line(text, says):
    with pytest.raises(UserError) as caught:
        build_objectives(text, 3)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["am_softmax(num_classes=3)", "jrs(kernels=laplace(multiplier=-1))", "horde(loss=contrastiv)", "0 * am_softmax"],
)
def test_a_wrong_name_is_found_before_the_classes_are_known_by_the_same_line(text):
    with pytest.raises(UserError) as early:
        check_objectives(text)
    with pytest.raises(UserError) as late:
        build_objectives(text, 3)
    assert str(early.value) == str(late.value)


def test_losses_over_pairs_take_relations():
    text = "contrastive(positives=same_label(column=1)) + xbm(loss=triplet(positives=jaccard(threshold=0.3)))"
    by_make, memory = build_objectives(text + " + nt_xent", 3, shares_a_label, 5)[:2]
    assert by_make.loss.positives.column == 1
    assert memory.loss.positives.threshold == 0.3
    assert memory.label_columns == 5
    *_, other = build_objectives(text + " + nt_xent(positives=shares_a_label)", 3)
    assert other.loss.positives is shares_a_label
    check_objectives(text)
    relation = GivenPairs([(0, 1, 1)])
    assert all(
        term.positives is relation
        for term in build_objectives("multi_similarity + horde(loss=contrastive)", 3, relation)
    )


def test_a_learner_takes_the_sum_that_the_command_takes():
    embedder = Embedder("conv4(width=4)", embedding_dim=4, image_size=16)
    learner = MetricLearner(embedder, "am_softmax(margin=0.05) + 0.4 * jrs", num_classes=3)
    assert [(each.name, float(each.weight)) for each in learner.objectives] == [("am_softmax", 1), ("jrs", 0.4)]
    assert learner.objectives[0].num_classes == 3
    assert [each.name for each in MetricLearner(embedder, "contrastive + ecaml").objectives] == ["contrastive", "ecaml"]
    with pytest.raises(UserError, match="am_softmax: it needs `num_classes`"):
        MetricLearner(embedder, "am_softmax")

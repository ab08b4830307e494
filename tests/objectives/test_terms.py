"""From --objectives to objectives."""

import pytest

from tfdml.errors import UserError
from tfdml.losses import AMSoftmaxLoss
from tfdml.mining import GivenPairs, shares_a_label
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import JointRepresentationSimilarity, ProxyLoss
from tfdml.objectives.terms import build_objectives, check_objectives


def test_jrd_as_the_paper_has_it():
    proxy, jrs = build_objectives("am_softmax(scale=20, margin=0.05) + 0.4 * jrs", num_classes=7)
    assert isinstance(proxy, ProxyLoss)
    assert isinstance(proxy.loss, AMSoftmaxLoss)
    assert (proxy.loss.scale, proxy.loss.margin, proxy.class_proxies.num_classes) == (20.0, 0.05, 7)
    assert isinstance(jrs, JointRepresentationSimilarity)
    assert (proxy.weight, jrs.weight, jrs.levels) == (1.0, 0.4, ("pooled", "embedding", "class"))


def test_miners_are_named_alone_or_with_arguments():
    terms = build_objectives(
        "contrastive(mining=batch_hard) + nt_xent(temperature=0.1, "
        "mining=easy_positive(negatives=all))"
        " + triplet(margin=soft, mining=hard) + "
        "horde(loss=contrastive(mining=angular(angle_degrees=30)))"
        " + infonce(mining=angular, name=b)"
        " + contrastive(mining=batch_easy_hard(positives=hard, negatives=all), name=c)",
        3,
    )
    horde, contrastive, nt_xent, triplet, angular, hardest = terms
    assert repr(contrastive.loss.mining) == "BatchHardMiner()"
    assert (nt_xent.loss.temperature, nt_xent.loss.mining.negatives) == (0.1, "all")
    assert (triplet.loss.margin, triplet.loss.mining) == ("soft", "hard")
    assert horde.terms[0].loss.mining.angle_degrees == 30.0
    assert angular.loss.mining.angle_degrees == 20.0
    assert (hardest.loss.mining.positives, hardest.loss.mining.negatives) == ("hard", "all")


def test_losses_over_pairs_take_relations():
    text = (
        "contrastive(positives=same_label(column=1)) + "
        "xbm(loss=triplet(positives=jaccard(threshold=0.3)))"
    )
    by_make, memory = build_objectives(text + " + nt_xent", 3, shares_a_label, 5)[:2]
    assert by_make.loss.positives.column == 1
    assert memory.loss.positives.threshold == 0.3
    assert memory.label_columns == 5
    *_, other = build_objectives(text + " + nt_xent(positives=shares_a_label)", 3)
    assert other.loss.positives is shares_a_label
    check_objectives(text)


def test_the_relation_of_the_data_is_an_argument_of_each_loss():
    relation, text = GivenPairs([(0, 1, 1)]), "horde(loss=contrastive, orders=2) + clip"
    terms = build_objectives(f"multi_similarity + {text} + xbm(loss=nt_xent, size=8)", 3, relation)
    assert [term.positives is relation for term in terms] == [True] * 4
    horde, *_, memory = terms
    # The losses within are made with it, and the terms are saved with it.
    assert horde.terms[0].loss.positives is relation
    assert memory.get_config()["loss"]["config"]["positives"]["class_name"] == "GivenPairs"
    for text in ("am_softmax", "xbm(loss=contrastive) + ecaml", "instance"):
        with pytest.raises(UserError, match="learns from classes"):
            build_objectives(text, 3, relation)
    with pytest.raises(UserError, match="means of classes"):
        build_objectives("prism(loss=contrastive)", 3, relation)


def test_a_learner_takes_the_sum_that_the_command_takes():
    embedder = Embedder("conv4(width=4)", embedding_dim=4, image_size=16)
    learner = MetricLearner(embedder, "am_softmax(margin=0.05) + 0.4 * jrs", num_classes=3)
    assert [(each.name, float(each.weight)) for each in learner.objectives] == [
        ("am_softmax", 1),
        ("jrs", 0.4),
    ]
    assert learner.objectives[0].num_classes == 3
    assert [each.name for each in MetricLearner(embedder, "contrastive + ecaml").objectives] == [
        "contrastive",
        "ecaml",
    ]
    with pytest.raises(UserError, match="am_softmax: it needs num_classes"):
        MetricLearner(embedder, "am_softmax")


def test_a_loss_has_twenty_terms_at_most():
    assert len(build_objectives("+".join(["contrastive"] * 20), num_classes=2)) == 20
    with pytest.raises(UserError, match="21 terms; 20 is the most"):
        check_objectives("+".join(["contrastive"] * 21))

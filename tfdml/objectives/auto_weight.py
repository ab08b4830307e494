"""A weight of a term that is measured in training, not given."""

from tfdml.arguments import integer, number
from tfdml.saving import Composed


class AutoWeight(Composed):
    """In the place of an objective's `weight`: makes its gradient this share of that of the terms with numbers.

    weight = share / max over the embedder's parts p of  median over the samples of  |grad_p term| / |grad_p base|

    The callback `tfdml.callbacks.AutoWeights` measures it in the first steps; see
    `tfdml.models.auto_weights.WeightMeasurement` for the rule.

    Args:
        share: The length of the weighted term's gradient, as a share of the base's. By default 0.03: where 0.3 cost
            energy confusion and density points on unseen classes, 0.03 gained some or left them (docs/small_runs.md).
        steps: The weight is measured during this many steps, and stays as it is from then on.

    Raises:
        ValueError: `share` is not a positive number, or `steps` not a positive integer.

    Example:
        >>> objectives = [ContrastiveLoss(), EnergyConfusion(weight=AutoWeight(share=0.25))]
        >>> MetricLearner(embedder, objectives).term_weights()  # before the first step
        {'contrastive_loss': 1.0, 'energy_confusion': 0.0}
    """

    def __init__(self, share=0.03, steps=100):
        self.share = number("share", share, above=0)
        self.steps = integer("steps", steps, at_least=1)

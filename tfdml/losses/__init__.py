"""Stateless losses, one family a file; each is `loss(labels, y_pred)`, and `loss.call` gives one value per image."""

from tfdml.losses.classification import AMSoftmaxLoss, NormSoftmaxLoss
from tfdml.losses.contrastive import BinomialDevianceLoss, ContrastiveLoss

__all__ = ["AMSoftmaxLoss", "BinomialDevianceLoss", "ContrastiveLoss", "NormSoftmaxLoss"]

"""The rows of the studies: their runs, and the rows they are compared with."""

from __future__ import annotations

import dataclasses

CONTRASTIVE = "contrastive(margin=1, distance=sqeuclidean, reduction=sum)"
AM_SOFTMAX = "am_softmax(scale=20, margin=0.1)"
WHITENED = "--head=whitened(power=0.5, shrinkage=0.1)"


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of a study.

    Args:
        name: As in tables.
        flagfile: Its settings, below `configs/small`.
        base: The row it is compared with: the same without the method. Empty: it is a base itself.
        flags: What differs from the flag file.
    """

    name: str
    flagfile: str
    base: str = ""
    flags: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The flags of its run, without those of place and seed."""
        return [f"--flagfile=configs/small/{self.flagfile}.flags", *self.flags]


def _with(base: str, *terms: str) -> tuple[str]:
    return (f"--objectives={' + '.join([base, *terms])}",)


OMNIGLOT_CONTRASTIVE = ("omniglot_contrastive", "contrastive")
# The weights on Omniglot.
TERMS = {
    "HORDE": "42 * horde(loss=contrastive, orders=3, dim=256)",
    "ECAML": "3.3 * ecaml(form=log_of_mean, representation=projection)",
    "DML-DA": "89 * density(normalize_reference=true)",
}

# Ten seeds of the methods and their bases: docs/results.md. Nothing is held out, and the last epoch counts.
_LAST = ("--selection=last", "--holdout_classes=0", "--evaluate_every=0")
TEN_CARS196 = tuple(
    Row(name, f"cars_{flagfile}", base, ("--epochs=6", "--drop_epochs=4", *_LAST, *flags))
    for name, flagfile, base, *flags in (
        ("AMSoftmax", "am_softmax", ""),
        ("+ JRS", "jrd", "AMSoftmax"),
        ("contrastive", "contrastive", ""),
        ("+ HORDE", "horde", "contrastive"),
        ("+ ECAML", "ecaml", "contrastive"),
        ("+ DML-DA", "dmlda", "contrastive"),
        # From the projection that RankMI begins with the boundary of its authors fits.
        ("margin", "margin", "", WHITENED, *_with("margin")),
        ("RankMI", "rankmi", "margin"),
    )
)
_NINE = ("--epochs=9", "--drop_epochs=6", *_LAST)
TEN_OMNIGLOT = (
    Row("AMSoftmax", "omniglot_contrastive", "", (*_with(AM_SOFTMAX), *_NINE)),
    Row("+ JRS", "omniglot_contrastive", "AMSoftmax", (*_with(f"{AM_SOFTMAX} + jrs"), *_NINE)),
    Row("contrastive", "omniglot_contrastive", "", _NINE),
    *(Row(f"+ {name}", *OMNIGLOT_CONTRASTIVE, (*_with(CONTRASTIVE, term), *_NINE)) for name, term in TERMS.items()),
    Row("margin", "omniglot_contrastive", "", (*_with("margin(beta=0.6)"), *_NINE)),
    Row("RankMI", "omniglot_contrastive", "margin", (*_with("rank_mi(negatives=all)"), *_NINE)),
)

# As many images as in the paper of JRD, with a larger network and larger images, for a GPU: docs/results.md.
_LONGER = (
    "--backbone=mobilenetv2",
    "--image_size=192",
    "--resize=220",
    "--epochs=50",
    "--drop_epochs=33",
    "--evaluate_every=10",
    "--deterministic=true",
)
LONG_CARS196 = tuple(
    dataclasses.replace(row, flags=(*row.flags, *_LONGER, "--steps_per_epoch=80")) for row in TEN_CARS196
)

STUDIES = {
    "ten_cars196": TEN_CARS196,
    "ten_omniglot": TEN_OMNIGLOT,
    "long_cars196": LONG_CARS196,
}

"""The rows of the studies: their runs, and the rows they are compared with."""

from __future__ import annotations

import dataclasses
import itertools

CONTRASTIVE = "contrastive(margin=1, distance=sqeuclidean, reduction=sum)"
AM_SOFTMAX = "am_softmax(scale=20, margin=0.1)"
WHITENED = "--head=whitened(power=0.5, shrinkage=0.1)"
# V's root at 0, from which it began when these runs were made, and what else its flag file had then.
RANK_MI = "rank_mi(margin=0.2, negatives=all, initial_beta=0)"
AS_BEFORE = ("--head=linear", "--learning_rate=0.0001", "--projection_rate=0.001")
LONG = ("--epochs=24", "--drop_epochs=16")
BESIDE_LONG = ("cars_contrastive", "contrastive, 24 epochs")


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


def _objectives(text: str) -> str:
    return f"--objectives={text}"


def _with(base: str, *terms: str) -> tuple[str]:
    return (_objectives(" + ".join([base, *terms])),)


# JRD's regularizer and its baselines with the same kernels.
JOINT = {"JRS": "jrs", "joint MMD": "joint_mmd", "joint intra": "joint_intra"}


def _joint(flagfile: str, name: str, weight: float = 1) -> Row:
    """Return one of them, added to AMSoftmax."""
    prefix = "" if weight == 1 else f"{weight:g} "
    term = JOINT[name] if weight == 1 else f"{weight:g} * {JOINT[name]}"
    return Row(f"+ {prefix}{name}", flagfile, "AMSoftmax", _with(AM_SOFTMAX, term))


CARS196 = (
    Row("AMSoftmax", "cars_am_softmax"),
    Row("+ JRS", "cars_jrd", "AMSoftmax"),
    Row("contrastive, 12 epochs", "cars_contrastive"),
    Row("+ HORDE", "cars_horde", "contrastive, 12 epochs"),
    Row("contrastive, 24 epochs", "cars_contrastive", flags=LONG),
    Row("+ ECAML", "cars_ecaml", "contrastive, 24 epochs"),
    Row("+ DML-DA", "cars_dmlda", "contrastive, 24 epochs"),
    # With the boundary of its authors; its flag file has one that fits the untrained network.
    Row("margin", "cars_margin", flags=_with("margin")),
    Row("RankMI", "cars_rankmi", "margin", (*AS_BEFORE, *_with(RANK_MI))),
    # The JRD paper takes joint MMD with a weight of 0.1, where it has 1 for JRS.
    *(_joint("cars_am_softmax", name, weight) for weight in (1, 0.1) for name in ("joint MMD", "joint intra")),
    Row(
        "+ entropy",
        *BESIDE_LONG,
        (*LONG, _objectives(f"{CONTRASTIVE} + 100 * entropy")),
    ),
    Row("+ GOR", *BESIDE_LONG, (*LONG, _objectives(f"{CONTRASTIVE} + 100 * gor"))),
)

# The terms that can be added to any loss; `{}` is the weight. JRS needs the weights of classes that AMSoftmax has.
TERMS = {
    "HORDE": "{} * horde(loss=contrastive, orders=3, dim=256)",
    "ECAML": "{} * ecaml(form=log_of_mean, representation=projection)",
    "DML-DA": "{} * density(normalize_reference=true)",
    "entropy": "{} * entropy",
    "GOR": "{} * gor",
}
IDEAS = ("HORDE", "ECAML", "DML-DA")
# These give a term some 15 % of RankMI's gradient after an epoch on Omniglot.
BESIDE_RANK_MI = {"HORDE": 0.03, "ECAML": 0.05, "DML-DA": 0.3}


def _beside_rank_mi(flagfile: str, flags: tuple[str, ...]) -> tuple[Row, ...]:
    """Return RankMI with each of the others."""
    return tuple(
        Row(f"RankMI + {name}", flagfile, "margin", (*flags, *_with(RANK_MI, TERMS[name].format(weight))))
        for name, weight in BESIDE_RANK_MI.items()
    )


# As in its own flag file, at as many epochs as the others.
HORDE = f"horde(loss={CONTRASTIVE}, orders=3, dim=512)"
JRS_HORDE = _with(f"{AM_SOFTMAX} + jrs", TERMS["HORDE"].format(0.17))
CARS196 += (
    # Each term with its own flag file's weight.
    Row("+ HORDE, 24 epochs", *BESIDE_LONG, (*LONG, *_with(CONTRASTIVE, HORDE))),
    Row("+ HORDE + ECAML", *BESIDE_LONG, (*LONG, *_with(CONTRASTIVE, HORDE, TERMS["ECAML"].format(120)))),
    Row("+ HORDE + DML-DA", *BESIDE_LONG, (*LONG, *_with(CONTRASTIVE, HORDE, TERMS["DML-DA"].format(1000)))),
    Row(
        "+ ECAML + DML-DA",
        *BESIDE_LONG,
        (*LONG, *_with(CONTRASTIVE, TERMS["ECAML"].format(120), TERMS["DML-DA"].format(1000))),
    ),
    Row("+ JRS + HORDE", "cars_am_softmax", "AMSoftmax", JRS_HORDE),
    Row("AMSoftmax, 24 epochs", "cars_am_softmax", flags=LONG),
    Row("+ JRS, 24 epochs", "cars_jrd", "AMSoftmax, 24 epochs", LONG),
    Row(
        "+ JRS + HORDE, 24 epochs",
        "cars_am_softmax",
        "AMSoftmax, 24 epochs",
        (*LONG, *JRS_HORDE),
    ),
    *_beside_rank_mi("cars_rankmi", AS_BEFORE),
    Row("RankMI + JRS", "cars_rankmi", "margin", (*AS_BEFORE, *_with(RANK_MI, AM_SOFTMAX, "jrs"))),
)

OMNIGLOT_CONTRASTIVE = ("omniglot_contrastive", "contrastive")
# Every second step is of its statistics: as many steps of the embedder as the margin loss has.
ALTERNATING = ("--steps_per_epoch=200",)
BEST_ON_OMNIGLOT = {"HORDE": 85, "ECAML": 4, "DML-DA": 10}
OMNIGLOT = (
    Row("contrastive", "omniglot_contrastive"),
    # The first weight of each is that of Cars-196.
    *(
        Row(f"+ {weight:g} {name}", *OMNIGLOT_CONTRASTIVE, _with(CONTRASTIVE, TERMS[name].format(weight)))
        for name, weights in {"ECAML": (120, 12, 4, 1), "DML-DA": (1000, 100, 10)}.items()
        for weight in weights
    ),
    # Several methods, each with the weight at which it is best alone.
    *(
        Row(
            f"best of {', '.join(names)}",
            *OMNIGLOT_CONTRASTIVE,
            _with(CONTRASTIVE, *(TERMS[name].format(BEST_ON_OMNIGLOT[name]) for name in names)),
        )
        for count in (2, 3)
        for names in itertools.combinations(IDEAS, count)
    ),
    Row("AMSoftmax", "omniglot_contrastive", flags=_with(AM_SOFTMAX)),
    *(_joint("omniglot_contrastive", name) for name in JOINT),
    # As figure 5 of the JRD paper.
    *(_joint("omniglot_contrastive", name, weight) for name in JOINT for weight in (0.1, 0.01)),
    Row("margin", "omniglot_contrastive", flags=_with("margin")),
    Row("RankMI", "omniglot_contrastive", "margin", (*_with(RANK_MI), *ALTERNATING)),
    *_beside_rank_mi("omniglot_contrastive", ALTERNATING),
    Row("RankMI + JRS", "omniglot_contrastive", "margin", (*_with(RANK_MI, AM_SOFTMAX, "jrs"), *ALTERNATING)),
    # The contrastive loss with about three times the gradient of the class similarities.
    Row("both losses", "omniglot_contrastive", flags=_with(AM_SOFTMAX, f"0.011 * {CONTRASTIVE}")),
    Row("both + JRS", "omniglot_contrastive", "both losses", _with(f"{AM_SOFTMAX} + jrs", f"0.011 * {CONTRASTIVE}")),
)

# Ten seeds of the methods and their bases: docs/ten_seeds.md. Nothing is held out, and the last epoch counts.
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
    *(
        Row(f"+ {name}", *OMNIGLOT_CONTRASTIVE, (*_with(CONTRASTIVE, TERMS[name].format(weight)), *_NINE))
        for name, weight in {"HORDE": 42, "ECAML": 3.3, "DML-DA": 89}.items()
    ),
    Row("margin", "omniglot_contrastive", "", (*_with("margin(beta=0.6)"), *_NINE)),
    Row("RankMI", "omniglot_contrastive", "margin", (*_with("rank_mi(negatives=all)"), *ALTERNATING, *_NINE)),
)

# As many images as in the paper of JRD, with a larger network and larger images, for a GPU: docs/study.md.
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
    dataclasses.replace(row, flags=(*row.flags, *_LONGER, f"--steps_per_epoch={160 if row.name == 'RankMI' else 80}"))
    for row in TEN_CARS196
)

STUDIES = {
    "cars196": CARS196,
    "omniglot": OMNIGLOT,
    "ten_cars196": TEN_CARS196,
    "ten_omniglot": TEN_OMNIGLOT,
    "long_cars196": LONG_CARS196,
}

"""The rows of the studies: which run each is, and beside which it is judged."""

from __future__ import annotations

import dataclasses
import itertools

CONTRASTIVE = "contrastive(margin=1, distance=sqeuclidean, reduction=sum)"
AM_SOFTMAX = "am_softmax(scale=20, margin=0.1)"
LONG = ("--epochs=24", "--drop_epochs=16")
BESIDE_LONG = ("cars_contrastive", "contrastive, 24 epochs")


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of a study.

    Args:
        name: As in tables.
        flagfile: Its settings, below `configs/small`.
        base: The row it is judged beside: the same without the idea. Empty: it is a base itself.
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


CARS196 = (
    Row("AMSoftmax", "cars_am_softmax"),
    Row("+ JRS", "cars_jrd", "AMSoftmax"),
    Row("contrastive, 12 epochs", "cars_contrastive"),
    Row("+ HORDE", "cars_horde", "contrastive, 12 epochs"),
    Row("contrastive, 24 epochs", "cars_contrastive", flags=LONG),
    Row("+ ECAML", "cars_ecaml", "contrastive, 24 epochs"),
    Row("+ DML-DA", "cars_dmlda", "contrastive, 24 epochs"),
    Row("margin", "cars_margin"),
    Row("RankMI", "cars_rankmi", "margin"),
    Row("+ joint MMD", "cars_am_softmax", "AMSoftmax", (_objectives(f"{AM_SOFTMAX} + joint_mmd"),)),
    Row("+ joint intra", "cars_am_softmax", "AMSoftmax", (_objectives(f"{AM_SOFTMAX} + joint_intra"),)),
    Row(
        "+ entropy",
        *BESIDE_LONG,
        (*LONG, _objectives(f"{CONTRASTIVE} + 100 * entropy")),
    ),
    Row("+ GOR", *BESIDE_LONG, (*LONG, _objectives(f"{CONTRASTIVE} + 100 * gor"))),
)

# The terms that go beside a contrastive loss, each as loud as `auto` makes it.
TERMS = {
    "JRS": "auto * jrs",
    "HORDE": "auto * horde(loss=contrastive, orders=3, dim=256)",
    "ECAML": "auto * ecaml(form=log_of_mean, representation=projection)",
    "DML-DA": "auto * density(normalize_reference=true)",
    "entropy": "auto * entropy",
    "GOR": "auto * gor",
}
IDEAS = ("JRS", "HORDE", "ECAML", "DML-DA")


def _beside(flagfile: str, base: str, flags: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Each term beside the contrastive loss, and every pair of ideas."""
    chosen = [(name,) for name in TERMS] + list(itertools.combinations(IDEAS, 2))
    return tuple(
        Row(
            " ".join(f"+ auto {name}" for name in names),
            flagfile,
            base,
            (*flags, _objectives(" + ".join([CONTRASTIVE, *(TERMS[name] for name in names)]))),
        )
        for names in chosen
    )


CARS196 += _beside(*BESIDE_LONG, LONG)
OMNIGLOT = (
    Row("contrastive", "omniglot_contrastive"),
    *_beside("omniglot_contrastive", "contrastive"),
    # The numbers that were set by hand for Cars-196, to compare those of `auto` with.
    *(
        Row(f"+ {weight:g} {name}", "omniglot_contrastive", "contrastive", (_objectives(f"{CONTRASTIVE} + {term}"),))
        for name, weight in {"ECAML": 120, "DML-DA": 1000}.items()
        for term in [TERMS[name].replace("auto", str(weight))]
    ),
    Row("AMSoftmax", "omniglot_contrastive", flags=(_objectives(AM_SOFTMAX),)),
    *(
        Row(f"AMSoftmax + {name}", "omniglot_contrastive", "AMSoftmax", (_objectives(f"{AM_SOFTMAX} + {term}"),))
        for name, term in {"JRS": "jrs", "joint MMD": "joint_mmd", "joint intra": "joint_intra"}.items()
    ),
    Row("margin", "omniglot_contrastive", flags=(_objectives("margin"),)),
    # Every second step is of its statistics: as many steps of the embedder as the margin loss has.
    Row(
        "RankMI",
        "omniglot_contrastive",
        "margin",
        (_objectives("rank_mi(margin=0.2, negatives=all)"), "--steps_per_epoch=200"),
    ),
)

STUDIES = {"cars196": CARS196, "omniglot": OMNIGLOT}

"""The rows of the studies: which run each is, and beside which it is judged."""

from __future__ import annotations

import dataclasses

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

STUDIES = {"cars196": CARS196}

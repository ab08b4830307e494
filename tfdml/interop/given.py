"""What is given to a loss of pytorch-metric-learning beside its own arguments, and what of it can be expressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tfdml.errors import UserError
from tfdml.interop.normalized import NormalizedLoss
from tfdml.interop.pml_parts import Part, make_part, matrix_of
from tfdml.mining import BatchEasyHardMiner, BatchHardMiner, Miner


def _easy_hard(miner: Part) -> Miner:
    choices = (miner.pos_strategy, miner.neg_strategy)
    return BatchEasyHardMiner(*("semi_hard" if choice == "semihard" else choice for choice in choices))


#: Miners of pairs, and what makes ours of them.
PAIR_MINERS: dict[str, Callable[[Part], Miner]] = {
    "BatchEasyHardMiner": _easy_hard,
    "BatchHardMiner": lambda miner: BatchHardMiner(),
}


class Given(NamedTuple):
    """The loss's name, and its distance, reducer and miner where they are given."""

    name: str
    parts: dict[str, Part]

    def refuse(self, what: str, nearest: str) -> UserError:
        """The error that says what cannot be expressed."""
        return UserError(f"{self.name}: {what} has no equal in tfdml; nearest: {nearest}")

    def part(self, kind: str, default: str, **arguments: Any) -> Part:
        """The distance or reducer, or the loss's own where none is given."""
        return self.parts.get(kind) or make_part(default, arguments)

    def matrix(self, default: str = "LpDistance") -> tuple[str, bool]:
        """Our name of the distance, and whether embeddings are normalised before."""
        return matrix_of(self.name, self.part("distance", default))

    def only_distance(self, name: str, **arguments: Any) -> None:
        """Refuse any distance but the loss's own."""
        own = make_part(name, arguments)
        given = self.part("distance", name, **arguments)
        if given != own and matrix_of(self.name, given) != matrix_of(self.name, own):
            written = ", ".join(f"{key}={value}" for key, value in given.arguments.items())
            raise self.refuse(f"the distance {given.name}({written})", f"the loss's own, {name}")

    def reduction(self, default: str, *others: str) -> str:
        """The reducer's name, of those that the loss can have: `default`, `others` and the sum."""
        name = self.part("reducer", default).name
        allowed = (default, *others, "SumReducer")
        if name not in allowed:
            raise self.refuse(f"the reducer {name}", ", ".join(allowed))
        return name

    def keras_reduction(self, default: str, *others: str) -> str:
        """As Keras calls it: the sum, or a mean."""
        return "sum" if self.reduction(default, *others) == "SumReducer" else "sum_over_batch_size"

    def no_miner(self) -> None:
        """Refuse any miner."""
        if "miner" in self.parts:
            raise self.refuse(f"the miner {self.parts['miner'].name}", "the loss without a miner")

    def mining(self, default: str) -> str | Miner:
        """Our `mining` for a miner of pairs, which orders them by the loss's distance or by one of the same order.

        Args:
            default: The loss's own distance.
        """
        if "miner" not in self.parts:
            return "all"
        miner, distance = self.parts["miner"], self.part("distance", default)
        # On normalised vectors all distances have one order.
        alike = miner.name in PAIR_MINERS and (
            miner.distance == distance or (_on_unit_vectors(miner.distance) and _on_unit_vectors(distance))
        )
        if not alike:
            nearest = f"{', '.join(PAIR_MINERS)}, with the loss's distance"
            raise self.refuse(f"the miner {miner.name} with {miner.distance.name}", nearest)
        if miner.arguments.get("allowed_pos_range") or miner.arguments.get("allowed_neg_range"):
            raise self.refuse(f"a {miner.name} with ranges", f"{miner.name}()")
        return PAIR_MINERS[miner.name](miner)

    def wrap(self, loss, normalized: bool):
        """The loss, on normalised embeddings where the distance normalises."""
        return NormalizedLoss(loss) if normalized else loss


def _on_unit_vectors(distance: Part) -> bool:
    return distance.name == "CosineSimilarity" or bool(distance.normalize_embeddings)

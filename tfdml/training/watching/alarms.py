"""When a run is in trouble: the thresholds of what is measured along it, and one line for each alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError

# A batch whose variance has fallen to this share of its highest, or its effective rank to that one's, has collapsed.
VARIANCE_SHARE, RANK_SHARE = 0.1, 0.25
# Unit vectors with this variance are a thousandth apart.
POINT = 5e-7
# A gradient norm this many times the running median of so many samples, once so many are known, has exploded.
EXPLOSION, MEDIAN_OF, MEDIAN_FROM = 10.0, 20, 3
# A proxy that was the nearest of none of so many images of its class is idle; this share of such raises an alarm.
IDLE_IMAGES, IDLE_SHARE = 20, 0.1
# A proxy that has turned by less than this share of the median of all in an epoch has got no gradient.
UNMOVED_SHARE = 1e-3

ADVICE = {
    "collapse": "lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another mining)",
    "explosion": "lower --learning_rate, add --clip_norm or --warm_up_epochs",
    "nan": "lower --learning_rate or add --clip_norm",
    "dead_proxies": "raise --objective_rate, lower the number of proxies per class, or see that every class is drawn",
}

#: The exit status of a run that an alarm has ended.
HALTED = 3

Samples = Sequence[Mapping[str, Any]]


class Halted(UserError):
    """An alarm has ended the run, as `stop_on` asked for; a command that is ended by it exits with `status`."""

    status = HALTED


def alarm(kind: str, step: int, well: int | None, seen: str) -> dict[str, Any]:
    """Return an alarm as `watch.json` keeps it.

    Args:
        kind: One of the settings' `ALARMS`.
        step: The step at which it was raised.
        well: The last step at which the same was measured and well; None: it never was.
        seen: What was measured, in words.

    Example:
        >>> alarm("nan", 400, 300, "triplet is not finite")["line"]
        'nan at step 400 (well at step 300): triplet is not finite; lower --learning_rate or add --clip_norm'
    """
    since = "at the first look" if well is None else f"well at step {well}"
    line = f"{kind} at step {step} ({since}): {seen}; {ADVICE[kind]}"
    return {"kind": kind, "step": step, "well": well, "seen": seen, "advice": ADVICE[kind], "line": line}


def collapse(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what in a sample shows a collapsed embedding, against the best of earlier ones; empty: nothing.

    The variance is below a tenth of its highest so far, or is that of a point; or the effective rank is below a quarter
    of its highest so far, or of C - 1 where that is less: images of C classes, each drawn together to a point, as
    training wants them, still span C - 1 directions.

    Args:
        sample: With `variance`, `effective_rank` and `classes`, the number of classes in the batch.
        earlier: The samples before.
    """
    variance, rank = sample["variance"], sample["effective_rank"]
    if variance < POINT:
        return f"the embeddings of a batch have a variance of {variance:.1e}: they are one point"
    if not earlier:
        return ""
    widest = max(earlier, key=lambda other: other["variance"])
    if variance < VARIANCE_SHARE * widest["variance"]:
        return (
            f"the embeddings of a batch have a variance of {variance:.2g}, after {widest['variance']:.2g} at step "
            f"{widest['step']}"
        )
    fullest = max(earlier, key=lambda other: other["effective_rank"])
    if rank < RANK_SHARE * min(fullest["effective_rank"], sample["classes"] - 1):
        return (
            f"the embeddings of a batch fill {rank:.1f} directions (effective rank), after "
            f"{fullest['effective_rank']:.1f} at step {fullest['step']}"
        )
    return ""


def explosion(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what of a sample says that a gradient has exploded; empty: nothing.

    The norm of a part's gradient is above ten times the median of the last 20 samples, and higher than in any of them:
    where a loss is often 0, and its median with it, a batch that is not is no explosion.

    Args:
        sample: With `gradient_norm`, by part.
        earlier: The samples before; fewer than three tell nothing.
    """
    last = earlier[-MEDIAN_OF:]
    if len(last) < MEDIAN_FROM:
        return ""
    found = []
    for part, norm in sample["gradient_norm"].items():
        norms = [other["gradient_norm"].get(part, norm) for other in last]
        median = float(np.median(norms))
        if norm > EXPLOSION * median and norm > max(norms):
            found.append(f"the gradient norm of the {part} is {norm:.3g}, {median:.3g} in the median of {len(norms)}")
    return " and ".join(found)


def new_alarms(sample: dict[str, Any], earlier: Samples) -> list[dict[str, Any]]:
    """Return the alarms that a sample raises; notes in the sample under `alarms` which kinds hold.

    What held at the sample before is not raised again.

    Args:
        sample: What `collapse` and `explosion` read, with its `step`.
        earlier: The samples before, each with `alarms`.
    """
    seen = {"collapse": collapse(sample, earlier), "explosion": explosion(sample, earlier)}
    sample["alarms"] = [kind for kind, words in seen.items() if words]
    before = earlier[-1] if earlier else {"alarms": [], "step": None}
    new = [kind for kind in sample["alarms"] if kind not in before["alarms"]]
    return [alarm(kind, sample["step"], before["step"], seen[kind]) for kind in new]

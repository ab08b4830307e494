"""What a run was watched for: its alarms, and what the sampled batches showed along the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from tfdml.report.paper_figures import values_along
from tfdml.report.rendering import element


def watched_html(watch: Mapping[str, Any]) -> Markup:
    """The alarms of a run in the order in which they came, and curves of what was sampled; empty where nothing was.

    Args:
        watch: What `watch.json` holds: `alarms`, each with its `line`, and `samples`.

    Example:
        >>> str(watched_html({"every": 100, "samples": [], "alarms": []}))
        ''
    """
    alarms, samples = watch.get("alarms", ()), watch.get("samples", ())
    if not alarms and not samples:
        return Markup()
    lines = Markup().join(element("li", str(alarm["line"])) for alarm in alarms)
    told = element("ul", lines) if alarms else element("p", f"No alarm in {len(samples)} sampled batches.")
    norms = [{"step": sample["step"], **sample["gradient_norm"]} for sample in samples]
    shares = [{"step": sample["step"], **sample["gradient_share"]} for sample in samples]
    parts, terms = ({key: key for record in found for key in record if key != "step"} for found in (norms, shares))
    ranks = {"effective_rank": "effective rank", "participation_ratio": "participation ratio"}
    drawn = [
        ("Directions of a batch of embeddings", "directions", samples, ranks),
        ("Variance of a batch of embeddings", "of at most 1", samples, {"variance": "variance"}),
        ("Gradient norms", "before clipping", norms, parts),
        # That of a single term is 1.
        ("Terms of the embedder's gradient", "share", shares, terms if len(terms) > 1 else {}),
    ]
    figures = Markup().join(values_along(*figure, along="step") for figure in drawn)
    return told + Markup('<div class="several">{}</div>').format(figures)

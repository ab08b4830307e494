"""What is compared with pytorch-metric-learning: its losses by name and arguments, and the batches they are run on."""

import numpy as np

from tests.mathematics import degenerate_batches, random_batch

PROXIES = 12  # classes
PLAIN = ("unit", "raw", "two a class", "real")


def case(name, *, miner=None, proxies=0, batches=PLAIN, dtype="float64", **arguments):
    """A loss there with its arguments; parts are [name, arguments]."""
    rest = {"miner": miner, "proxies": proxies, "batches": list(batches), "dtype": dtype}
    return {"name": name, "arguments": arguments, **rest}


CASES = {
    "angular": case("AngularLoss", batches=("unit", "two a class", "real")),
    "angular 45 sum": case("AngularLoss", alpha=45, reducer=["SumReducer", {}], batches=("unit", "real")),
    "circle": case("CircleLoss"),
    "circle face": case("CircleLoss", m=0.25, gamma=32),
    "contrastive": case("ContrastiveLoss"),
    "contrastive squared": case("ContrastiveLoss", neg_margin=0.8, distance=["LpDistance", {"power": 2}]),
    "contrastive raw": case("ContrastiveLoss", distance=["LpDistance", {"normalize_embeddings": False}]),
    "contrastive mean": case("ContrastiveLoss", reducer=["MeanReducer", {}]),
    "contrastive sum": case("ContrastiveLoss", reducer=["SumReducer", {}]),
    "contrastive cosine": case("ContrastiveLoss", pos_margin=1, neg_margin=0.3, distance=["CosineSimilarity", {}]),
    "fast ap": case("FastAPLoss"),
    "fast ap 20": case("FastAPLoss", num_bins=20),
    "contrastive easy": case("ContrastiveLoss", miner=["BatchEasyHardMiner", {}]),
    "generalized lifted": case("GeneralizedLiftedStructureLoss"),
    "generalized lifted margins": case(
        "GeneralizedLiftedStructureLoss", neg_margin=0.9, pos_margin=0.2, reducer=["SumReducer", {}]
    ),
    "histogram": case("HistogramLoss"),
    "histogram delta": case("HistogramLoss", delta=0.1),
    "lifted": case("LiftedStructureLoss"),
    "lifted margins": case("LiftedStructureLoss", neg_margin=0.9, pos_margin=0.2, reducer=["SumReducer", {}]),
    "lifted raw": case("LiftedStructureLoss", distance=["LpDistance", {"normalize_embeddings": False}]),
    "margin weighted": case("MarginLoss", miner=["DistanceWeightedMiner", {}], batches=("one negative",)),
    "multi-similarity": case("MultiSimilarityLoss"),
    "multi-similarity mined": case("MultiSimilarityLoss", alpha=1, miner=["MultiSimilarityMiner", {"epsilon": 0.2}]),
    "nt xent": case("NTXentLoss"),
    "nt xent warm": case("NTXentLoss", temperature=0.5, reducer=["SumReducer", {}]),
    "nt xent easy": case(
        "NTXentLoss", temperature=0.2, miner=["BatchEasyHardMiner", {"pos_strategy": "easy", "neg_strategy": "all"}]
    ),
    "sup con": case("SupConLoss"),
    "sup con warm": case("SupConLoss", temperature=0.5, reducer=["SumReducer", {}]),
    "triplet": case("TripletMarginLoss"),
    "triplet squared": case("TripletMarginLoss", margin=0.2, distance=["LpDistance", {"power": 2}]),
    "triplet cosine": case("TripletMarginLoss", margin=0.1, distance=["CosineSimilarity", {}]),
    "triplet dot": case("TripletMarginLoss", distance=["DotProductSimilarity", {"normalize_embeddings": False}]),
    "triplet raw": case("TripletMarginLoss", distance=["LpDistance", {"normalize_embeddings": False}]),
    "triplet mean": case("TripletMarginLoss", margin=0.2, reducer=["MeanReducer", {}]),
    "triplet sum": case("TripletMarginLoss", margin=0.2, reducer=["SumReducer", {}]),
    "triplet hard": case("TripletMarginLoss", margin=0.3, miner=["BatchHardMiner", {}]),
    "triplet smooth": case("TripletMarginLoss", margin=0, smooth_loss=True),
    "triplet easy": case("TripletMarginLoss", margin=0.3, miner=["BatchEasyHardMiner", {}]),
    "triplet weighted": case(
        "TripletMarginLoss", margin=0.4, miner=["DistanceWeightedMiner", {}], batches=("one negative",)
    ),
    "tuplet margin": case("TupletMarginLoss"),
    "tuplet margin gentle": case("TupletMarginLoss", margin=20, scale=8, reducer=["SumReducer", {}]),
    "tuplet margin hard": case("TupletMarginLoss", miner=["BatchHardMiner", {}]),
    "arc face": case("ArcFaceLoss", proxies=1),
    "arc face gentle": case("ArcFaceLoss", margin=60, scale=8, reducer=["SumReducer", {}], proxies=1),
    "cos face": case("CosFaceLoss", proxies=1),
    "normalized softmax": case("NormalizedSoftmaxLoss", proxies=1),
    "proxy anchor": case("ProxyAnchorLoss", proxies=1),
    "proxy anchor sum": case("ProxyAnchorLoss", margin=0.2, alpha=8, reducer=["SumReducer", {}], proxies=1),
    "proxy nca": case("ProxyNCALoss", proxies=1),
    "proxy nca scaled": case("ProxyNCALoss", softmax_scale=9, proxies=1),
    "sub-center arc face": case("SubCenterArcFaceLoss", proxies=3),
    "soft triple": case("SoftTripleLoss", centers_per_class=3, proxies=3),
}
# Miners by themselves: the pairs that they keep, or the probabilities with which they draw.
MINERS = {
    "pairs": case("pairs", miner=["MultiSimilarityMiner", {}]),
    "weights": case("weights", miner=["DistanceWeightedMiner", {}], batches=("unit", "raw", "two a class", "real")),
    "weights of 512 dimensions": case(
        "weights", miner=["DistanceWeightedMiner", {}], batches=("512 dimensions",), dtype="float32"
    ),
    "instance": case("InstanceLoss", batches=("unit", "unit reversed")),
}


def batches():
    """Name -> (labels, embeddings); "real" is as large as a batch of a run, "raw" is of vectors of any length."""
    two = np.repeat(np.arange(6), 2)
    # Each anchor has one negative nearer than 1.4, so that there is nothing to draw.
    one = np.array([[1, 0, 0.3], [-1, 0, 0.3], [0.9, 0.3, -0.2], [-0.9, 0.2, 0.4]])
    one /= np.linalg.norm(one, axis=1, keepdims=True)
    # All negatives of the first image are nearer than those of the last.
    near = np.random.default_rng(6).normal(size=(9, 512)) + np.linspace(4.0, 0.8, 9)[:, None]
    return {
        "unit": random_batch(0, 12, 3, 8),
        "raw": random_batch(1, 14, 4, 6, unit=False),
        "two a class": (two, random_batch(2, 12, 3, 5)[1]),
        "real": (np.arange(128) % 32 % PROXIES, random_batch(4, 128, 32, 64)[1]),
        "unit reversed": tuple(array[::-1] for array in random_batch(0, 12, 3, 8)),
        "512 dimensions": (np.arange(9) // 3, near),
        "one negative": (np.array([0, 0, 1, 1]), one.astype("float32")),
        **degenerate_batches(),
    }

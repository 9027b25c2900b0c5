"""Classes of torchmetrics of all other kinds that need neither a download nor a further package, with data for each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torchmetrics
import torchmetrics.audio
import torchmetrics.clustering
import torchmetrics.detection
import torchmetrics.image
import torchmetrics.multimodal
import torchmetrics.nominal
import torchmetrics.retrieval
import torchmetrics.segmentation
import torchmetrics.shape
import torchmetrics.text
import torchmetrics.wrappers
from torch import Generator
from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio

__all__ = ["of_other_kinds"]

Make = Callable[[int, Generator], tuple[Any, Any]]

WORDS = [
    "the",
    "engine",
    "emits",
    "events",
    "and",
    "every",
    "handler",
    "that",
    "subscribes",
    "to",
    "them",
    "does",
    "one",
    "job",
]


def numbers(*shape: int) -> Make:
    """Two tensors of numbers between 0 and 1."""
    return lambda size, generator: (
        torch.rand(size, *shape, generator=generator),
        torch.rand(size, *shape, generator=generator),
    )


def numbers_per_sample(size: int, generator: Generator) -> tuple[Any, Any]:
    return torch.rand(size, generator=generator), torch.rand(size, generator=generator)


def labels(classes: int) -> Make:
    """Two labels of each sample."""
    return lambda size, generator: (
        torch.randint(classes, (size,), generator=generator),
        torch.randint(classes, (size,), generator=generator),
    )


def points(size: int, generator: Generator) -> tuple[Any, Any]:
    return torch.randn(size, 3, generator=generator), torch.arange(size) % 2


def relevant(size: int, generator: Generator) -> tuple[Any, Any]:
    return torch.rand(size, generator=generator), torch.arange(size) % 2


def masks(size: int, generator: Generator) -> tuple[Any, Any]:
    drawn = [torch.randint(3, (size, 6, 6), generator=generator) for _ in range(2)]
    first, second = (torch.nn.functional.one_hot(one, 3).movedim(-1, 1) for one in drawn)
    return first, second


def instances(size: int, generator: Generator) -> tuple[Any, Any]:
    """Category and number of the instance of each pixel."""
    first, second = (torch.randint(2, (size, 6, 6, 2), generator=generator) for _ in range(2))
    return first, second


def tokens(size: int, generator: Generator) -> tuple[Any, Any]:
    return torch.randn(size, 4, 9, generator=generator), torch.randint(9, (size, 4), generator=generator)


def ratings(size: int, generator: Generator) -> tuple[Any, Any]:
    drawn = torch.randint(3, (size, 4), generator=generator)  # by each of four raters
    return torch.nn.functional.one_hot(drawn, 3).sum(1), torch.zeros(size)


def sentences(size: int, generator: Generator) -> tuple[Any, Any]:
    def sentence() -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (6,), generator=generator).tolist())

    return [sentence() for _ in range(size)], [sentence() for _ in range(size)]


def with_references(size: int, generator: Generator) -> tuple[Any, Any]:
    predicted, references = sentences(size, generator)
    return predicted, [[one] for one in references]


def answers(size: int, generator: Generator) -> tuple[Any, Any]:
    predicted, right = sentences(size, generator)
    return (
        [{"prediction_text": text, "id": str(i)} for i, text in enumerate(predicted)],
        [{"answers": {"answer_start": [0], "text": [text]}, "id": str(i)} for i, text in enumerate(right)],
    )


def complex_numbers(size: int, generator: Generator) -> tuple[Any, Any]:
    first, second = (torch.view_as_complex(torch.randn(size, 5, 8, 2, generator=generator)) for _ in range(2))
    return first, second


def satellite(size: int, generator: Generator) -> tuple[Any, Any]:
    """An image of high resolution, and what it is made of: colors of low resolution, and a panchromatic image."""
    fused, panchromatic = (torch.rand(size, 3, 32, 32, generator=generator) for _ in range(2))
    return fused, {
        "ms": torch.rand(size, 3, 16, 16, generator=generator),
        "pan": panchromatic,
        "pan_lr": torch.nn.functional.avg_pool2d(panchromatic, 2),
    }


_DATA: dict[str, Make] = {
    "aggregation": numbers_per_sample, "audio": numbers(1000), "clustering": labels(3), "detection": instances,
    "image": numbers(3, 48, 48), "nominal": labels(3), "retrieval": relevant, "segmentation": masks, "shape": numbers(7, 2),
    "text": sentences, "CalinskiHarabaszScore": points, "DaviesBouldinScore": points, "DunnIndex": points,
    "FleissKappa": ratings, "Perplexity": tokens, "BLEUScore": with_references, "SacreBLEUScore": with_references,
    "CHRFScore": with_references, "ROUGEScore": sentences, "SQuAD": answers, "LipVertexError": numbers(4, 3),
    "ComplexScaleInvariantSignalNoiseRatio": complex_numbers, "PermutationInvariantTraining": numbers(2, 50),
    "SourceAggregatedSignalDistortionRatio": numbers(2, 50), "MultiScaleStructuralSimilarityIndexMeasure": numbers(1, 180, 180),
    "PeakSignalNoiseRatioWithBlockedEffect": numbers(1, 16, 16),
    "QualityWithNoReference": satellite, "SpatialDistortionIndex": satellite,
    "TranslationEditRate": with_references,
}  # fmt: skip

_OPTIONS: dict[str, dict[str, Any]] = {
    "PanopticQuality": {"things": {0}, "stuffs": {1}}, "ModifiedPanopticQuality": {"things": {0}, "stuffs": {1}},
    "PeakSignalNoiseRatio": {"data_range": 1.0}, "PeakSignalNoiseRatioWithBlockedEffect": {"data_range": 1.0},
    "StructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "MultiScaleStructuralSimilarityIndexMeasure": {"data_range": 1.0}, "CramersV": {"num_classes": 3},
    "PearsonsContingencyCoefficient": {"num_classes": 3}, "TheilsU": {"num_classes": 3}, "TschuprowsT": {"num_classes": 3},
    "DiceScore": {"num_classes": 3, "input_format": "one-hot"}, "GeneralizedDiceScore": {"num_classes": 3},
    "MeanIoU": {"num_classes": 3}, "HausdorffDistance": {"num_classes": 3},
    "PermutationInvariantTraining": {"metric_func": scale_invariant_signal_noise_ratio},
    "RetrievalRecallAtFixedPrecision": {"min_precision": 0.5}, "LipVertexError": {"mouth_map": [0, 2]},
    "ClusterAccuracy": {"num_classes": 3}, "RunningMean": {"window": 3}, "RunningSum": {"window": 3},
}  # fmt: skip

_WITH_WEIGHTS = {
    "BERTScore", "CLIPImageQualityAssessment", "CLIPScore", "DeepImageStructureAndTextureSimilarity", "InfoLM",
    "LearnedPerceptualImagePatchSimilarity", "MemorizationInformedFrechetInceptionDistance",
}  # fmt: skip
"""Those that download the weights of a model."""

_ABSTRACT = {"BaseAggregator", "Metric", "Running"}


def of_other_kinds() -> Iterator[tuple[str, Callable[[], Any], Make]]:
    """Name, factory and data of each; those that ask for a package that is not here are left out."""
    for kind in ("aggregation", "audio", "clustering", "detection", "image", "multimodal", "nominal", "retrieval",
                 "segmentation", "shape", "text"):  # fmt: skip
        module = getattr(torchmetrics, kind)
        for name in sorted(getattr(module, "__all__", vars(module))):
            one = getattr(module, name, None)
            if (
                not inspect.isclass(one)
                or not issubclass(one, torchmetrics.Metric)
                or name in _WITH_WEIGHTS | _ABSTRACT
            ):
                continue
            build = partial(one, **_OPTIONS.get(name, {}))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    build()
                except (ModuleNotFoundError, RuntimeError) as error:
                    if "install" in str(error):
                        continue
                    raise
            yield name, build, _DATA.get(name) or _DATA[kind]
    wrappers = torchmetrics.wrappers
    accuracy = torchmetrics.classification.BinaryAccuracy
    yield "MinMaxMetric", lambda: wrappers.MinMaxMetric(accuracy()), relevant
    yield "MultioutputWrapper", lambda: wrappers.MultioutputWrapper(torchmetrics.MeanSquaredError(), 2), numbers(2)
    yield "BinaryTargetTransformer", lambda: wrappers.BinaryTargetTransformer(accuracy(), threshold=0), relevant
    yield (
        "ClasswiseWrapper",
        lambda: wrappers.ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(3, average=None)),
        lambda size, generator: (
            torch.rand(size, 3, generator=generator),
            torch.randint(3, (size,), generator=generator),
        ),
    )

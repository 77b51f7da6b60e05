"""Every class of torchmetrics that can be built here, with data to update it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from framework.distributed.context import Context
from framework.distributed.metric_sync import sync_through, why_not_merged

DOMAINS = (
    "aggregation",
    "audio",
    "classification",
    "clustering",
    "detection",
    "image",
    "nominal",
    "regression",
    "retrieval",
    "segmentation",
    "shape",
    "text",
    "wrappers",
)
NEED_NETWORKS = {
    "ARNIQA",
    "BERTScore",
    "DeepImageStructureAndTextureSimilarity",
    "DeepNoiseSuppressionMeanOpinionScore",
    "FeatureShare",
    "FrechetInceptionDistance",
    "HausdorffDistance",
    "InceptionScore",
    "InfoLM",
    "KernelInceptionDistance",
    "LearnedPerceptualImagePatchSimilarity",
    "MemorizationInformedFrechetInceptionDistance",
    "NonIntrusiveSpeechQualityAssessment",
    "PerceptualPathLength",
}
"""Classes that download the weights of a network, as do those of torchmetrics.multimodal and video."""

BATCHES, SAMPLES, CLASSES = 5, 6, 4

Update = tuple[tuple[Any, ...], dict[str, Any]]

KEYWORDS: dict[str, Any] = {
    "num_classes": CLASSES,
    "num_labels": CLASSES,
    "num_groups": 2,
    "num_outputs": 1,
    "min_sensitivity": 0.3,
    "min_specificity": 0.3,
    "min_precision": 0.3,
    "min_recall": 0.3,
    "beta": 2.0,
    "data_range": 1.0,
    "fs": 8000,
    "p": 2.0,
    "distance_metric": "euclidean",
    "things": {0, 1},
    "stuffs": {2, 3},
    "mode": "nominal",
}
"""Of constructors that need them."""


def _texts(generator: torch.Generator) -> list[str]:
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "fast", "slowly"]
    return [
        " ".join(words[int(i)] for i in torch.randint(len(words), (6,), generator=generator)) for _ in range(SAMPLES)
    ]


def _boxes(generator: torch.Generator, *, scored: bool) -> list[dict[str, Tensor]]:
    found = []
    for _ in range(SAMPLES):
        number = int(torch.randint(1, 5, (), generator=generator))
        begins = torch.rand(number, 2, generator=generator) * 20
        sizes = 20 + torch.rand(number, 2, generator=generator) * 20
        image = {
            "boxes": torch.cat([begins, begins + sizes], dim=1),
            "labels": torch.randint(2, (number,), generator=generator),
        }
        found.append({**image, "scores": torch.rand(number, generator=generator)} if scored else image)
    return found


def _updates(generator: torch.Generator) -> dict[str, Callable[[], Update]]:
    """The arguments of one update, by kind."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def classes(*shape: int, below: int = CLASSES) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    return {
        "binary": lambda: ((rand(SAMPLES), classes(SAMPLES, below=2)), {}),
        "groups": lambda: ((rand(SAMPLES), classes(SAMPLES, below=2), classes(SAMPLES, below=2)), {}),
        "multiclass": lambda: ((rand(SAMPLES, CLASSES).softmax(dim=1), classes(SAMPLES)), {}),
        "multilabel": lambda: ((rand(SAMPLES, CLASSES), classes(SAMPLES, CLASSES, below=2)), {}),
        "numbers": lambda: ((rand(SAMPLES) + 0.1, rand(SAMPLES) + 0.1), {}),
        "rows": lambda: ((rand(SAMPLES, CLASSES).softmax(dim=1), rand(SAMPLES, CLASSES).softmax(dim=1)), {}),
        "ensemble": lambda: ((rand(SAMPLES, CLASSES), rand(SAMPLES)), {}),
        "one": lambda: ((rand(SAMPLES),), {}),
        "retrieval": lambda: ((rand(SAMPLES), classes(SAMPLES, below=2)), {"indexes": classes(SAMPLES, below=3)}),
        "labels": lambda: ((classes(SAMPLES), classes(SAMPLES)), {}),
        "clusters": lambda: ((rand(SAMPLES, 2), classes(SAMPLES)), {}),
        "ratings": lambda: ((classes(SAMPLES, CLASSES),), {}),
        "images": lambda: ((rand(2, 3, 48, 48), rand(2, 3, 48, 48)), {}),
        "gray": lambda: ((rand(2, 1, 48, 48), rand(2, 1, 48, 48)), {}),
        "large images": lambda: ((rand(1, 3, 192, 192), rand(1, 3, 192, 192)), {}),
        "image": lambda: ((rand(2, 3, 16, 16),), {}),
        "pansharpened": lambda: ((rand(2, 3, 48, 48), {"ms": rand(2, 3, 24, 24), "pan": rand(2, 3, 48, 48)}), {}),
        "sound": lambda: ((rand(2, 400) - 0.5, rand(2, 400) - 0.5), {}),
        "sources": lambda: ((rand(2, 2, 400) - 0.5, rand(2, 2, 400) - 0.5), {}),
        "complex": lambda: ((rand(2, 129, 20, 2), rand(2, 129, 20, 2)), {}),
        "masks": lambda: ((classes(2, CLASSES, 8, 8, below=2), classes(2, CLASSES, 8, 8, below=2)), {}),
        "panoptic": lambda: ((classes(2, 6, 6, 2), classes(2, 6, 6, 2)), {}),
        "texts": lambda: ((_texts(generator), _texts(generator)), {}),
        "references": lambda: ((_texts(generator), [[text] for text in _texts(generator)]), {}),
        "answers": lambda: (
            (
                [{"prediction_text": text, "id": str(i)} for i, text in enumerate(_texts(generator))],
                [
                    {"answers": {"answer_start": [1], "text": [text]}, "id": str(i)}
                    for i, text in enumerate(_texts(generator))
                ],
            ),
            {},
        ),
        "scores of tokens": lambda: ((rand(2, 5, CLASSES), classes(2, 5)), {}),
        "boxes": lambda: ((_boxes(generator, scored=True), _boxes(generator, scored=False)), {}),
        "faces": lambda: ((rand(4, 10, 3), rand(4, 10, 3)), {}),
        "points": lambda: ((rand(2, 10, 3), rand(2, 10, 3)), {}),
    }


def kinds() -> dict[str, Callable[[], Any]]:
    """Return the constructor of each class that can be built, by its name."""
    found: dict[str, Callable[[], Any]] = {}
    for domain in DOMAINS:
        try:
            module = import_module(f"torchmetrics.{domain}")
        except ImportError:
            continue
        for name in getattr(module, "__all__", None) or vars(module):
            kind = getattr(module, name, None)
            if not inspect.isclass(kind) or not hasattr(kind, "compute") or name in NEED_NETWORKS:
                continue
            for build in _builders(kind):
                try:
                    built = build()
                except Exception:
                    continue
                if hasattr(built, "metric_state"):
                    found[name] = build
                    break
    return found


def _builders(kind: Any) -> Iterator[Callable[[], Any]]:
    import torchmetrics
    from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio

    if "torchmetrics.wrappers" in kind.__module__:
        inner = torchmetrics.classification.MulticlassRecall
        yield from (
            lambda: kind(inner(CLASSES, average=None)),
            lambda: kind(inner(CLASSES)),
            lambda: kind(torchmetrics.regression.R2Score(), num_outputs=CLASSES),
            lambda: kind({"numbers": torchmetrics.regression.SpearmanCorrCoef()}),
        )
        if kind.__name__ in ("MinMaxMetric", "Running", "BinaryTargetTransformer"):
            yield lambda: kind(torchmetrics.classification.BinaryAUROC())
        return
    parameters = inspect.signature(kind.__init__).parameters
    needed = {
        name: KEYWORDS[name]
        for name, parameter in parameters.items()
        if name in KEYWORDS and (parameter.default is inspect.Parameter.empty or name in ("num_outputs",))
    }
    yield lambda: kind(**needed)
    yield lambda: kind(num_classes=CLASSES, **{name: value for name, value in needed.items() if name != "num_classes"})
    yield lambda: kind(scale_invariant_signal_noise_ratio, eval_func="max")
    yield lambda: kind(**{name: KEYWORDS[name] for name in parameters if name in KEYWORDS})


def value(name: str, build: Callable[[], Any], kind: str, *, batches: list[int], context: Context | None) -> Any:
    """Return what a metric computes after these batches, as plain numbers."""
    metric = build()
    if context is not None:
        sync_through(metric, context)
    metric.reset()
    for number in batches:
        positional, named = _updates(torch.Generator().manual_seed(number))[kind]()
        metric.update(*positional, **named)
    return plain(metric.compute())


def plain(computed: Any) -> Any:
    if isinstance(computed, Tensor):
        return computed.tolist()
    if isinstance(computed, dict):
        return {key: plain(each) for key, each in computed.items()}
    if isinstance(computed, (tuple, list)):
        return [plain(each) for each in computed]
    return computed


def expected() -> dict[str, tuple[str, Any]]:
    """Return of each class the kind of data that it takes, and its value in one process."""
    found: dict[str, tuple[str, Any]] = {}
    for name, build in kinds().items():
        for kind in _updates(torch.Generator()):
            try:
                found[name] = kind, value(name, build, kind, batches=list(range(BATCHES)), context=None)
            except Exception:
                continue
            break
    return found


def of_ranks(context: Context, kinds_of_data: dict[str, str], shares: list[list[int]]) -> dict[str, Any]:
    """Return the values of all metrics on this rank, which has some of the batches."""
    found: dict[str, Any] = {}
    for name, build in kinds().items():
        if name in kinds_of_data and why_not_merged(build()) is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torchmetrics, on a rank without samples
                found[name] = value(name, build, kinds_of_data[name], batches=shares[context.rank], context=context)
    return found

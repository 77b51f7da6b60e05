"""From a classifier's scores to what a person wants to read."""

from __future__ import annotations

from typing import final

from torch import Tensor

from framework.errors import DataError


@final
class Classes:
    """Of each sample the class with the highest score and its probability (softmax over the classes)."""

    def __call__(self, output: Tensor, /) -> dict[str, Tensor]:
        """output: scores before softmax, shape (B, C). Gives `class` (B,) int64 and `probability` (B,) float32."""
        if output.ndim != 2:
            raise DataError(
                f"Classes got scores of shape {tuple(output.shape)}. It takes one row of class scores a sample; for "
                "another output set task.predictions=null."
            )
        best = output.float().softmax(dim=1).max(dim=1)
        return {"class": best.indices, "probability": best.values}

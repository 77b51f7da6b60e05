"""Recipes of Lightning modules."""

from __future__ import annotations

MANUAL = {
    "defaults": [{"override /task": "lightning"}],
    "model": {"_target_": "tests.features.lightning_fault_case.Lit", "automatic": False, "inputs": 10, "outputs": 5},
    "data": {"datasets": {"_target_": "recipes.toy.toy_regression"}, "global_batch_size": 16},
}
"""A module that makes its optimizer's steps itself."""

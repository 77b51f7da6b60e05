"""Tests. `unit/` mirrors framework/; `shape/` holds the limits of the code itself; see CONTRIBUTING.md."""

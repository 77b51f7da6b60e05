"""The package's description on an index: README.md with links that work there, and the addresses of the project.

The README's links are relative, and an index has no files beside it. GitHub's workflows say in GITHUB_REPOSITORY where
the repository is: links then lead to it, at the commit or tag that is built. Elsewhere they become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# `[text](path)` and `![text](path)`, not of another host.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")


class Description(MetadataHookInterface):
    """Hatchling calls it for every build; pyproject.toml names it."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("GITHUB_REPOSITORY")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository is None:
            metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(r"\2", text)}
            return

        address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        built = os.environ.get("GITHUB_SHA", "HEAD")
        if os.environ.get("GITHUB_REF_TYPE") == "tag":
            built = os.environ["GITHUB_REF_NAME"]

        def absolute(link: re.Match[str]) -> str:
            is_picture, label, path = link.groups()
            kind = "raw" if is_picture else "blob"
            return f"{is_picture}[{label}]({address}/{kind}/{built}/{path})"

        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(absolute, text)}
        metadata["urls"] = {
            "Documentation": f"{address}/tree/{built}/docs",
            "Source": address,
            "Changelog": f"{address}/blob/{built}/CHANGELOG.md",
            "Issues": f"{address}/issues",
        }

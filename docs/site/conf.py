"""Sphinx builds the documentation's site from README.md and docs/: `make docs`.

The Markdown is what GitHub shows, too: the site adds the navigation (the links of README's "Documentation", in their
order) and two references, generated from the schema and from docstrings.
"""

from __future__ import annotations

from importlib.metadata import version as installed_version

from sphinx.application import Sphinx

from docs.site import references

project = "framework"
version = release = installed_version("framework")
copyright = "the authors of framework, Apache-2.0"

# The sources are those of the whole repository, so that links between them are the same here and on GitHub.
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "data", "dist", "framework", "outputs", "tests", "wheels"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 6
# Words in single backticks are code in docstrings, as in Markdown.
default_role = "code"
highlight_language = "none"
# Quotes and dashes are as they were typed: `--help` has two.
smartquotes = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}

html_theme = "furo"
html_title = "framework"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# Summaries are fetched, which browsers refuse for files.
html_show_search_summary = False
html_show_sphinx = False
html_use_index = False  # the search finds the same


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", references.read_comments)
    app.connect("autodoc-process-docstring", references.read_sections)
    app.connect("source-read", references.add_generated)
    app.connect("build-finished", references.write_index)

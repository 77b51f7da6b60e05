"""The page for coding agents: a script that follows it literally ends with a tuned recipe."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.command import started_program
from tests.helpers.documents import write_shown_files
from tests.helpers.source import ROOT

PAGE = ROOT / "docs/AGENTS.md"


@pytest.mark.multiproc
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_the_page_leads_from_an_empty_folder_to_a_tuned_recipe(tmp_path: Path) -> None:
    write_shown_files(tmp_path, pages=[PAGE])
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.sh"
    script.write_text("".join(["set -euxo pipefail\n", *blocks]))
    # The page's `python` is the one that runs the tests, also where no environment is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with started_program("bash", str(script), cwd=tmp_path, env={"PATH": path}) as started:
        status = started.wait(timeout=380)
        assert status == 0, started.stderr()
        started.assert_all_gone()

    assert [3_000] in [results.saved_steps(run)[-1:] for run in (tmp_path / "outputs/iris").iterdir()]
    grid, search = sorted((tmp_path / "outputs/multirun").iterdir())
    assert len((grid / "results.csv").read_text().splitlines()) == 1 + 6
    assert len((search / "results.csv").read_text().splitlines()) == 1 + 4

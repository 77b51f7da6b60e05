"""Files of one JSON object per line that go on where a resumed run does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from framework.rows import open_rows, read_rows


def test_lines_beyond_the_step_and_unfinished_ones_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "below" / "rows.jsonl"
    assert read_rows(path) == []
    with closing(open_rows(path, last_step=0)) as file:
        for step in range(1, 6):
            file.write(f'{{"step": {step}}}\n'.encode())
    with path.open("a") as file:
        file.write('no JSON\n{"step": 6, "wei')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]
    with closing(open_rows(path, last_step=3)) as file:
        file.write(b'{"step": 4, "new": true}\n')
        assert read_rows(path)[-1] == {"step": 4, "new": True}  # at once
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "new": true}\n'
    open_rows(path, last_step=None).close()
    assert len(read_rows(path)) == 4

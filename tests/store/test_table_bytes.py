"""What an artifact says of tables that rows share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pw.errors import StoreError
from pw.store.artifact import QUANTIZE, Artifact


def saying(artifact: Artifact, focus: Any) -> Artifact:
    """The artifact with another `focus` among the settings that made it."""
    record = artifact.manifest.stages[QUANTIZE]
    settings = {**record.settings, "focus": focus}
    changed = artifact.manifest.with_stage(QUANTIZE, replace(record, settings=settings))
    return Artifact(artifact.path, changed)


def test_rows_have_their_own_tables_unless_the_artifact_says_so(built: Artifact) -> None:
    artifact = built
    assert artifact.table_bytes is None
    assert saying(artifact, {"bits": 3}).table_bytes is None
    assert saying(artifact, {"bits": 3, "table_bytes": 4096}).table_bytes == 4096


@pytest.mark.parametrize("wrong", [0, 100, 4097, 1 << 40, "4096", True, -4096, 4096.0])
def test_a_size_that_cannot_be_is_refused(built: Artifact, wrong: Any) -> None:
    artifact = saying(built, {"bits": 3, "table_bytes": wrong})
    with pytest.raises(StoreError, match="table_bytes"):
        _ = artifact.table_bytes

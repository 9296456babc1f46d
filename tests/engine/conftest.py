"""Artifacts shared by the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engines import make_artifact


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    """A random qwen2_moe model (transformers, fp32) and its artifact."""
    return make_artifact("qwen2_moe", tmp_path_factory.mktemp("qwen"), num_attention_heads=2)

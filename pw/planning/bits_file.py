"""A fixed allocation on disk: `--precision-policy static:<file>`. Knows the format, not the choice.

    {"format": "pw-bits-1", "bits": {"<layer>.<expert>.<module>": <bits>, ...}}

`layer` is the model's own layer index. Every block of the model is named, once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import numpy as np

from pw.blocks import ExpertGeometry
from pw.errors import ConfigError
from pw.planning.ladder import IntArray

FORMAT = "pw-bits-1"


def write_bits(path: Path, geometry: ExpertGeometry, bits: IntArray) -> None:
    """Write widths [n], in geometry order; an existing file is replaced at once or not at all."""
    if len(bits) != geometry.blocks:
        raise ValueError(f"expected {geometry.blocks} widths, got {len(bits)}")
    table = {_name(geometry, block): int(width) for block, width in enumerate(bits)}
    staged = path.with_name(f"{path.name}.partial")
    staged.write_text(json.dumps({"format": FORMAT, "bits": table}, indent=1) + "\n")
    os.replace(staged, path)


def read_bits(path: Path, geometry: ExpertGeometry, min_bits: int, max_bits: int) -> IntArray:
    """Read widths [n], in geometry order.

    Raises:
        ConfigError: The file is unreadable, of another format, names blocks that the model does not
            have or misses some that it has, or a width is not one of the artifact's.
    """
    table = _load(path)
    expected = [_name(geometry, block) for block in range(geometry.blocks)]
    missing = [name for name in expected if name not in table]
    unknown = sorted(table.keys() - set(expected))
    for kind, names in (("misses", missing), ("names unknown", unknown)):
        if names:
            raise ConfigError(
                f"bits file `{path}` {kind} {len(names)} of {len(expected)} blocks: `{names[0]}`",
                "was it written for another model? blocks are <layer>.<expert>.<module>",
            )
    for name, width in table.items():
        if type(width) is not int or not min_bits <= width <= max_bits:
            raise ConfigError(
                f"bits file `{path}` wants {json.dumps(width)} bits for `{name}`: "
                f"the artifact has {min_bits} to {max_bits}"
            )
    return np.array([table[name] for name in expected], dtype=np.int64)


def _name(geometry: ExpertGeometry, block: int) -> str:
    key = geometry.key(block)
    return f"{key.layer}.{key.expert}.{key.module}"


def _load(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"cannot read bits file `{path}`: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"bits file `{path}` is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ConfigError(f"bits file `{path}` has format {json.dumps(found)}: expected `{FORMAT}`")
    if not isinstance(content.get("bits"), dict):
        raise ConfigError(f"bits file `{path}` has no object `bits`")
    return cast(dict[str, object], content["bits"])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice}` stands there twice")
    return table

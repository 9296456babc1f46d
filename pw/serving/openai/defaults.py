"""What a request that leaves a sampling field out gets."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pw.engine.request import SamplingParams
from pw.errors import ModelError, RequestError

logger = logging.getLogger("pw.serving")


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out; from the model's generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, path: Path) -> SamplingDefaults:
        """What `generation_config.json` in a checkpoint or artifact folder states, if anything.

        Raises:
            ModelError: The file is damaged or states a value out of range.
        """
        file = path / "generation_config.json"
        try:
            stated = json.loads(file.read_bytes()) if file.is_file() else {}
            names = [each.name for each in fields(cls)]
            values: dict[str, Any] = {
                name: stated[name] for name in names if stated.get(name) is not None
            }
            SamplingParams(**values)  # checks the ranges
        except (ValueError, TypeError, AttributeError, RequestError) as error:
            raise ModelError(f"not a usable generation config: `{file}` ({error})") from error
        if values:
            logger.info("sampling defaults of the model: %s", values)
        return cls(**values)

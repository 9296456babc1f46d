"""What a benchmark's record says of the machine."""

from datetime import UTC, datetime
from typing import Any

import torch


def about() -> dict[str, Any]:
    """GPU, torch and time (UTC) of a run."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }

"""From the name a user gives to a checkpoint folder: bundled, local, or from the hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from pw.errors import ModelError

BUNDLED = {"tiny": "moe-tiny"}
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")  # no code, no pickles
_LOCAL_HINT = "name a folder with config.json and *.safetensors, a hub id, or `tiny`"


def asset(name: str) -> Path:
    """Path of a bundled file or folder (`moe-tiny`, `calibration.jsonl`, `heldout.jsonl`)."""
    path = Path(str(resources.files("pw") / "assets" / name))
    if not path.exists():
        raise ModelError(f"bundled file is missing: `{name}`", "install the package again")
    return path


def resolve_model(name: str) -> Path:
    """Folder of a checkpoint.

    Args:
        name: `tiny` for the bundled model, a folder, or a hub id `owner/name[@revision]`. A hub id
            is taken from the local cache where it is complete and downloaded otherwise;
            safetensors, configs and tokenizer files only.

    Raises:
        ModelError: No such folder, or the hub does not give the files.
    """
    if name in BUNDLED:
        return asset(BUNDLED[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    if name and path.exists():
        raise ModelError(f"a model is a folder, not a file: `{name}`", _LOCAL_HINT)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) or name.startswith("."):
        raise ModelError(f"no such model: `{name}`", _LOCAL_HINT)
    repository, _, revision = name.partition("@")
    return _from_hub(repository, revision or None)


def _from_hub(repository: str, revision: str | None) -> Path:
    """Snapshot folder in the hub's local cache, filled over the network where need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(_WANTED), max_workers=4
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model is not in the local cache and the hub cannot be reached: `{repository}`",
            _LOCAL_HINT,
        ) from error
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"the hub does not give `{repository}`: {reason}", _LOCAL_HINT) from error
    return Path(folder)

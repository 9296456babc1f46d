"""From the name a user gives to a checkpoint folder: bundled, local, or in the hub's cache.

The network is asked by `download` alone, when the user says so.
"""

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
    """Folder of a checkpoint. Asks no network.

    Args:
        name: `tiny` for the bundled model, a folder, or a hub id `owner/name[@revision]` whose
            files are in the hub's local cache (`download` brings them there).

    Raises:
        ModelError: No such folder, or the cache does not have the files.
    """
    if name in BUNDLED:
        return asset(BUNDLED[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    if name and path.exists():
        raise ModelError(f"a model is a folder, not a file: `{name}`", _LOCAL_HINT)
    repository, revision = _hub_id(name)
    return _snapshot(repository, revision, local_files_only=True)


def download(name: str) -> Path:
    """Fill the hub's local cache with a model where need be; what is local already is left alone.

    Safetensors, configs and tokenizer files only.

    Args:
        name: As for `resolve_model`. Without a revision the newest one is fetched.

    Raises:
        ModelError: No such folder, or the hub does not give the files.
    """
    if name in BUNDLED or Path(name).expanduser().exists():
        return resolve_model(name)
    repository, revision = _hub_id(name)
    return _snapshot(repository, revision, local_files_only=False)


def pinned(name: str, folder: Path) -> str:
    """The name under which `folder`, found for the hub id `name`, is found again: `id@commit`."""
    repository, _, revision = name.partition("@")
    commit = folder.name if folder.parent.name == "snapshots" else revision
    return f"{repository}@{commit}" if commit else repository


def _hub_id(name: str) -> tuple[str, str | None]:
    """Repository and revision.

    Raises:
        ModelError: This is no hub id.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) or name.startswith("."):
        raise ModelError(f"no such model: `{name}`", _LOCAL_HINT)
    repository, _, revision = name.partition("@")
    return repository, revision or None


def _snapshot(repository: str, revision: str | None, *, local_files_only: bool) -> Path:
    """Folder of a snapshot in the hub's local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = f"{repository}@{revision}" if revision else repository
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(_WANTED),
            max_workers=4,
            local_files_only=local_files_only,
        )
    except LocalEntryNotFoundError as error:
        if local_files_only:
            raise ModelError(
                f"model is not in the local cache: `{name}`",
                f"fetch it: `pw calibrate {name} --download`, or name a folder that holds it",
            ) from error
        raise ModelError(f"the hub cannot be reached for `{name}`", _LOCAL_HINT) from error
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"the hub does not give `{name}`: {reason}", _LOCAL_HINT) from error
    return Path(folder)

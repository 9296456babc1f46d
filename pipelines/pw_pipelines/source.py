"""From an artifact back to the checkpoint it was made from."""

from __future__ import annotations

from pw.errors import ModelError
from pw.models.checkpoint import Checkpoint
from pw.models.resolve import resolve_model
from pw.store.artifact import Artifact


def source_checkpoint(artifact: Artifact, model: str | None = None) -> Checkpoint:
    """Open the checkpoint of an artifact.

    Args:
        artifact: The artifact.
        model: Where the checkpoint is now; None = where the artifact says it was.

    Raises:
        ModelError: It is not there, or another model.
    """
    record = artifact.manifest.model
    name = model or record.source
    try:
        path = resolve_model(name)
    except ModelError as error:
        raise ModelError(
            f"checkpoint of `{artifact.path}` not found: {error.message}",
            "say where it is now with --model",
        ) from error
    checkpoint = Checkpoint.open(path)
    found = checkpoint.fingerprint()
    changed = [
        name
        for name in sorted({*found, *record.files})
        if found.get(name) != record.files.get(name)
    ]
    if changed:
        raise ModelError(
            f"`{path}` is not the checkpoint that `{artifact.path}` was made from: "
            f"`{changed[0]}` differs",
            "say where it is now with --model, or quantize again",
        )
    return checkpoint


def vocabulary_of(checkpoint: Checkpoint) -> int:
    """Number of tokens that a model knows."""
    return int(checkpoint.architecture.config.vocab_size)

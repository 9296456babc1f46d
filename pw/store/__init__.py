"""The artifact on disk: manifest, planes, tables, atomic publish, verify."""

from pw.store.artifact import Artifact
from pw.store.inspect import describe
from pw.store.manifest import Manifest, ModelRecord, StageRecord
from pw.store.tables import TABLES, Table
from pw.store.verify import Finding, verify
from pw.store.writer import MODEL_FILES, ArtifactWriter

__all__ = [
    "MODEL_FILES",
    "TABLES",
    "Artifact",
    "ArtifactWriter",
    "Finding",
    "Manifest",
    "ModelRecord",
    "StageRecord",
    "Table",
    "describe",
    "verify",
]

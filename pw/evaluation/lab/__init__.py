"""The measuring room: what any allocation of bits does to the model's own predictions.

model      the checkpoint with its expert weights exchanged block by block
experts    those of a layer together, on a GPU
lab        negative log-likelihood and divergence of texts under an allocation
texts      windows of tokens from files
costs      bytes of every block at every width
running    studies side by side
studies    the tables of docs/quality.md; `python -m pw.evaluation.lab --help`
"""

from pw.evaluation.lab.lab import Lab, Scores
from pw.evaluation.lab.model import LabModel

__all__ = ["Lab", "LabModel", "Scores"]

"""Small random checkpoints with a tokenizer and text, for the offline stages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from pw.config import CalibrationConfig, QuantizeConfig
from pw.models.testing import make_checkpoint
from pw_pipelines import quantize, sensitivity
from pw_pipelines.observation import ObservedModel, Weights, batches
from pw_pipelines.progress import Progress, Style

QUIET = Progress(Style.QUIET)
TINY_TEXT = CalibrationConfig(nsamples=8, seqlen=512)  # for the bundled model
VOCABULARY = 259  # three specials, 256 bytes


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: ids 0..2 special, then bytes."""
    vocabulary = {
        token: i
        for i, token in enumerate(
            ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        )
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_text(path: Path, length: int = 4000) -> Path:
    """Text of random words, the same every time."""
    generator = torch.Generator().manual_seed(7)
    words = ["plane", "page", "expert", "router", "token", "memory", "budget", "bit", "layer"]
    chosen = torch.randint(len(words), (length // 5,), generator=generator).tolist()
    path.write_text(" ".join(words[i] for i in chosen))
    return path


def calibration(folder: Path, nsamples: int = 8, seqlen: int = 64) -> CalibrationConfig:
    """Text of random words in `folder`, as calibration settings."""
    return CalibrationConfig(str(write_text(folder / "text.txt")), nsamples, seqlen)


def random_checkpoint(folder: Path, kind: str = "qwen2_moe", **overrides: Any) -> Any:
    """Write a random model of a kind with a tokenizer; returns the model."""
    model = make_checkpoint(kind, folder, vocab_size=VOCABULARY, **overrides)
    write_tokenizer(folder)
    return model


def measured_artifact(folder: Path) -> Path:
    """A small random Mixtral, quantized to 4 bits and measured, beside its model and text."""
    random_checkpoint(folder / "model", "mixtral")
    text = calibration(folder, 40, 32)
    out = folder / "plain.pw"
    quantize.run(str(folder / "model"), out, QuantizeConfig(max_bits=4, calibration=text), QUIET)
    sensitivity.run(out, text, QUIET)
    return out


@dataclass(frozen=True)
class Small:
    """A random checkpoint, text, and the artifact that they give."""

    folder: Path
    config: QuantizeConfig

    @property
    def model(self) -> str:
        """The checkpoint's folder."""
        return str(self.folder / "model")

    @property
    def artifact(self) -> Path:
        """What `quantize` made of it."""
        return self.folder / "clean.pw"


def losses(model: ObservedModel, windows: Tensor, weights: Weights | None = None) -> Tensor:
    """Loss [P, S-1] in nats of every token but the first of windows [P, S]."""
    states = model.read(windows, weights=weights)
    found = []
    for batch, ids in enumerate(batches(windows)):
        logits = torch.cat(list(model.logits(ids, states.get(0, batch))), 1)[:, :-1]
        found.append(cross_entropy(logits.mT, ids[:, 1:], reduction="none"))
    return torch.cat(found)


def tree_digests(root: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

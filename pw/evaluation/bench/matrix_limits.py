"""What a model allows of a comparison of policies, known before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pw.engine.start.dummy import DummySource
from pw.errors import ConfigError
from pw.models.architecture import Architecture
from pw.store.artifact import Artifact


@dataclass(frozen=True)
class Limits:
    """Widths that there are planes of, and the longest context."""

    min_bits: int
    max_bits: int
    tokens: int  # that the model states

    @classmethod
    def of(cls, folder: Path, load_format: str) -> Limits:
        """Those of an artifact, or of what stands for dummy weights.

        Raises:
            StoreError: The artifact is missing or damaged.
            ModelError: The model is not supported.
        """
        if load_format == "dummy":
            bits = DummySource.min_bits, DummySource.max_bits
        else:
            artifact = Artifact.open(folder)
            bits = artifact.min_bits, artifact.max_bits
        return cls(*bits, int(Architecture.load(folder).config.max_position_embeddings))

    def of_policy(self, policy: str) -> ConfigError | None:
        """Why a policy cannot be measured; None: it can."""
        bits = policy.partition(":")[2]
        if not bits or self.min_bits <= int(bits) <= self.max_bits:
            return None
        return ConfigError(
            f"policy `{policy}` is not to be had: the artifact has {self.min_bits} to "
            f"{self.max_bits} bits",
            f"choose one of these, or make another artifact: `pw calibrate MODEL --max-bits {bits}`"
            if int(bits) > self.max_bits
            else f"choose {self.min_bits} to {self.max_bits}",
        )

    def of_context(self, context: int, steps: int, tokens: int) -> ConfigError | None:
        """Why a context cannot be measured; None: it can.

        Args:
            context: Its tokens.
            steps: Those that are measured, as they are asked for.
            tokens: That are made behind the context for them.
        """
        if context + tokens <= self.tokens:
            return None
        longest = self.tokens - tokens
        room = self.tokens - context - (tokens - steps - steps // 4)
        most = room - (room + 1) // 5  # n measured steps take n + n // 4
        remedies = [f"--context {longest} at most"] * (longest > 0)
        remedies += [f"--steps {most} at most"] * (most > 0)
        return ConfigError(
            f"--context {context} and the {tokens} tokens that --steps {steps} makes behind it "
            f"are more than the {self.tokens} tokens that the model states",
            f"ask for {', or '.join(remedies)}" if remedies else "lower --context and --steps",
        )

    def check(self, contexts: Sequence[int], steps: int, tokens: int) -> None:
        """Refuse a comparison of which no context can be measured.

        Args:
            contexts: All of it, in tokens.
            steps: See `of_context`.
            tokens: See `of_context`.

        Raises:
            ConfigError: All are too long.
        """
        refusal = self.of_context(min(contexts), steps, tokens)
        if refusal is not None:
            raise refusal

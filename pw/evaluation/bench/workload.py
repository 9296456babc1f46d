"""What a benchmark asks for: prompts, lengths of answers, moments of arrival. Local files only.

Datasets, by the names that users of vLLM know:

    random     token ids drawn at random, after a prefix that all share (may be empty)
    sharegpt   a JSON list of conversations; first human turn and the length of its answer
    custom     a .jsonl with `prompt`, and `output_tokens` where it has them
    trace      a .jsonl of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: blocks of
               512 tokens that requests share, as Mooncake's traces have them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pw.errors import ConfigError

DATASETS = ("random", "sharegpt", "custom", "trace")
_TRACE_BLOCK = 512  # tokens behind one hash id
_CHARACTERS = 4  # of a token, where nothing here can count tokens
# Ids that every tokenizer has: for servers whose tokenizer is not here.
COMMON_IDS = range(10, 250)

Count = Callable[[str], int]


@dataclass(frozen=True)
class Request:
    """One request of a benchmark. The prompt is text or token ids."""

    prompt: str | list[int]
    output_len: int  # tokens to make
    arrival: float | None = None  # seconds after the start; None = as `arrivals` has it


@dataclass(frozen=True)
class Workload:
    """Which requests, in vLLM's terms."""

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 100
    input_len: int = 1024  # random: tokens of a prompt
    output_len: int = 128  # random: tokens of an answer; custom: where the file says nothing
    range_ratio: float = 0.0  # random: lengths vary by this share, evenly
    prefix_len: int = 0  # random: tokens that all prompts begin with
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"unknown dataset: `{self.dataset}`", f"use {', '.join(DATASETS)}")
        if self.dataset != "random" and self.path is None:
            raise ConfigError(
                f"dataset {self.dataset} needs a file", "name it: --dataset-path FILE"
            )
        if min(self.num_prompts, self.input_len, self.output_len) < 1 or self.prefix_len < 0:
            raise ConfigError(
                "num-prompts, input and output length must be at least 1: "
                f"{self.num_prompts}, {self.input_len}, {self.output_len}"
            )
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range ratio must be in [0, 1): {self.range_ratio}")

    def requests(
        self, ids: range = COMMON_IDS, count: Count = lambda text: len(text) // _CHARACTERS + 1
    ) -> list[Request]:
        """The requests; the same for the same settings.

        Args:
            ids: Random prompts are made of these tokens.
            count: Tokens of a text.

        Raises:
            ConfigError: The file is missing, of another form, or has too few prompts.
        """
        rng = np.random.default_rng(self.seed)
        if self.dataset == "random":
            return list(self._random(rng, ids))
        assert self.path is not None
        read = {"sharegpt": _sharegpt, "custom": _custom, "trace": _trace}[self.dataset]
        try:
            found = list(read(self, self.path.read_text("utf-8"), ids, count))
        except OSError as error:
            raise ConfigError(f"cannot read `{self.path}`: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"not a {self.dataset} dataset: `{self.path}` ({error})") from error
        if not found:
            raise ConfigError(f"no usable prompts in `{self.path}`")
        if self.dataset != "trace":
            rng.shuffle(found)
        return found[: self.num_prompts]

    def _random(self, rng: np.random.Generator, ids: range) -> Iterator[Request]:
        prefix = rng.integers(ids.start, ids.stop, self.prefix_len).tolist()
        for _ in range(self.num_prompts):
            sizes = [self._vary(rng, size) for size in (self.input_len, self.output_len)]
            tokens = rng.integers(ids.start, ids.stop, sizes[0]).tolist()
            yield Request([*prefix, *tokens], sizes[1])

    def _vary(self, rng: np.random.Generator, size: int) -> int:
        low, high = (1 - self.range_ratio) * size, (1 + self.range_ratio) * size
        return int(rng.integers(max(1, round(low)), max(1, round(high)), endpoint=True))


def _sharegpt(_: Workload, text: str, __: range, count: Count) -> Iterator[Request]:
    for entry in json.loads(text):
        turns = entry["conversations"]
        if len(turns) >= 2 and turns[0]["from"] in ("human", "user") and turns[0]["value"]:
            yield Request(str(turns[0]["value"]), max(1, count(str(turns[1]["value"]))))


def _custom(load: Workload, text: str, __: range, ___: Count) -> Iterator[Request]:
    for line in text.splitlines():
        if line.strip():
            entry: dict[str, Any] = json.loads(line)
            prompt = entry["prompt"]
            if not prompt or not isinstance(prompt, str | list):
                raise ValueError("a prompt is text or a list of token ids")
            yield Request(prompt, int(entry.get("output_tokens", load.output_len)))


def _trace(load: Workload, text: str, ids: range, __: Count) -> Iterator[Request]:
    entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    start = min((float(entry["timestamp"]) for entry in entries), default=0.0)
    for line, entry in enumerate(entries):
        length, blocks = int(entry["input_length"]), list(entry.get("hash_ids", ()))
        tokens: list[int] = []
        for block in range(-(-length // _TRACE_BLOCK)):
            # A block that has no hash is shared with nobody.
            mark = [int(blocks[block])] if block < len(blocks) else [line, block]
            rng = np.random.default_rng([load.seed, *mark])
            tokens += rng.integers(ids.start, ids.stop, _TRACE_BLOCK).tolist()
        arrival = (float(entry["timestamp"]) - start) / 1e3
        yield Request(tokens[:length], max(1, int(entry["output_length"])), arrival)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Seconds at which requests arrive: [count], ascending, the first at once.

    Args:
        count: Requests.
        rate: Requests per second; infinite = all at once.
        burstiness: 1 = Poisson arrivals, less = in bursts, more = evenly (shape of a gamma
            distribution of the gaps, as in vLLM).
        seed: Of the gaps.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"request rate and burstiness must be positive: {rate}, {burstiness}")
    if np.isinf(rate):
        return np.zeros(count)
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0
    times: NDArray[np.float64] = gaps.cumsum()
    return times

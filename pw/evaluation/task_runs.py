"""Runs a task on an engine: choices by log-probability, answers by writing them.

Metrics, each a mean over the items with a bootstrap interval over them:

    acc          the choice with the largest summed log-probability is the right one; without
                 choices: every token of the target is the likeliest at its place
    acc_norm     the same after division by the characters of the choice
    choice_nll   -log of the right choice's share of the probability of all choices, nats
    target_nll   -log-probability of the whole target, nats (without choices)
    exact_match  the first line that the model writes is the target (greedy)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pw.engine.request import SamplingParams
from pw.errors import ConfigError
from pw.evaluation.bootstrap import Interval, mean_interval
from pw.evaluation.continuations import Encoder, Pair, Score, encode_pair, score_pairs
from pw.evaluation.inflight import Stepper, run_in_flight
from pw.evaluation.tasks import Item, Task, examples, follow, limited


class ChatEncoder(Encoder, Protocol):
    """A tokenizer with a chat template."""

    def render_chat(self, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> str:
        """Text of a conversation."""


class TaskEngine(Stepper, Protocol):
    """What a task needs of the engine."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together at most."""


@dataclass(frozen=True)
class TaskSettings:
    """How tasks are asked."""

    num_fewshot: int = 0
    limit: float | None = None  # a count of items, or below 1 a share
    seed: int = 0  # of the choice of examples
    generate: bool = False  # write answers too
    max_gen_tokens: int = 32
    apply_chat_template: bool = False


@dataclass(frozen=True)
class TaskResult:
    """What a policy scored on a task."""

    task: str
    sha256: str  # of the task's file
    items: int
    chance: float | None  # of acc
    truncated: int  # prompts that lost tokens at their beginning
    metrics: dict[str, Interval]
    values: dict[str, tuple[float, ...]]  # of each metric, per item: what paired intervals need
    mean_bits: float  # of the routed weights, mean over what was scored
    seconds: float
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class HarnessResult:
    """What lm-evaluation-harness reports of one task, under its own names."""

    task: str
    items: int
    version: str
    metrics: dict[str, float]  # "acc,none", "acc_stderr,none", ...
    mean_bits: float  # of the routed weights, mean over the requests of all tasks of the call
    seconds: float  # of all tasks of the call
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Questions:
    """A task ready to be asked: every item as text and as tokens. Make it with `prepare`."""

    task: Task
    items: tuple[Item, ...]
    contexts: tuple[str, ...]  # what the model is given, examples included
    pairs: tuple[tuple[Pair, ...], ...]  # per item: context and each continuation that is scored
    prompts: tuple[list[int], ...]  # what answers are written behind; () when none are
    settings: TaskSettings

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        scored = max(len(p.context) + len(p.continuation) for each in self.pairs for p in each)
        written = max((len(prompt) for prompt in self.prompts), default=0)
        return max(scored, written + self.settings.max_gen_tokens if written else 0)


def prepare(
    task: Task, tokenizer: ChatEncoder, settings: TaskSettings, prefix: Sequence[int] = ()
) -> Questions:
    """Turn a task into prompts.

    Args:
        task: What is asked.
        tokenizer: Of the model.
        settings: How.
        prefix: Tokens put before each prompt (the BOS of models that need one).

    Raises:
        ConfigError: The settings do not fit the task, or an item cannot be scored.
        RequestError: The model has no chat template, or it refuses an item.
    """
    items = limited(task, settings.limit)
    contexts = tuple(_context(task, index, settings, tokenizer) for index in range(len(items)))
    prefix = () if settings.apply_chat_template else prefix  # the template writes its own
    pairs = tuple(
        tuple(encode_pair(tokenizer, context, text, prefix) for text in _answers(item, context))
        for item, context in zip(items, contexts, strict=True)
    )
    written = contexts if settings.generate else ()
    prompts = tuple([*prefix, *tokenizer.encode(t, add_special_tokens=False)] for t in written)
    return Questions(task, items, contexts, pairs, prompts, settings)


def run_task(
    engine: TaskEngine,
    asked: Questions,
    *,
    concurrency: int = 4,
    advance: Callable[[int], None] = lambda _count: None,
) -> TaskResult:
    """Score a task; the engine has no other requests.

    Args:
        engine: Runs it.
        asked: The task's prompts.
        concurrency: Prompts in flight at a time.
        advance: Called with the number of items done since the last call.

    Raises:
        PwError: The engine failed on an item.
    """
    started = time.monotonic()
    limit = engine.max_model_len
    scores = _score(engine, asked.pairs, limit, concurrency, advance)
    values: dict[str, list[float]] = {}
    for item, found in zip(asked.items, scores, strict=True):
        measured = _choice_metrics(item, found) if item.choices else _target_metrics(found[0])
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    written: list[str] = []
    if asked.prompts:
        written = _write(engine, asked.prompts, asked.settings.max_gen_tokens, concurrency)
        right = [text == item.target for text, item in zip(written, asked.items, strict=True)]
        values["exact_match"] = [float(is_right) for is_right in right]
    return TaskResult(
        task=asked.task.name,
        sha256=asked.task.sha256,
        items=len(asked.items),
        chance=asked.task.chance,
        truncated=sum(len(p.context) + len(p.continuation) > limit for e in asked.pairs for p in e),
        metrics={name: mean_interval(each) for name, each in values.items()},
        values={name: tuple(each) for name, each in values.items()},
        mean_bits=float(np.mean([score.bits for found in scores for score in found])),
        seconds=time.monotonic() - started,
        samples=[_sample(asked, index, scores, written, values) for index in range(len(scores))],
    )


def _sample(
    asked: Questions,
    index: int,
    scores: Sequence[Sequence[Score]],
    written: Sequence[str],
    values: dict[str, list[float]],
) -> dict[str, Any]:
    """All about one item, for the file of samples."""
    item, found = asked.items[index], scores[index]
    sample: dict[str, Any] = {
        "index": index,
        "prompt": asked.contexts[index],
        "target": item.target,
        "logprobs": [score.logprob for score in found],
        "greedy": [score.greedy for score in found],
    }
    if item.choices:
        sample |= {"choices": list(item.choices), "answer": item.answer}
    if written:
        sample["written"] = written[index]
    return sample | {name: each[index] for name, each in values.items()}


def _context(task: Task, index: int, settings: TaskSettings, tokenizer: ChatEncoder) -> str:
    """What the model is given before the answer: examples, then the prompt."""
    shots = examples(task, index, settings.num_fewshot, settings.seed)
    prompt = task.items[index].prompt
    if not settings.apply_chat_template:
        return "\n\n".join([*(shot.prompt + shot.right for shot in shots), prompt])
    messages = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.prompt})
        messages.append({"role": "assistant", "content": shot.right.strip()})
    messages.append({"role": "user", "content": prompt})
    return tokenizer.render_chat(messages, add_generation_prompt=True)


def _answers(item: Item, context: str) -> list[str]:
    return [follow(context, text) for text in item.choices or (item.target,)]


def _score(
    engine: TaskEngine,
    pairs: Sequence[Sequence[Pair]],
    limit: int,
    concurrency: int,
    advance: Callable[[int], None],
) -> list[list[Score]]:
    """Scores of every continuation of every item; `advance` hears of whole items."""
    flat = [pair for each in pairs for pair in each]
    done, told = 0, 0

    def pair_done(count: int) -> None:
        nonlocal done, told
        done += count
        items = done * len(pairs) // len(flat)
        advance(items - told)
        told = items

    scores = iter(
        score_pairs(engine, flat, max_model_len=limit, concurrency=concurrency, advance=pair_done)
    )
    return [[next(scores) for _ in each] for each in pairs]


def _choice_metrics(item: Item, found: Sequence[Score]) -> dict[str, float]:
    logprobs = np.array([score.logprob for score in found])
    characters = np.array([len(choice.strip()) for choice in item.choices])
    assert item.answer is not None
    return {
        "acc": float(logprobs.argmax() == item.answer),
        "acc_norm": float((logprobs / characters).argmax() == item.answer),
        "choice_nll": float(np.logaddexp.reduce(logprobs) - logprobs[item.answer]),
    }


def _target_metrics(score: Score) -> dict[str, float]:
    return {"acc": float(score.greedy), "target_nll": -score.logprob}


def _write(
    engine: TaskEngine, prompts: Sequence[list[int]], count: int, concurrency: int
) -> list[str]:
    """The first line of at most `count` tokens that the model writes behind each prompt."""
    params = SamplingParams(max_tokens=count, temperature=0.0, stop=("\n",))
    room = engine.max_model_len - count
    if room < 1:
        raise ConfigError(
            f"answers of {count} tokens leave no room for a prompt in a context of "
            f"{engine.max_model_len}",
            "lower --max-gen-tokens or raise --max-model-len",
        )
    texts = [""] * len(prompts)
    for index, output in run_in_flight(
        engine,
        [prompt[-room:] for prompt in prompts],
        params,
        concurrency=concurrency,
        what="item",
    ):
        texts[index] += output.text
    return [text.strip() for text in texts]

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

from pw.engine.request import EngineStatus, SamplingParams
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

    def status(self) -> EngineStatus:
        """A snapshot."""


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
    mean_bits: float  # when the task was done
    seconds: float
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)


def run_task(
    engine: TaskEngine,
    tokenizer: ChatEncoder,
    task: Task,
    settings: TaskSettings,
    *,
    prefix: Sequence[int] = (),
    concurrency: int = 4,
    advance: Callable[[int], None] = lambda _count: None,
) -> TaskResult:
    """Score a task; the engine has no other requests.

    Args:
        engine: Runs it.
        tokenizer: Of the model.
        task: What is asked.
        settings: How.
        prefix: Tokens put before each prompt (the BOS of models that need one).
        concurrency: Prompts in flight at a time.
        advance: Called with the number of items done since the last call.
    """
    started = time.monotonic()
    items = limited(task, settings.limit)
    contexts = [_context(task, index, settings, tokenizer) for index in range(len(items))]
    samples: list[dict[str, Any]] = [
        {"index": index, "prompt": context, "target": item.target}
        for index, (item, context) in enumerate(zip(items, contexts, strict=True))
    ]
    prefix = () if settings.apply_chat_template else prefix  # the template writes its own
    pairs = [
        [encode_pair(tokenizer, context, text, prefix) for text in _continuations(item, context)]
        for item, context in zip(items, contexts, strict=True)
    ]
    limit = engine.max_model_len
    truncated = sum(len(pair.context) + len(pair.continuation) > limit for p in pairs for pair in p)
    scores = _score(engine, pairs, limit, concurrency, advance)
    values: dict[str, list[float]] = {}
    for item, found, sample in zip(items, scores, samples, strict=True):
        measured = _choice_metrics(item, found) if item.choices else _target_metrics(found[0])
        sample["logprobs"] = [score.logprob for score in found]
        sample["greedy"] = [score.greedy for score in found]
        if item.choices:
            sample |= {"choices": list(item.choices), "answer": item.answer}
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    if settings.generate:
        prompts = [
            [*prefix, *tokenizer.encode(context, add_special_tokens=False)] for context in contexts
        ]
        written = _write(engine, prompts, settings.max_gen_tokens, concurrency)
        values["exact_match"] = [
            float(text == item.target) for text, item in zip(written, items, strict=True)
        ]
        for text, sample in zip(written, samples, strict=True):
            sample["written"] = text
    for index, sample in enumerate(samples):
        sample |= {name: each[index] for name, each in values.items()}
    return TaskResult(
        task=task.name,
        sha256=task.sha256,
        items=len(items),
        chance=task.chance,
        truncated=truncated,
        metrics={name: mean_interval(each) for name, each in values.items()},
        values={name: tuple(each) for name, each in values.items()},
        mean_bits=engine.status().mean_bits,
        seconds=time.monotonic() - started,
        samples=samples,
    )


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


def _continuations(item: Item, context: str) -> list[str]:
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

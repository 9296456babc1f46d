import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pw.errors import ConfigError
from pw.evaluation.task_runs import TaskSettings, prepare, run_task
from pw.evaluation.tasks import Task, load_task
from support.scoring import CharTokenizer, UnigramEngine

TOKENIZER = CharTokenizer()


def cost(text: str) -> float:
    """Minus the log-probability that the engine gives a text."""
    return sum(ord(character) + 1 for character in text) / 10


def make_task(folder: Path, *records: object) -> Task:
    path = folder / "own.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return load_task(str(path))


def test_choices_by_sum_and_by_length(tmp_path: Path) -> None:
    """Short choices win by the sum; `!!!!` has the likeliest characters."""
    task = make_task(
        tmp_path,
        {"prompt": "q:", "choices": ["z", "!!!!"], "answer": 0},
        {"prompt": "q:", "choices": ["z", "!!!!"], "answer": 1},
    )
    result = run_task(UnigramEngine(), prepare(task, TOKENIZER, TaskSettings()))
    assert result.values["acc"] == (1.0, 0.0)
    assert result.values["acc_norm"] == (0.0, 1.0)
    gap = cost("!!!!") - cost("z")
    expected = (math.log1p(math.exp(-gap)), math.log1p(math.exp(gap)))
    assert result.values["choice_nll"] == pytest.approx(expected)
    assert result.metrics["acc"].mean == 0.5
    assert (result.items, result.chance, result.truncated) == (2, 0.5, 0)
    sample = result.samples[1]
    assert (sample["prompt"], sample["answer"], sample["acc"]) == ("q:", 1, 0.0)
    assert sample["logprobs"] == pytest.approx([-cost(" z"), -cost(" !!!!")])


def test_targets_without_choices(tmp_path: Path) -> None:
    task = make_task(tmp_path, {"prompt": "q:", "target": "ab"})
    result = run_task(UnigramEngine(), prepare(task, TOKENIZER, TaskSettings()))
    assert result.values["target_nll"] == pytest.approx((cost(" ab"),))
    assert result.values["acc"] == (0.0,)
    assert result.chance is None


def test_examples_stand_before_the_prompt(tmp_path: Path) -> None:
    task = make_task(tmp_path, {"prompt": "one:", "target": "1"}, {"prompt": "two:", "target": "2"})
    asked = prepare(task, TOKENIZER, TaskSettings(num_fewshot=1))
    assert asked.contexts == ("two: 2\n\none:", "one: 1\n\ntwo:")
    chat = prepare(task, TOKENIZER, TaskSettings(num_fewshot=1, apply_chat_template=True), [7])
    assert chat.contexts[0] == "<u>two:<a>2<u>one:<a>\n"
    assert 7 not in chat.pairs[0][0].context  # the template writes what belongs before a text
    assert chat.pairs[0][0].continuation == [ord("\n"), ord("1")]


def test_answers_are_written_and_compared(tmp_path: Path) -> None:
    task = make_task(
        tmp_path,
        {"prompt": "capital?", "choices": ["Rome", "Paris"], "answer": 1},
        {"prompt": "colour?", "choices": ["red", "blue"], "answer": 0, "target": "red"},
    )
    engine = UnigramEngine(answers={"capital?": " Paris", "colour?": " blue"})
    settings = TaskSettings(generate=True, max_gen_tokens=4)
    asked = prepare(task, TOKENIZER, settings, [7])
    assert asked.prompts[0][:2] == [7, ord("c")]
    assert asked.longest == 1 + len("capital? Paris")
    result = run_task(engine, asked)
    assert result.values["exact_match"] == (1.0, 0.0)
    assert [sample["written"] for sample in result.samples] == ["Paris", "blue"]


def test_long_prompts_lose_their_beginning_and_are_counted(tmp_path: Path) -> None:
    task = make_task(
        tmp_path, {"prompt": "a" * 50, "target": "b"}, {"prompt": "short", "target": "b"}
    )
    engine = UnigramEngine(max_model_len=20)
    settings = TaskSettings(generate=True, max_gen_tokens=4)
    result = run_task(engine, prepare(task, TOKENIZER, settings))
    assert result.truncated == 1
    assert result.values["target_nll"] == pytest.approx((cost(" b"),) * 2)
    with pytest.raises(ConfigError, match="answers of 20 tokens leave no room for a prompt"):
        run_task(engine, prepare(task, TOKENIZER, replace(settings, max_gen_tokens=20)))


def test_progress_counts_items_not_choices(tmp_path: Path) -> None:
    item = {"prompt": "q:", "choices": ["a", "b", "c"], "answer": 0}
    task = make_task(tmp_path, *[item] * 4)
    done: list[int] = []
    asked = prepare(task, TOKENIZER, TaskSettings(limit=3))
    run_task(UnigramEngine(), asked, advance=done.append)
    assert sum(done) == 3

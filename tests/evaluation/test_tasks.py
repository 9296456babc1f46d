import json
from pathlib import Path

import pytest

from pw.errors import ConfigError
from pw.evaluation.tasks import BUNDLED, Task, examples, follow, limited, load_task


def write(folder: Path, *records: object) -> str:
    path = folder / "own.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return str(path)


def letters(folder: Path, count: int = 6) -> Task:
    items = [{"prompt": f"item {n}:", "target": "ABCDEF"[n]} for n in range(count)]
    return load_task(write(folder, *items))


def test_both_kinds_of_items_and_the_names_of_published_sets(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "2 + 2 =", "choices": [" 5", " 4"], "answer": 1, "more": "ignored"},
        {"query": "She", "choices": ["runs.", "ran.", "run."], "gold": 0},
    )
    task = load_task(path)
    assert (task.name, task.has_choices, task.chance) == ("own", True, pytest.approx(5 / 12))
    first, second = task.items
    assert (first.right, first.target) == (" 4", "4")
    assert (second.right, second.target) == (" runs.", "runs.")  # with the blank that was missing

    task = load_task(write(tmp_path, {"context": "The sky is", "continuation": "blue"}))
    assert (task.has_choices, task.chance) == (False, None)
    assert (task.items[0].right, task.items[0].target) == (" blue", "blue")


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_tasks_are_whole(name: str) -> None:
    task = load_task(name)
    assert len(task.items) == 100
    assert 0.2 < (task.chance or 0) < 0.4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["x"], "not a JSON object"),
        ({"choices": [" a", " b"], "answer": 0}, "`prompt` must be a text: null"),
        ({"prompt": "x"}, "`target` must be a text: null"),
        ({"prompt": "x", "choices": "ab", "answer": 0}, "`choices` must be a list of texts"),
        ({"prompt": "x", "choices": ["a"], "answer": 0}, "`choices` must be more than one"),
        ({"prompt": "x", "choices": ["a", "b"]}, "`answer` must be an index below 2: null"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": True}, "`answer` must be an index"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "`answer` must be an index"),
    ],
)
def test_items_that_are_refused_with_their_place(
    record: object, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {"prompt": "fine", "target": "yes"}, record)
    with pytest.raises(ConfigError) as error:
        load_task(path)
    assert message in error.value.message
    assert f"{path}:2" in error.value.message


def test_files_that_are_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the task") as error:
        load_task(str(tmp_path / "none.jsonl"))
    assert "tracking" in error.value.hint
    path = tmp_path / "own.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no items"):
        load_task(str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"not JSON: `.*own.jsonl:1`"):
        load_task(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_task(str(path))
    mixed = write(
        tmp_path,
        {"prompt": "x", "choices": ["a", "b"], "answer": 0},
        {"prompt": "x", "target": "a"},
    )
    with pytest.raises(ConfigError, match="some items have choices and some have none"):
        load_task(mixed)


def test_a_blank_is_put_where_neither_side_has_one() -> None:
    assert [follow("a:", "b"), follow("a: ", "b"), follow("a:", " b"), follow("a:\n", "b")] == [
        " b",
        "b",
        " b",
        "b",
    ]


def test_limits_count_or_share(tmp_path: Path) -> None:
    task = letters(tmp_path)
    assert [len(limited(task, limit)) for limit in (None, 4, 0.5, 0.01, 99)] == [6, 4, 3, 1, 6]
    with pytest.raises(ConfigError, match="--limit must be a positive count or share: -1"):
        limited(task, -1)


def test_examples_are_others_and_the_same_each_time(tmp_path: Path) -> None:
    task = letters(tmp_path)
    for index, item in enumerate(task.items):
        drawn = examples(task, index, 5, seed=1)
        assert item not in drawn
        assert len(set(drawn)) == 5
        assert drawn == examples(task, index, 5, seed=1)
    assert len({examples(task, 0, 5, seed=seed) for seed in range(8)}) > 1
    with pytest.raises(ConfigError, match="--num-fewshot must be below the 6 items"):
        examples(task, 0, 6, seed=1)

"""lm-evaluation-harness itself on our engine, with local tasks; skipped where it is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from pw.engine import Engine
from pw.engine.request import SamplingParams
from pw.errors import ConfigError
from pw.evaluation.task_runs import TaskSettings, prepare, run_task
from pw.evaluation.tasks import Task, load_task
from support.engines import make_artifact, open_engine

pytestmark = pytest.mark.filterwarnings("default")  # of the harness and of what it imports


@pytest.fixture(scope="module", autouse=True)
def harness() -> Any:
    """Our side of it."""
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    import pw.evaluation.harness

    return pw.evaluation.harness


ITEMS = [
    {
        "prompt": f"Question {n}: which letter?\nAnswer:",
        "choices": ["A", "BCD", "EF"],
        "answer": n % 3,
    }
    for n in range(8)
]
CHOICES = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "A"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    for name, text in (("letters", CHOICES), ("words", WRITING)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "items.jsonl")))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    _, artifact = make_artifact("qwen2_moe", folder, num_hidden_layers=1)
    return open_engine(artifact, "static:4", max_model_len=160)


@pytest.fixture
def task(folder: Path) -> Task:
    return load_task(str(folder / "items.jsonl"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def test_the_harness_and_our_own_scorer_agree(
    harness: Any, engine: Engine, folder: Path, task: Task
) -> None:
    settings = TaskSettings(limit=6)
    [theirs] = harness.run_harness(engine, engine.tokenizer, [folder / "letters.yaml"], settings)
    ours = run_task(engine, prepare(task, engine.tokenizer, settings))
    assert (theirs.task, theirs.items, theirs.mean_bits) == ("letters", 6, 4.0)
    assert theirs.metrics["acc,none"] == ours.metrics["acc"].mean
    assert theirs.metrics["acc_norm,none"] == ours.metrics["acc_norm"].mean
    by_item = {sample["doc_id"]: sample for sample in theirs.samples}
    for mine in ours.samples:
        answers = by_item[mine["index"]]["filtered_resps"]
        assert [float(answer[0]) for answer in answers] == pytest.approx(mine["logprobs"], abs=1e-5)


def test_answers_are_written_up_to_the_stop(harness: Any, engine: Engine, folder: Path) -> None:
    [found] = harness.run_harness(
        engine, engine.tokenizer, [folder / "words.yaml"], TaskSettings(limit=2)
    )
    prompt = engine.tokenizer.encode(ITEMS[1]["prompt"], add_special_tokens=False)  # type: ignore[arg-type]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, stop=("\n",))
    [expected] = engine.generate([prompt], greedy)
    answers = {sample["doc_id"]: sample["filtered_resps"][0] for sample in found.samples}
    assert answers[1] == expected.text
    assert "exact_match,none" in found.metrics


def test_rolling_scores_every_token_once(harness: Any, engine: Engine) -> None:
    """A text longer than the context: windows of it, each token predicted in one of them."""
    model = harness.EngineLM(engine, engine.tokenizer)
    text = "planes and pages " * 20
    ids = model.tok_encode(text)
    assert len(ids) > model.max_length
    seen: list[int] = []
    original = model._loglikelihood_tokens

    def spy(
        requests: list[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        for _, _, continuation in requests:
            seen.extend(continuation)
        scores: list[tuple[float, bool]] = original(requests)
        return scores

    model._loglikelihood_tokens = spy
    [total] = model.loglikelihood_rolling([Request((text,))])
    assert seen == ids
    assert -20 * len(ids) < total < 0


class Request:
    """The part of the harness's instance that a model reads."""

    def __init__(self, args: tuple[str, ...]) -> None:
        self.args = args


def test_a_prefix_is_put_once(harness: Any) -> None:
    class Encoder:
        """A token for each letter; knows a prefix."""

        eos_token_ids = (2,)
        inner = None

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1 if letter == "^" else ord(letter) for letter in text]

    model = harness.EngineLM(None, Encoder(), [1])
    assert model.tok_encode("a") == model.tok_encode("^a") == [1, ord("a")]
    assert model.tok_encode("a", add_special_tokens=False) == [ord("a")]
    assert (model.prefix_token_id, model.eot_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: x\ndataset_path: owner/name\n", "takes its data from a hub: `owner/name`"),
        ("[1, 2", "not a YAML file"),
        ("dataset_path: json\n", "has no `task`"),
        (None, "cannot read the task"),
    ],
)
def test_files_that_are_refused(
    harness: Any, text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "task.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        harness.check_files([file])


def test_functions_in_a_task_are_not_run_by_the_check(harness: Any, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("task: x\ndataset_path: json\nprocess_docs: !function bad.name\n")
    (tmp_path / "bad.py").write_text("raise RuntimeError('ran')")
    harness.check_files([file])

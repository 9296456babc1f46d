"""lm-evaluation-harness on our engine, in this process: its tasks, its prompts, its metrics.

Needs the extra `eval`. Tasks are YAML files of the harness whose data lie in local files
(`dataset_path: json`); nothing is downloaded. Such a file may name Python functions, which the
harness runs: take it only from people you trust.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pw.engine.request import SamplingParams
from pw.errors import ConfigError, PwError
from pw.evaluation.continuations import Pair, score_pairs
from pw.evaluation.inflight import run_in_flight
from pw.evaluation.task_runs import HarnessResult, TaskEngine, TaskSettings
from pw.models.tokenizer import Tokenizer

_LOCAL_DATA = ("json", "csv", "parquet", "text", "arrow")  # what `datasets` reads without a hub


class EngineLM(TemplateLM):
    """Our engine as a model of the harness.

    Args:
        engine: Has no other requests while the harness runs.
        tokenizer: Of the model.
        prefix: Tokens that belong before any text (the BOS of models that need one).
        concurrency: Requests in flight at a time.
    """

    def __init__(
        self,
        engine: TaskEngine,
        tokenizer: Tokenizer,
        prefix: Sequence[int] = (),
        concurrency: int = 4,
    ) -> None:
        super().__init__()
        self._engine, self._tokenizer, self._prefix = engine, tokenizer, list(prefix)
        self._concurrency = concurrency
        self.bits: list[float] = []  # mean bits of the routed weights at each request's end
        self.tokenizer = tokenizer.inner

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self._tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Id that an empty context consists of."""
        return self._prefix[0] if self._prefix else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output together at most."""
        return self._engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness would keep prepared requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation."""
        return self._tokenizer.render_chat(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; the model's prefix is put before them unless it is there or not wanted."""
        ids = self._tokenizer.encode(string, add_special_tokens=False)
        if add_special_tokens is False or ids[: len(self._prefix)] == self._prefix:
            return ids
        return [*self._prefix, *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        scores = score_pairs(
            self._engine, pairs, max_model_len=self.max_length, concurrency=self._concurrency
        )
        self.bits += [score.bits for score in scores]
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each token with as much context as fits."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Text that the model writes behind each context, without what ended it."""
        texts = []
        for context, settings in (request.args for request in requests):
            wanted = normalize_gen_kwargs(settings)
            count = min(int(wanted["max_gen_toks"]), self.max_length - 1)
            params = SamplingParams(
                max_tokens=count,
                temperature=float(wanted.get("temperature", 0.0)),
                stop=tuple(text for text in wanted["until"] if text),
            )
            prompt = self.tok_encode(context)[-(self.max_length - count) :]
            outputs = [
                output
                for _, output in run_in_flight(
                    self._engine, [prompt], params, concurrency=1, what="item"
                )
            ]
            texts.append("".join(output.text for output in outputs))
            self.bits.append(outputs[-1].mean_bits)
        return texts


def run_harness(
    engine: TaskEngine,
    tokenizer: Tokenizer,
    files: Sequence[Path],
    settings: TaskSettings,
    *,
    prefix: Sequence[int] = (),
    concurrency: int = 4,
) -> list[HarnessResult]:
    """Run the harness's tasks on an engine.

    Args:
        engine: Has no other requests.
        tokenizer: Of the model.
        files: YAML files of tasks.
        settings: Few-shot examples, limit, seed and chat template; a task's own number of examples
            counts when `num_fewshot` is 0.
        prefix: Tokens put before each prompt.
        concurrency: Requests in flight at a time.

    Raises:
        PwError: The harness found nothing to report.
    """
    started = time.monotonic()
    model = EngineLM(engine, tokenizer, prefix, concurrency)
    answer = _answer(model, [str(file) for file in files], settings)
    return [
        HarnessResult(
            task=name,
            items=len(answer["samples"].get(name, ())),
            version=str(answer["versions"].get(name, "")),
            metrics={key: value for key, value in found.items() if isinstance(value, float)},
            mean_bits=sum(model.bits) / max(len(model.bits), 1),
            seconds=time.monotonic() - started,
            samples=answer["samples"].get(name, []),
        )
        for name, found in answer["results"].items()
    ]


def _answer(model: EngineLM, files: list[str], settings: TaskSettings) -> dict[str, Any]:
    """What the harness returns; its progress bars are not shown."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    limit, seed = settings.limit, settings.seed
    with contextlib.redirect_stderr(io.StringIO()):
        answer: dict[str, Any] | None = simple_evaluate(
            model=model,
            tasks=files,
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=settings.num_fewshot or None,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            log_samples=True,
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=settings.apply_chat_template,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            bootstrap_iters=1000,
        )
    if answer is None:
        raise PwError("lm-evaluation-harness gave no result")
    return answer


class _Reader(yaml.SafeLoader):
    """Reads a task file without running anything: `!function module.name` becomes its text."""


_Reader.add_constructor("!function", lambda _, node: str(node.value))


def check_files(files: Sequence[Path]) -> None:
    """Refuse a file that is no task, or one whose data would come from a hub.

    Raises:
        ConfigError: One is.
    """
    for file in files:
        _check_file(file)


def _check_file(file: Path) -> None:
    try:
        content = _Reader(file.read_text("utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(
            f"cannot read the task `{file}`: {(error.strerror or str(error)).lower()}",
            "name a YAML file of lm-evaluation-harness",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"not a YAML file: `{file}`: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("task"), str):
        raise ConfigError(f"not a task of lm-evaluation-harness, it has no `task`: `{file}`")
    source = content.get("dataset_path")
    if source is not None and source not in _LOCAL_DATA:
        raise ConfigError(
            f"the task `{content['task']}` takes its data from a hub: `{source}`",
            "nothing is downloaded: put the data into a file and set `dataset_path: json` and "
            "`dataset_kwargs: {data_files: FILE}`",
        )

"""What a whole engine promises: independence of the batch, honest numbers, one fault at a time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pw.engine import Completion, Engine
from pw.engine.precision.policies import FixedPrecision
from pw.engine.request import SamplingParams
from pw.errors import BudgetError, ConfigError, RequestError
from pw.planning.bits_file import write_bits
from pw.store.artifact import Artifact
from pw_kernels import dispatch
from support.engines import open_engine, random_prompt, tight_budget
from support.logprobs import prompt_values

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        seed=seed,
        max_tokens=3 + seed % 7,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
    )


def logprobs(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    """Per request: token ids, log-probabilities of them, log-probabilities of the prompt."""
    names = [f"p{number}" for number in range(len(prompts))]
    found: dict[str, tuple[list[int], list[float], list[float | None]]] = {
        name: ([], [], []) for name in names
    }
    for name, prompt, its in zip(names, prompts, params, strict=True):
        engine.add_request(name, prompt, its)
    while engine.has_work():
        for output in engine.step():
            tokens, of_tokens, of_prompt = found[output.request_id]
            tokens += output.token_ids
            of_tokens += [entry.logprob for entry in output.logprobs]
            of_prompt += [entry and entry.logprob for entry in output.prompt_logprobs]
    return [found[name] for name in names]


def test_results_do_not_depend_on_the_batch_or_the_chunks(qwen: tuple[Any, Path]) -> None:
    prompts = [random_prompt(1 + 11 * seed, seed) for seed in range(8)]
    params = [sampled(seed) for seed in range(8)]
    one = open_engine(qwen[1], "static:4")
    alone = [logprobs(one, [p], [its])[0] for p, its in zip(prompts, params, strict=True)]
    for tokens, seqs in ((32, 8), (7, 8), (200, 3)):
        engine = open_engine(qwen[1], "static:4", max_num_batched_tokens=tokens, max_num_seqs=seqs)
        together = logprobs(engine, prompts, params)
        for (ids, chosen, scored), (its_ids, its_chosen, its_scored) in zip(
            together, alone, strict=True
        ):
            assert ids == its_ids
            assert chosen == pytest.approx(its_chosen, abs=2e-5)
            assert scored[0] is its_scored[0] is None
            assert scored[1:] == pytest.approx(its_scored[1:], abs=2e-5)


def test_neighbours_that_leave_change_nothing(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    prompt = random_prompt(50, 1)
    expected = engine.generate([prompt], sampled(6))[0]
    engine.add_request("mine", prompt, sampled(6))
    tokens: list[int] = []
    for step in range(40):
        engine.add_request(f"n{step}", random_prompt(20, step), GREEDY)
        if step % 3 == 2:
            engine.abort(f"n{step - 1}")
        for output in engine.step():
            if output.request_id == "mine":
                tokens += output.token_ids
    assert tuple(tokens) == expected.token_ids


def test_preemption_repeats_no_output_and_counts_no_prompt_twice(qwen: tuple[Any, Path]) -> None:
    budget = tight_budget(qwen[1], 90, "static:4")
    prompts = [random_prompt(40, seed) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=0)
    expected = open_engine(qwen[1], "static:4").generate(prompts, params)
    engine = open_engine(qwen[1], "static:4", memory_budget=budget)
    completions = engine.generate(prompts, params)
    status = engine.status()
    assert status.preemptions > 0
    assert (status.prompt_tokens, status.generation_tokens) == (4 * 40, 4 * 30)
    for completion, its in zip(completions, expected, strict=True):
        assert completion.token_ids == its.token_ids
        assert completion.text == its.text
        assert len(completion.prompt_logprobs) == 40
        assert prompt_values(completion) == pytest.approx(prompt_values(its), abs=2e-5)


def test_min_tokens_holds_ends_and_stop_strings_off(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    prompt = [random_prompt(20, 3)]
    free = engine.generate(prompt, GREEDY)[0]
    first = free.token_ids[0]

    def ask(**settings: Any) -> Completion:
        its = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **settings)
        return engine.generate(prompt, its)[0]

    assert ask(stop_token_ids=(first,)).token_ids == (first,)
    held = ask(stop_token_ids=(first,), min_tokens=4)
    assert len(held.token_ids) >= 4
    assert first not in held.token_ids[:4]
    shown = next(character for character in free.text if character != "\ufffd")
    short = ask(stop=(shown,))
    assert short.finish_reason == "stop"
    assert short.text == free.text[: free.text.index(shown)]
    late = ask(stop=(shown,), min_tokens=len(short.token_ids) + 1)
    assert len(late.token_ids) > len(short.token_ids)
    assert late.text.startswith(free.text[: free.text.index(shown) + 1])


def test_logits_that_are_not_finite_fail_one_request_only(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3")
    prompts = [random_prompt(9, seed) for seed in range(3)]
    params = [sampled(seed) for seed in (4, 5, 6)]
    expected = engine.generate(prompts, params)
    runner = engine._parts.runner
    run = runner.run

    def poisoned(chunks: Any) -> Any:
        logits, scored = run(chunks)
        logits = logits.clone()
        ready = [chunk.sequence for chunk in chunks if chunk.samples]
        for row, sequence in enumerate(ready):
            if sequence.prompt == prompts[1] and len(sequence.output) == 2:
                logits[row, 7] = torch.nan
        return logits, scored

    runner.run = poisoned  # type: ignore[method-assign]
    found = engine.generate(prompts, params)
    for mine, its in ((found[0], expected[0]), (found[2], expected[2])):
        assert (mine.token_ids, mine.finish_reason) == (its.token_ids, its.finish_reason)
    assert found[1].finish_reason == "error"
    assert found[1].error == "the model gave logits that are not finite"
    assert found[1].token_ids == expected[1].token_ids[:2]
    assert engine.status().failed == 1
    engine.check_integrity()


def test_a_refused_prompt_leaves_none_of_its_call_behind(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:3", max_num_queued_reqs=3, max_num_seqs=2)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.generate([[5], [6], [999]], GREEDY)
    assert not engine.has_work()
    # More prompts than the queue takes: they are fed in turns.
    completions = engine.generate([[5 + i] for i in range(9)], GREEDY)
    assert [len(completion.token_ids) for completion in completions] == [10] * 9
    engine.add_request("other", [5], GREEDY)
    with pytest.raises(ValueError, match="has 1 other requests"):
        engine.generate([[5]], GREEDY)


def test_status_adds_up_at_every_step(qwen: tuple[Any, Path]) -> None:
    artifact = Artifact.open(qwen[1])
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], 60))
    parts, memory = engine._parts, engine._parts.memory
    assert parts.table is not None
    for seed in range(4):
        engine.add_request(f"r{seed}", random_prompt(50, seed), GREEDY)
    while engine.has_work():
        engine.step()
        status = engine.status()
        page, sizes = status.page_bytes, status.bytes
        assert status.pages_weights + status.pages_kv + status.pages_free == status.pages_total
        assert status.pages_total * page == parts.arena.pages.nbytes
        assert sizes.planes + sizes.luts + sizes.kv + sizes.free == parts.arena.pages.nbytes
        assert (sizes.dense, sizes.workspace) == (memory.dense, memory.workspace)
        assert sizes.tables == memory.tables
        assert sizes.total <= sizes.budget == memory.budget
        assert sizes.padding < sizes.planes + sizes.luts
        assert sum(status.blocks_by_bits.values()) == artifact.geometry.blocks
        assert min(status.blocks_by_bits) <= status.mean_bits <= max(status.blocks_by_bits)
        assert sorted(status.layer_bits) == list(artifact.geometry.layers)
        assert np.mean(list(status.layer_bits.values())) == pytest.approx(status.mean_bits)
        assert status.running + status.waiting == len(engine._sequences)
    assert status.step > 0
    assert (status.finished, status.failed, status.aborted) == (4, 0, 0)
    assert (status.prompt_tokens, status.generation_tokens) == (200, 40)
    assert status.transfer_failures == 0
    assert json.dumps(status.plan_history)


def test_tensors_of_an_engine_are_what_it_charges(qwen: tuple[Any, Path]) -> None:
    engine = open_engine(qwen[1], "static:5")
    parts, sizes = engine._parts, engine.status().bytes
    model = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*parts.skeleton.model.parameters(), *parts.skeleton.model.buffers())
        if not tensor.is_meta
    }
    assert sizes.dense == sum(model.values())
    assert parts.table is not None
    assert parts.table.table_bytes == parts.table._mirror.device.nbytes
    assert sizes.host == 0  # nothing moves, so nothing is kept to come back
    moving = open_engine(qwen[1])
    slabs = moving._parts.store._slabs  # type: ignore[union-attr]
    assert moving.status().bytes.host == sum(slab.pages.nbytes for slab in slabs) > 0
    dense = open_engine(qwen[1], "dense").status().bytes
    weights = Artifact.open(qwen[1]).geometry.weights
    assert (dense.experts_dense, dense.planes, dense.luts) == (weights * 4, 0, 0)


def test_a_file_of_widths_is_served_and_planned_as_it_is(
    qwen: tuple[Any, Path], tmp_path: Path
) -> None:
    geometry = Artifact.open(qwen[1]).geometry
    bits = np.full(geometry.blocks, 2, dtype=np.int64)
    bits[::3] = 6
    path = tmp_path / "bits.json"
    write_bits(path, geometry, bits)
    budget = tight_budget(qwen[1], 60, f"static:{path}")
    engine = open_engine(qwen[1], f"static:{path}", memory_budget=budget)
    assert engine.status().blocks_by_bits == {2: int((bits == 2).sum()), 6: int((bits == 6).sum())}
    limit = engine.max_model_len
    prompt = random_prompt(limit - 5, 1)
    assert len(engine.generate([prompt], SamplingParams(temperature=0, max_tokens=5))) == 1
    engine.check_integrity()
    status = engine.status()  # shorter contexts would do with less workspace, but not with none
    without = budget - status.page_bytes * status.pages_free - status.bytes.workspace
    with pytest.raises(BudgetError, match="too small"):
        open_engine(qwen[1], f"static:{path}", memory_budget=without)


def test_replays_refuse_what_they_cannot_follow(qwen: tuple[Any, Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    budget = tight_budget(qwen[1], 60)
    recorded = open_engine(qwen[1], memory_budget=budget, trace=trace)
    recorded.generate([random_prompt(40, 1)], GREEDY)
    recorded.close()
    before = trace.read_text()
    with pytest.raises(ConfigError, match="would overwrite what it replays"):
        open_engine(qwen[1], f"replay:{trace}", memory_budget=budget, trace=trace)
    assert trace.read_text() == before
    with pytest.raises(ConfigError, match=r"recorded with \d+ pages of \d+ bytes, this memory"):
        open_engine(
            qwen[1], f"replay:{trace}", memory_budget=budget - 4 * recorded.status().page_bytes
        )


def test_a_trace_that_cannot_be_written_ends_and_the_engine_does_not(
    qwen: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")
    engine = open_engine(qwen[1], memory_budget=tight_budget(qwen[1], 60), trace=full)
    assert len(engine.generate([random_prompt(60, s) for s in range(4)], GREEDY)) == 4
    assert [record.message.split(",")[0] for record in caplog.records] == ["the trace ends here"]


def test_engine_seed_repeats_a_run_but_not_a_request(qwen: tuple[Any, Path]) -> None:
    _, artifact = qwen
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7]] * 3
    runs = [open_engine(artifact, "static:4", seed=1).generate(prompts, params) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({completion.token_ids for completion in runs[0]}) == 3
    assert open_engine(artifact, "static:4", seed=2).generate(prompts, params) != runs[0]


def test_every_kernel_backend_gives_the_same_log_probabilities(
    qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors that the engine hands over, strides and all, suit the GPU's kernels too."""
    _, artifact = qwen
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    prompts = [random_prompt(19, 1), random_prompt(3, 2)]
    found = {}
    for backend in ("reference", "triton"):
        monkeypatch.setattr(
            "pw.engine.context.write_kv", functools.partial(dispatch.write_kv, backend=backend)
        )
        monkeypatch.setattr(
            "pw.engine.context.paged_attention",
            functools.partial(dispatch.paged_attention, backend=backend),
        )
        monkeypatch.setattr(
            "pw.engine.experts.fused_moe", functools.partial(dispatch.fused_moe, backend=backend)
        )
        found[backend] = open_engine(artifact, "static:3").generate(prompts, params)
    for mine, expected in zip(found["triton"], found["reference"], strict=True):
        np.testing.assert_allclose(
            prompt_values(mine), prompt_values(expected), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_width_reached_by_moving_planes_is_the_fixed_width_bit_for_bit(
    qwen: tuple[Any, Path], bits: int, tmp_path: Path
) -> None:
    """Adaptive machinery held at one width, and widths from a file, equal `static:<bits>`."""
    _, artifact = qwen
    prompts = [random_prompt(length, length) for length in (40, 3, 17)]
    params = [sampled(seed) for seed in range(3)]
    expected = open_engine(artifact, f"static:{bits}").generate(prompts, params)
    held = open_engine(artifact, min_bits=bits, max_bits=bits)
    assert held.generate(prompts, params) == expected
    from_file = tmp_path / "bits.json"
    geometry = Artifact.open(artifact).geometry
    write_bits(from_file, geometry, np.full(geometry.blocks, bits, dtype=np.int64))
    assert open_engine(artifact, f"static:{from_file}").generate(prompts, params) == expected

    moved = open_engine(artifact)  # loads the widest, then every block is brought to the width
    table, mover = moved._parts.table, moved._parts.mover
    assert table is not None
    assert mover is not None
    for index in range(geometry.blocks):
        table.reduce(index, 2)
        if bits > 2:
            mover.start(table.begin_raise(index, bits))
    for index in mover.wait():
        table.commit_raise(index)
    frozen = FixedPrecision()
    object.__setattr__(moved._parts, "precision", frozen)
    assert moved.generate(prompts, params) == expected

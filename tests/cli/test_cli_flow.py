"""From a checkpoint to answers, through the command line alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pw import __version__
from pw.blocks import BlockKey
from pw.cli.options import Calibration
from pw.store import Artifact
from support.cli import SMALL, TEXT_FLAGS, Made, run
from support.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def test_calibrate_says_what_it_made_and_what_comes_next(made: Made) -> None:
    assert f"{made.artifact}: 12 blocks at 2 to 4 bits" in made.calibrated.out
    assert f"pw serve {made.artifact}" in made.calibrated.out
    for stage in ("quantize: 12 blocks in", "sensitivity: 40 samples", "trace: 40 prompts"):
        assert stage in made.calibrated.err
    assert "rank correlation" in made.calibrated.err


@pytest.mark.parametrize("stage", ["quantize", "sensitivity", "trace"])
def test_a_stage_alone_finds_its_work_done_and_refuses_other_settings(
    made: Made, stage: str
) -> None:
    before = (made.artifact / "manifest.json").read_bytes()
    target = str(made.checkpoint if stage == "quantize" else made.artifact)
    output = ("-o", str(made.artifact), "--max-bits", "4") if stage == "quantize" else ()
    text = ("--dataset", str(made.text), *TEXT_FLAGS)
    again = run(stage, target, *output, *text, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["tokens"] == 40 * 16
    assert (made.artifact / "manifest.json").read_bytes() == before

    refused = run(stage, target, *output, *text, "--seed", "1")
    assert refused.code == 3
    assert "seed" in refused.err
    assert "--overwrite" in refused.err
    assert (made.artifact / "manifest.json").read_bytes() == before


def test_without_residual_heads_it_runs_and_says_so_unless_they_are_asked_for(
    made: Made, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.pw"
    flags = ("--dataset", str(made.text), "--nsamples", "8", "--seqlen", "16", "--max-bits", "4")
    assert run("calibrate", str(made.checkpoint), "-o", str(bare), *flags, "-q").code == 0
    ask = ("generate", str(bare), "a page", *SMALL, "--max-tokens", "2", "--ignore-eos")
    done = run(*ask, "--residual", "auto")
    assert done.code == 0, done.err
    assert done.err.count("WARNING") == 1
    assert f"`pw fit-residuals {bare}`" in done.err
    assert "WARNING" not in run(*ask).err
    static = run(*ask, "--residual", "auto", "--precision-policy", "static:3")
    assert "WARNING" not in static.err
    refused = run(*ask, "--residual", "learned")
    assert refused.code == 3
    assert "artifact has no table `residuals`" in refused.err
    few = run("fit-residuals", str(bare))
    assert "8 prompts are too few" in few.err
    assert f"`pw trace {bare} --nsamples N --overwrite`" in few.err
    assert "WARNING" not in run("generate", str(made.artifact), "a page", *SMALL).err


def test_inspect_shows_sizes_and_stages(made: Made) -> None:
    shown = run("inspect", str(made.artifact))
    assert shown.code == 0
    for line in ("planes", "LUTs", "Qwen2Moe", "moments, quantize, residuals, routing"):
        assert line.lower() in shown.out.lower(), line
    described = json.loads(run("inspect", str(made.artifact), "--verify", "--json").out)
    assert described["findings"] == []
    on_disk = sum(f.stat().st_size for f in made.artifact.rglob("*") if f.is_file())
    assert described["bytes"]["total"] == on_disk


def test_inspect_verify_names_the_block_and_plane_of_a_flipped_bit(
    made: Made, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.pw"
    subprocess.run(["cp", "-r", str(made.artifact), str(damaged)], check=True)
    artifact = Artifact.open(damaged)
    shard = next(f for f in damaged.glob("planes.zarr/**/c/*/**/*") if f.is_file())
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)

    done = run("inspect", str(damaged), "--verify")
    assert done.code == 3
    keys = [str(key) for key in artifact.geometry.keys()]
    assert any(f"{key} plane 0 checksum differs" in done.out for key in keys)
    assert str(shard.relative_to(damaged)) in done.out
    assert done.err.startswith("error: artifact is damaged: 1 finding: ")
    assert str(BlockKey(0, 0, "gate_up")) in keys


def test_generate_prints_the_text_and_json_the_rest(made: Made) -> None:
    flags = (*SMALL, "--max-tokens", "5", "--ignore-eos")
    told = run("generate", str(made.artifact), "a page", *flags, "--precision-policy", "static:4")
    assert told.code == 0, told.err
    result = json.loads(
        run(
            "generate", str(made.artifact), "a page", *flags, "--precision-policy", "static:4",
            "--json",
        ).out
    )  # fmt: skip
    assert told.out == result["text"] + "\n"
    assert told.err == f"loading {made.artifact} ...\n"
    assert (result["completion_tokens"], result["finish_reason"]) == (5, "length")
    assert result["mean_bits"] == 4.0
    assert result["bytes"]["budget"] == 64 << 20


def test_a_budget_that_cannot_work_is_exit_code_4_with_the_least_that_can(made: Made) -> None:
    done = run("generate", str(made.artifact), "x", "--memory-budget", "100kB")
    assert done.code == 4
    assert "97.66 KiB (100,000 bytes) is too small" in done.err
    assert "hint: raise --memory-budget" in done.err


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_context_asked_for_that_does_not_fit_is_refused(made: Made, command: str) -> None:
    """Narrowing every expert is what counts; `auto` takes what there is."""
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--memory-budget")
    tail = ("--dry-run",) if command == "serve" else ("hi", "--max-tokens", "1")
    budget = "100kB"
    for _ in range(2):  # the least as the command line knows it, then as the engine does
        told = run("generate", str(made.artifact), "hi", *flags, budget).err
        _, least = re.findall(r"\(([\d,]+) bytes\)", told)
        budget = f"{int(least.replace(',', '')) + (16 << 10)}B"
    whole = (command, str(made.artifact), *tail, *flags, budget)
    done = run(*whole, "--max-model-len", "250")
    assert done.code == 4, done.err
    error = next(line for line in done.err.splitlines() if line.startswith("error: "))
    found = re.search(
        r"--max-model-len of 250 tokens does not fit in the memory .* (\d+) tokens", error
    )
    assert found, error
    assert f"lower it to {found[1]}, raise --memory-budget, or give `auto`" in done.err
    assert "Traceback" not in done.err
    for length in ("auto", found[1]) if command == "generate" else (found[1],):
        assert run(*whole, "--max-model-len", length).code == 0


def test_serve_answers_and_drains(made: Made) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "pipelines"))
    command = (sys.executable, "-m", "pw", "serve", str(made.artifact), *SMALL, "--port", "0")
    with subprocess.Popen(
        [*command, "--served-model-name", "house"],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line.startswith("PagedWeight serves house on "), line
            url = line.split()[-1]
            body = {"model": "house", "prompt": "a page", "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
            assert answer["usage"]["completion_tokens"] == 3
        finally:
            server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0, errors
    assert "memory plan:" in errors
    assert "Traceback" not in errors


def test_dry_run_prints_the_memory_plan_only(made: Made) -> None:
    done = run("serve", str(made.artifact), *SMALL, "--dry-run")
    assert (done.code, done.out) == (0, "")
    assert "of a budget of 64.00 MiB" in done.err
    assert "policy adaptive" in done.err


def test_what_stops_the_engines_process_is_told_as_if_it_were_this_one(
    made: Made, tmp_path: Path
) -> None:
    small = run("serve", str(made.artifact), *SMALL, "--memory-budget", "64KiB", "--port", "0")
    assert (small.code, small.out) == (4, "")
    assert small.err.startswith("error: memory budget of 64.00 KiB (65,536 bytes) is too small: ")
    assert "weights alone, as they are stored, take" in small.err  # the engine widens them
    assert "hint: raise --memory-budget" in small.err
    damaged = tmp_path / "damaged.pw"
    shutil.copytree(made.artifact, damaged)
    weights = bytearray((damaged / "dense.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "dense.safetensors").write_bytes(weights)
    broken = run("serve", str(damaged), *SMALL, "--port", "0")
    assert (broken.code, broken.out) == (3, "")
    assert broken.err.startswith("error: artifact file is damaged: ")


def test_tiny_is_calibrated_once_into_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Made
) -> None:
    """The name's own path, with a small checkpoint in place of the bundled one."""
    monkeypatch.setenv("PW_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pw.models.resolve.asset", lambda _name: made.checkpoint)
    monkeypatch.setattr(
        "pw.cli.locate.Calibration", lambda: Calibration(str(made.text), nsamples=40, seqlen=16)
    )
    first = run("inspect", "tiny", "--json")
    assert first.code == 0, first.err
    expected = tmp_path / __version__ / "tiny.pw"
    assert first.err.startswith("calibrating the bundled model once")
    assert f"into {expected}" in first.err
    assert json.loads(first.out)["path"] == str(expected)
    assert {"quantize", "sensitivity", "routing", "residuals"} <= set(
        json.loads(first.out)["stages"]
    )
    second = run("inspect", "tiny", "--json")
    assert (second.out, second.err) == (first.out, "")
    (tmp_path / "artifacts").mkdir()
    expected.rename(tmp_path / "artifacts" / "tiny.pw")
    left_by_the_demo = run("inspect", "tiny", "--json")
    assert left_by_the_demo.code == 0, left_by_the_demo.err
    assert json.loads(left_by_the_demo.out)["path"] == "artifacts/tiny.pw"


def test_bench_measures_both_sides_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    monkeypatch.setattr(
        "pw.cli.bench.Calibration",
        lambda: Calibration(str(made.text), nsamples=40, seqlen=16),
    )
    load = ("--batch-size", "2", "--input-len", "5", "--output-len", "4", "--repeats", "1")
    done = run("bench", str(made.checkpoint), *SMALL, *load, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["planner_entries"] == 17_280
    assert 0 < result["planner_seconds"] < 1
    assert result["calibrate_seconds"] > 0
    [row] = result["tokens_per_second"]
    assert (row["batch_size"], row["input_len"], row["output_len"]) == (2, 5, 4)
    assert row["pw"] > 0 < row["transformers"]


def test_env_is_a_bug_report_without_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW_API_KEY", "secret")
    done = run("env")
    assert done.code == 0
    assert __version__ in done.out
    assert "PW_API_KEY" in done.out
    assert "secret" not in done.out
    assert set(json.loads(run("env", "--json").out)) >= {"torch", "devices", "backends"}


def test_a_dry_run_prints_the_plan_and_writes_nothing(made: Made, tmp_path: Path) -> None:
    flags = ("--dataset", str(made.text), *TEXT_FLAGS, "--max-bits", "4", "--dry-run")
    done = run("quantize", str(made.checkpoint), "-o", str(tmp_path / "a.pw"), *flags)
    assert done.code == 0, done.err
    for piece in ("12 blocks", "at 4 bits", "left alone", "mlp.gate.weight", "memory: about"):
        assert piece in done.out
    assert not re.search(r"\d,?\d{3},?\d{3}", done.out)  # a figure that nobody reads
    assert list(tmp_path.iterdir()) == []
    done = run("quantize", str(made.checkpoint), "-o", str(tmp_path / "a.pw"), *flags, "--json")
    assert json.loads(done.out)["plan"]["down"]["count"] == 6


def test_a_recipe_of_a_model_that_is_not_here_is_planned_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    recipe, config = tmp_path / "big.toml", tmp_path / "configs" / "big.json"
    recipe.write_text(f'model = "nobody/big"\noutput = "{tmp_path}/big.pw"\n[tune]\ndistill = 9\n')
    lost = run("run", str(recipe), "--dry-run")
    assert (lost.code, lost.out) == (1, "")
    assert "error: model is not in the local cache: `nobody/big`" in lost.err
    settings = json.loads((ROOT / "pipelines/recipes/configs/qwen3-30b-a3b.json").read_text())
    small = {"num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 192}
    config.write_text(json.dumps(settings | small))  # fits are timed at the true width
    planned = run("run", str(recipe), "--dry-run")
    assert planned.code == 0, planned.err
    first, second, *rest = planned.out.splitlines()
    assert first == "checkpoint is not here: `nobody/big`: planned from its config alone,"
    assert second.startswith(f"`{config}`; ")
    assert "nobody/big (qwen3_moe)" in rest[0]
    named = [
        line.split()[0] for line in rest if line.startswith(("  quant", "  sens", "  t", "  di"))
    ]
    assert named == [
        "quantize", "sensitivity", "tune", "distillation", "sensitivity", "trace"
    ]  # fmt: skip
    told = run("run", str(recipe), "--dry-run", "--model", "nobody/other")
    assert (told.code, told.out) == (1, "")
    described = json.loads(run("quantize", str(config), "--dry-run", "--json").out)
    assert described["config_file"] == str(config)
    assert described["output"] == "big.pw"
    assert described["dense_bytes"] == 4 * 128 * 3 * 256 * 192 * 2
    assert not list(tmp_path.glob("*.pw*"))


def test_export_writes_a_checkpoint(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("export", str(made.artifact), "--bits", "3", "-o", str(out))
    assert done.code == 0, done.err
    assert f"{out}: Qwen2MoeForCausalLM with experts of 3 bits" in done.out
    assert {"config.json", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    done = run("export", str(made.artifact), "--bits", "3", "-o", str(out))
    assert (done.code, done.out) == (3, "")
    assert "output exists" in done.err


def test_a_recipe_runs_once_and_scores_its_policies(made: Made, tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        f'model = "elsewhere"\noutput = "{tmp_path / "small.pw"}"\n[quantize]\nmax_bits = 4\n'
        f'[calibration]\ndataset = "{made.text}"\nnsamples = 40\nseqlen = 16\n'
        f'[evaluation]\npolicies = ["static:2", "static:4"]\ntext = "{made.text}"\n'
        'seqlen = 32\nmax_chunks = 4\nmemory_budget = "64MiB"\n'
    )
    flags = ("run", str(recipe), "--model", str(made.checkpoint), "--json", "-q")
    planned = run(*flags[:4], "--dry-run")
    assert planned.code == 0, planned.err
    assert "12 blocks" in planned.out
    assert "at 4 bits" in planned.out
    assert list(tmp_path.iterdir()) == [recipe]
    first = run(*flags)
    assert first.code == 0, first.err
    rows = json.loads(first.out)["evaluation"]["rows"]
    assert [row["policy"] for row in rows] == ["static:2", "static:4"]
    results = tmp_path / "small.eval.json"
    written = results.stat().st_mtime_ns
    again = run(*flags)
    assert json.loads(again.out) == json.loads(first.out)
    assert results.stat().st_mtime_ns == written
    told = run(*flags[:4]).err
    for stage in ("quantize", "sensitivity", "trace", "fit-residuals", "evaluation"):
        assert f"{stage}: done already" in told
    for stage in ("quantize", "sensitivity", "trace", "fit-residuals", "evaluation    static:2"):
        assert f"\n  {stage}" in planned.out
    lost = run("run", str(recipe), "--dry-run")
    assert (lost.code, lost.out) == (1, "")
    assert "error: no such model: `elsewhere`\nhint: say where it is with --model" in lost.err
    assert f"a path counts from `{Path.cwd()}`" in lost.err
    kept = run("run", str(tmp_path / "small.pw" / "recipe.toml"), "-q")
    assert kept.code == 0, kept.err  # the artifact knows where its model was
    results.write_text("{")  # damaged: made again
    assert [row["policy"] for row in json.loads(run(*flags).out)["evaluation"]["rows"]]
    assert json.loads(results.read_text())["report"]
    whole = recipe.read_text()
    for old, new, error in (
        ('"static:4"', '"magic"', "unknown precision policy: `magic`"),
        (f'text = "{made.text}"', 'text = "gone.txt"', "cannot read text file: `gone.txt`"),
        ("seqlen = 32", "seqlen = 1", "a chunk needs at least 2 tokens: 1"),
    ):  # before the stages, not after them
        recipe.write_text(whole.replace(old, new))
        assert f"error: {error}" in run("run", str(recipe)).err
    missing = run("run", str(tmp_path / "none.toml"))
    assert (missing.code, missing.err.splitlines()[0][:27]) == (2, "error: cannot read recipe: ")

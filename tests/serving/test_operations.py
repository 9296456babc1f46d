"""Models, health, metrics, status, tokenizer routes, keys, request ids, log lines."""

from __future__ import annotations

import logging

import httpx
import openai
import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from pw.errors import ConfigError
from pw.serving.context import ServingConfig
from pw.serving.server import how_to_call
from tests.serving.conftest import wait_for
from tests.serving.fakes import FakeEngine

LABELS = 'engine="0",model_name="fake"'


def test_models(served):
    models = list(served.openai.models.list())
    assert [model.id for model in models] == ["fake", "alias"]
    assert all(isinstance(model, Model) and model.object == "model" for model in models)
    alias = served.openai.models.retrieve("alias")
    assert (alias.root, alias.max_model_len) == ("fake", 4096)
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("other")


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ready", "/ping"])
def test_health(served, path):
    answer = served.http.get(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_health_tells_why_not(start):
    with start() as served:

        def reasons():
            paths = ("/health", "/health/ready", "/ready", "/ping")
            answers = [served.http.get(path) for path in paths]
            assert {answer.status_code for answer in answers} <= {200, 503}
            assert served.http.get("/health/live").status_code == 200
            status = served.http.get("/v1/pw/status").json()
            found = {a.json()["reason"] if a.status_code == 503 else None for a in answers}
            assert found == {status["not_ready_reason"]}
            assert status["ready"] == (found == {None})
            return found

        assert reasons() == {None}
        served.context.gate.draining = True
        assert reasons() == {"draining"}
        served.context.gate.draining = False
        served.engine.alive = False
        assert reasons() == {"engine_unhealthy"}
        served.engine.failed = True
        assert reasons() == {"engine_failed"}
        lost = "rank 1 of 2 has ended: SIGKILL"
        for failure, detail in (
            (f"EngineLostError: {lost}", {"detail": lost}),
            ("OSError: /a/private/path", {}),  # nobody needs a key here
        ):
            served.engine.failure = failure
            answer = served.http.get("/health/ready")
            assert answer.json() == {"reason": "engine_failed"} | detail
        assert served.metrics()[f"pw:engine_up{{{LABELS}}}"] == 0


def test_a_stalled_engine_is_not_ready(start):
    with start() as served:
        served.context.watch.progress._stall_seconds = 0.2
        served.engine.running = 64
        wait_for(lambda: served.http.get("/health/ready").status_code == 503)
        assert served.http.get("/health/ready").json() == {"reason": "engine_stalled"}

        def steps():
            served.engine.step += 1
            return served.http.get("/health/ready").status_code

        wait_for(lambda: steps() == 200)  # at once, unless the machine stood still


def test_load_and_requests_say_what_goes_on(start):
    with start() as served:
        assert served.http.get("/load").json() == {"server_load": 0}
        assert served.http.get("/v1/pw/requests").json() == {"count": 0, "requests": []}
        stream = served.openai.completions.create(
            model="fake", prompt=f"secretword 1 {FakeEngine.HOLD}", n=2, stream=True
        )
        first = next(stream)
        answer = served.http.get("/v1/pw/requests")
        assert served.http.get("/load").json() == {"server_load": 2}
        stream.close()
    assert "secretword" not in answer.text
    (request,) = answer.json()["requests"]
    assert request["id"] == first.id
    assert (request["state"], request["sequences"], request["prompt_tokens"]) == ("running", 2, 6)
    assert 1 <= request["generated_tokens"] <= 6
    assert 0 < request["ttft_seconds"] <= request["age_seconds"]
    assert request["bits"] == 5.5


def test_timeline_route(start):
    with start() as served:
        for _ in range(2):
            served.context.watch.look()
        body = served.http.get("/v1/pw/timeline").json()
        assert body["interval_seconds"] == 1
        numbers = [sample["number"] for sample in body["samples"]]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 3
        assert body["samples"][0]["pages_kv"] == 10
        later = served.http.get("/v1/pw/timeline", params={"since": 2}).json()["samples"]
        assert [sample["number"] for sample in later][:1] == [2]
        assert served.http.get("/v1/pw/timeline?since=x").status_code == 400


def test_status(served):
    status = served.http.get("/v1/pw/status").json()
    assert status["policy"] == "static:4"
    assert status["layer_bits"] == {"0": 5.0, "1": 6.0}
    assert status["pages_weights"] + status["pages_kv"] + status["pages_free"] == 100
    assert status["bytes"]["total"] == 403_840
    assert (status["ready"], status["draining"], status["open_sequences"]) == (True, False, 0)
    assert status["seconds_since_last_step"] is None
    assert served.http.get("/version").json() == {"version": "0.1.0"}
    precision = served.http.get("/v1/pw/precision").json()
    assert precision["blocks_by_bits"] == {"5": 16, "6": 16}


def test_metrics_follow_engine_and_requests(start):
    with start() as served:
        served.openai.completions.create(model="fake", prompt=["1 2", "3"], max_tokens=4)
        list(served.openai.completions.create(model="alias", prompt="1", stream=True))
        served.http.get("/no/such/route/1")
        served.http.get("/no/such/route/2")
        answer = served.http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert all(name.startswith("pw:") for name in families)
        samples = served.metrics()
    assert answer.headers["content-type"].startswith("text/plain")
    expected = {
        f"pw:generation_tokens_total{{{LABELS}}}": 21,
        f'pw:request_success_total{{{LABELS},finished_reason="length"}}': 2,
        f'pw:request_success_total{{{LABELS},finished_reason="stop"}}': 1,
        f"pw:time_to_first_token_seconds_count{{{LABELS}}}": 3,
        f"pw:inter_token_latency_seconds_count{{{LABELS}}}": 18,
        f"pw:e2e_request_latency_seconds_count{{{LABELS}}}": 3,
        f"pw:request_prompt_tokens_sum{{{LABELS}}}": 4,
        f"pw:request_generation_tokens_sum{{{LABELS}}}": 21,
        f"pw:num_requests_running{{{LABELS}}}": 0,
        f"pw:kv_cache_usage_perc{{{LABELS}}}": 0.25,
        f"pw:kv_bytes_budget{{{LABELS}}}": 40 * 4096,
        f"pw:weight_bytes_resident{{{LABELS}}}": 240_000,
        f'pw:weight_bits_mean{{{LABELS},layer="1"}}': 6,
        f'pw:expert_bits_blocks{{{LABELS},bits="5"}}': 16,
        f'pw:page_move_bytes_total{{{LABELS},direction="offload"}}': 8192,
        f"pw:memory_bytes_over_budget{{{LABELS}}}": 0,
        f"pw:request_queue_time_seconds_count{{{LABELS}}}": 3,
        f"pw:request_prefill_time_seconds_count{{{LABELS}}}": 3,
        f'pw:requests_rejected_total{{{LABELS},reason="server_overloaded"}}': 0,
        f'pw:plan_total{{{LABELS},trigger="kv allocation"}}': 2,
        f"pw:plan_seconds_count{{{LABELS}}}": 5,
        f"pw:plan_seconds_sum{{{LABELS}}}": 0.25,
        f"pw:plan_damage_estimate{{{LABELS}}}": 0.125,
        f"pw:page_move_seconds_count{{{LABELS}}}": 4,
        f"pw:page_move_seconds_sum{{{LABELS}}}": 0.5,
        f"pw:prefix_cache_queries_total{{{LABELS}}}": 20,
        f"pw:prefix_cache_hits_total{{{LABELS}}}": 5,
        f"pw:nonfinite_logits_total{{{LABELS}}}": 1,
        f"pw:expert_never_routed{{{LABELS}}}": 2,
        f'pw:iteration_tokens_total_bucket{{{LABELS},le="1.0"}}': 2,
        f'pw:iteration_tokens_total_bucket{{{LABELS},le="8.0"}}': 3,
        f'pw:iteration_tokens_total_bucket{{{LABELS},le="+Inf"}}': 3,
        f"pw:iteration_tokens_total_sum{{{LABELS}}}": 9,
        f"pw:engine_up{{{LABELS}}}": 1,
        'pw:http_requests_total{handler="/v1/completions",method="POST",status="200"}': 2,
        'pw:http_requests_total{handler="unknown",method="GET",status="404"}': 2,
    }
    sorted_samples = {_sort_labels(name): value for name, value in samples.items()}
    for name, value in expected.items():
        assert sorted_samples[_sort_labels(name)] == value, name
    build = families["pw:build_info"].samples[0]
    assert build.labels["policy"] == "static:4"
    assert build.labels["artifact_hash"] == "0123456789abcdef"


def _sort_labels(name):
    head, _, labels = name.partition("{")
    return head, tuple(sorted(labels.rstrip("}").split(",")))


def test_two_apps_share_no_metrics(start):
    with start() as one, start() as other:
        one.openai.completions.create(model="fake", prompt="1", max_tokens=1)
        assert f"pw:e2e_request_latency_seconds_count{{{LABELS}}}" in one.metrics()
        assert one.metrics()[f"pw:e2e_request_latency_seconds_count{{{LABELS}}}"] == 1
        assert other.metrics()[f"pw:e2e_request_latency_seconds_count{{{LABELS}}}"] == 0


def test_tokenizer_routes(served):
    def post(path, **body):
        return served.http.post(path, json=body)

    assert post("/tokenize", prompt="The lazy 77").json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [0, 4, 77],
    }
    messages = [{"role": "user", "content": "lazy"}]
    assert post("/tokenize", messages=messages).json()["tokens"] == [4]
    assert post("/detokenize", tokens=[0, 1]).json() == {"prompt": "The 🦊 "}
    assert post("/detokenize", tokens=[-1]).status_code == 400
    assert post("/detokenize", tokens=[2**40]).status_code == 400
    assert post("/tokenize").status_code == 400
    assert post("/tokenize", prompt="1", messages=messages).status_code == 400


def test_request_id_is_echoed_or_made(served):
    def ask(value):
        return served.http.get("/version", headers={"x-request-id": value}).headers["x-request-id"]

    assert ask("abc-1.2:3") == "abc-1.2:3"
    for bad in ("a b", "x" * 129, "a%0aINFO", ""):
        assert len(made := ask(bad)) == 32
        assert made != ask(bad)


def test_one_line_per_request_without_the_prompt(served, caplog):
    caplog.set_level(logging.INFO, "pw.serving")
    answer = served.openai.completions.create(
        model="fake",
        prompt="secretword",
        max_tokens=2,
        extra_body={"never_heard_of": 1},
    )
    served.openai.completions.create(
        model="fake", prompt="1", max_tokens=1, extra_body={"never_heard_of": 1}
    )
    lines = [record.getMessage() for record in caplog.records if record.name == "pw.serving"]
    assert lines[0] == "ignoring unknown request field 'never_heard_of'"
    assert len(lines) == 3
    assert lines[1].startswith(
        f"{answer.id}: sequences 1, tokens in 1, out 2, finish length, queue"
    )
    assert lines[1].endswith("bits 5.50 to 5.50")
    assert "secretword" not in caplog.text


def test_keys_guard_every_route_but_health(start):
    config = ServingConfig(("fake",), api_keys=("first-key", "schlüssel"))
    with start(config=config, api_key="first-key") as served:
        assert served.openai.models.list().data[0].id == "fake"
        for path in ("/health", "/health/live", "/health/ready", "/ready", "/ping"):
            assert served.http.get(path).status_code == 200
        assert {"/v1/completions", "/metrics", "/tokenize"} <= served.paths
        guarded = served.paths - {"/health", "/health/live", "/health/ready", "/ready", "/ping"}
        for path in sorted(guarded | {"/nothing", "/health/", "/%2Fhealth", "/v1/../metrics"}):
            for headers in ({}, {"authorization": "Bearer first"}, {"authorization": "first-key"}):
                answer = served.http.get(path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        second = httpx.Headers({"authorization": "Bearer schlüssel".encode()})
        assert served.http.get("/version", headers=second).status_code == 200


@pytest.mark.parametrize("keyed", [False, True])
def test_banner_of_a_base_model_and_of_a_server_with_keys(keyed):
    text = how_to_call("http://h:1", "it's", chat=False, keyed=keyed)
    assert "http://h:1/v1/completions" in text
    assert "chat" not in text
    assert "it'\"'\"'s" in text  # quoted for the shell
    assert ("Bearer $PW_API_KEY" in text) == ('os.environ["PW_API_KEY"]' in text) == keyed
    snippet = text.split("\n\n")[2].replace("\n  ", "\n").strip()
    compile(snippet, "snippet", "exec")


@pytest.mark.parametrize("names", [(), ("",)])
def test_a_served_name_is_needed(names):
    with pytest.raises(ConfigError, match="name"):
        ServingConfig(names)

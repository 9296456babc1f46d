"""What holds at one server holds behind Serve's proxy and our ingress, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from serving.replicas.cluster import ADMIN_KEY, KEY, Cluster, bearer, cluster, command, descendants

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
LONG = {"max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("surface"), min_replicas=2, max_replicas=2) as made:
        yield made


@pytest.fixture
def client(running: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_both_endpoints_answer_and_stream(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": "The sky is", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 6
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert chat.usage.completion_tokens > 0


def test_tokens_come_one_by_one(running: Cluster, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="Once", stream=True, max_tokens=500, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert sum(each["running"] for each in running.replicas().values()) == 1
    assert sum(1 for _ in stream) > 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(running: Cluster, stream: bool) -> None:
    def aborted() -> float:
        return running.total("pw:request_aborted_total")

    before = aborted()
    with running.http as http:
        body = {"model": "tiny", "prompt": "Once", "stream": stream, **LONG}
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=1.0)
    running.wait(lambda: aborted() == before + 1, 20, "abort")
    running.wait(
        lambda: all(each["running"] == 0 for each in running.replicas().values()), 20, "idle"
    )


def test_headers(running: Cluster) -> None:
    body = {"model": "tiny", "prompt": "The", "max_tokens": 1}
    with running.http as http:
        answer = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers.get_list("x-request-id") == ["mine-1"]
        assert answer.headers["x-pw-precision-epoch"].isdigit()
        assert answer.headers["x-pw-replica"] in running.replicas()
        assert len(http.get("/v1/models").headers.get_list("x-request-id")) == 1
        many = [(f"x-{number}", "1") for number in range(120)]
        refused = http.get("/v1/models", headers=many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "too_many_headers")
        large = http.get("/v1/models", headers={"x-large": "a" * 100_000})
        assert (large.status_code, large.json()["error"]["code"]) == (431, "headers_too_large")


def test_bodies_have_a_bound(running: Cluster) -> None:
    large = b"a" * (9 << 20)
    with running.http as http:
        for content in (large, iter([large[: 5 << 20], large[5 << 20 :]])):  # declared, chunked
            answer = http.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"


def test_keys(running: Cluster) -> None:
    some = next(iter(running.replicas()))
    with httpx.Client(base_url=running.url, timeout=30) as http:
        for path in ("/v1/models", "/metrics", "/replicas", f"/replicas/{some}/v1/pw/status"):
            refused = http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            assert http.get(path, headers=bearer("wrong")).status_code == 401
            assert http.get(path, headers=bearer(KEY)).status_code == 200
        for path in ("/health", "/health/ready", "/health/live", f"/replicas/{some}/"):
            assert http.get(path).status_code == 200, path
        path, body = f"/replicas/{some}/v1/pw/policy", {"policy": "adaptive"}
        assert http.post(path, json=body, headers=bearer(KEY)).status_code == 403
        changed = http.post(path, json=body, headers=bearer(ADMIN_KEY))
        assert (changed.status_code, changed.json()["policy"]) == (200, "adaptive")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/completions", b"{", 400, "invalid_value"),
        ("POST", "/v1/completions", b"[]", 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"model":"other","prompt":"a"}', 404, "model_not_found"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("GET", "/nowhere", b"", 404, "not_found"),
        ("GET", "/v1/pw/status", b"", 404, "not_found"),
        ("GET", "/replicas/nobody/v1/models", b"", 404, "not_found"),
    ],
)
def test_refusals_keep_their_form(
    running: Cluster, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    with running.http as http:
        answer = http.request(
            method, path, content=content, headers={"content-type": "application/json"}
        )
    assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (status, code)


def test_what_replicas_say_is_found_by_their_ids(running: Cluster) -> None:
    names = set(running.replicas())
    assert len(names) == 2
    metrics = running.metrics()
    for name in names:
        assert any(f'pw:engine_up{{replica="{name}"' in key for key in metrics)
        with running.http as http:
            assert http.get(f"/replicas/{name}/v1/pw/status").json()["ready"]
            assert "text/html" in http.get(f"/replicas/{name}/").headers["content-type"]


def test_no_usage_is_reported_and_no_dashboard_is_shown(running: Cluster) -> None:
    commands = [command(pid) for pid in descendants(running.raylet)]
    folders = {part.partition("=")[2] for line in commands for part in line.split()
               if part.startswith("--session-dir=")}  # fmt: skip
    assert folders
    assert not [folder for folder in folders if (Path(folder) / "usage_stats.json").exists()]
    (head,) = [line for line in commands if "dashboard/dashboard.py" in line]
    assert "--disable-frontend" in head

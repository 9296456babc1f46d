"""`/v1/pw/precision`, `/v1/pw/policy` and who may use them."""

from __future__ import annotations

import pytest

from pw.serving.context import ServingConfig
from tests.serving.conftest import serving
from tests.serving.fakes import FakeEngine

POLICY = "/v1/pw/policy"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed():
    config = ServingConfig(("fake",), api_keys=("user", "user-2"), admin_keys=("root",))
    with serving(config=config, api_key="user") as running:
        yield running


def test_map_of_the_bits(served):
    answer = served.http.get("/v1/pw/precision").json()
    assert answer["policy"] == "static:4"
    assert answer["layer_bits"] == {"0": 5.0, "1": 6.0}
    assert answer["layers"][0]["gate_up"] == [4, 4]


def test_an_admin_changes_the_policy_and_the_fingerprint_follows(keyed):
    body = {"policy": "static:3"}
    answer = keyed.http.post(POLICY, json=body, headers=bearer("root"))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"policy": "static:3", "before": "static:4"}
    completion = keyed.openai.completions.create(model="fake", prompt="1", max_tokens=1)
    assert completion.system_fingerprint.endswith("-static-3")
    keyed.engine.policy = "static:4"


def test_a_policy_that_cannot_be_taken(keyed):
    answer = keyed.http.post(POLICY, json={"policy": "dense"}, headers=bearer("root"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "policy")
    for body in ({}, {"policy": ""}, {"policy": 4}, {"policy": "static:4", "x": 1}, []):
        assert keyed.http.post(POLICY, json=body, headers=bearer("root")).status_code == 400


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        (bearer("wrong"), 401, "invalid_api_key"),
        ({"authorization": "Basic root"}, 401, "invalid_api_key"),
        (bearer("user"), 403, "permission_denied"),
        (bearer("user-2"), 403, "permission_denied"),
    ],
)
@pytest.mark.parametrize("path", [POLICY, "/v1/pw/policy%0A"])
def test_others_may_not(keyed, path, headers, status, code):
    answer = keyed.http.post(path, json={"policy": "static:2"}, headers=headers)
    assert answer.status_code in (status, 404)
    assert (path != POLICY) or answer.json()["error"]["code"] == code
    assert keyed.engine.policy == "static:4"


def test_an_admin_key_is_a_key(keyed):
    assert keyed.http.get("/version", headers=bearer("root")).status_code == 200
    assert keyed.http.get("/version", headers=bearer("roo")).status_code == 401


def test_without_admin_keys_nobody_may(served):
    answer = served.http.post(POLICY, json={"policy": "static:2"})
    assert answer.status_code == 403
    assert "--admin-key" in answer.json()["error"]["message"]
    assert served.engine.policy == "static:4"


def test_open_server_with_an_admin_key(start):
    with start(config=ServingConfig(("fake",), admin_keys=("root",))) as served:
        assert served.http.get("/version").status_code == 200
        answer = served.http.post(POLICY, json={"policy": "static:2"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        answer = served.http.post(POLICY, json={"policy": "static:2"}, headers=bearer("root"))
        assert answer.status_code == 200


def test_the_plan_in_force_is_in_a_header(served):
    answer = served.http.post("/v1/completions", json={"prompt": "1", "max_tokens": 1})
    assert answer.headers["x-pw-precision-epoch"] == "3"
    body = {"prompt": "1", "max_tokens": 1, "stream": True}
    assert served.http.post("/v1/completions", json=body).headers["x-pw-precision-epoch"] == "3"


def test_a_floor_reaches_the_engine(served):
    served.engine.calls.clear()
    served.openai.completions.create(
        model="fake", prompt="1", max_tokens=1, extra_body={"precision": {"min_bits": 4}}
    )
    ((_, params),) = served.engine.calls.values()
    assert params.min_bits == 4


def test_a_floor_that_the_engine_refuses_is_named_as_clients_spell_it(served):
    body = {"prompt": "1", "precision": {"min_bits": 9}}
    error = served.http.post("/v1/completions", json=body).json()["error"]
    assert (error["param"], "at most 8" in error["message"]) == ("precision.min_bits", True)


def test_a_floor_that_is_lost_while_the_answer_runs(served):
    answer = served.http.post("/v1/completions", json={"prompt": [FakeEngine.UNABLE]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "precision_unavailable")
    assert answer.headers["retry-after"] == "1"


def test_bits_in_usage(served):
    answer = served.http.post("/v1/completions", json={"prompt": "1", "max_tokens": 1}).json()
    assert answer["usage"]["pw"] == {"mean_bits": 5.5, "min_bits": 5}
    chunks = served.openai.completions.create(
        model="fake", prompt="1", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert list(chunks)[-1].usage.model_extra["pw"] == {"mean_bits": 5.5, "min_bits": 4}

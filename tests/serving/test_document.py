"""`/openapi.json` says what is served, errors included."""

from __future__ import annotations

from typing import Any


def test_every_operation_names_its_errors_and_no_foreign_ones(served: Any) -> None:
    document = served.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(document["paths"])
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) > 15
    for operation in operations:
        assert "422" not in operation["responses"]
        assert "5XX" in operation["responses"]
        content = operation["responses"]["4XX"]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/Error"}
    schemas = document["components"]["schemas"]
    assert not [name for name in schemas if "ValidationError" in name]
    answer = served.http.post("/v1/completions", json={"prompt": 5}).json()
    promised = schemas["Error"]["properties"]["error"]
    assert set(answer["error"]) == set(promised["required"])
    assert answer["error"]["type"] in promised["properties"]["type"]["enum"]

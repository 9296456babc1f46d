"""What the ingress answers by itself: health, the list of replicas, everybody's metrics.

What one replica says about itself is under `/replicas/<id>/`: its live page, `/metrics`,
`/v1/pw/status` and the rest.
"""

from __future__ import annotations

import re
from dataclasses import replace

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from pw.errors import RequestError
from pw.serving.middleware import OPEN_PATHS
from pw.serving.replicas.calls import Call
from pw.serving.replicas.protocol import Replicas
from pw.serving.wire import JsonResponse

_OF_ONE = re.compile(r"/|/dashboard/.*|/v1/pw/.*|/load")  # makes no sense for several
_STATUS = ("ready", "not_ready_reason", "policy", "mean_bits", "running", "waiting")
_STATUS_PATH = "/v1/pw/status"


class Overview:
    """Answers about the replicas as a whole.

    Args:
        replicas: Who is asked.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def answer(self, call: Call) -> Response | None:
        """The ingress's own answer; None where a replica shall answer.

        Raises:
            RequestError: 404, with the path to ask instead.
        """
        if call.path == "/health/live":
            return Response()
        if call.path in OPEN_PATHS:
            if await self._replicas.serving():
                return Response()
            return JsonResponse({"reason": "no_replica"}, status_code=503)
        if call.path == "/metrics":
            return await self._metrics(call)
        if call.path == "/replicas":
            return await self._list(call)
        if _OF_ONE.fullmatch(call.path):
            raise RequestError(
                f"not found: {call.method} {call.path}",
                code="not_found",
                status=404,
                hint=f"ask one replica: /replicas/<id>{call.path}, /replicas lists them",
            )
        return None

    async def _list(self, call: Call) -> Response:
        answers = await self._replicas.ask_all(replace(call, path=_STATUS_PATH))
        listed = []
        for name, answer in sorted(answers.items()):
            if answer.status == 200:
                status = orjson.loads(answer.body)
                listed.append({"id": name, **{field: status[field] for field in _STATUS}})
        return JsonResponse({"replicas": listed})

    async def _metrics(self, call: Call) -> Response:
        answers = await self._replicas.ask_all(call)
        texts = {
            name: answer.body.decode()
            for name, answer in sorted(answers.items())
            if answer.status == 200
        }
        return Response(merged(texts), media_type=CONTENT_TYPE_LATEST)


def merged(texts: dict[str, str]) -> str:
    """Metrics of several replicas as one text, every sample with its `replica`.

    Args:
        texts: Prometheus' text format, by replica.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> (comments, samples)
    for replica, text in texts.items():
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                family[1].append(_labelled(line, replica))
    return "".join(
        f"{line}\n" for comments, samples in families.values() for line in comments + samples
    )


def _labelled(sample: str, replica: str) -> str:
    """A sample with one more label, its first."""
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'

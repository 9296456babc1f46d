"""The files of deploy/: timeouts that fit each other, nobody is root, nginx in front of servers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from pw.cli.server_options import Server
from pw.serving.context import ServingConfig
from pw.serving.middleware import OPEN_PATHS
from support.patience import PATIENCE, get, post
from tests.serving.conftest import Served, abandoned, serving, wait_for
from tests.serving.fakes import STORY, FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
CLOSE_SECONDS = 5  # from the last answer to the end of the process, generously


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh]?)", text).groups()
    return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


# -- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    deployment = documents("kubernetes.yaml")[0]
    assert deployment["kind"] == "Deployment"
    return deployment["spec"]["template"]["spec"]


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(a.removeprefix("--").split("=") for a in container["args"] if a.startswith("--"))


def test_a_pod_may_drain(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    sleep = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = seconds(flags(container)["shutdown-timeout"])
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + CLOSE_SECONDS
    ready = container["readinessProbe"]
    assert sleep >= ready["periodSeconds"] * ready["failureThreshold"]


def test_probes_ask_what_they_mean(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert paths == {
        "startup": "/health/ready",
        "readiness": "/health/ready",
        "liveness": "/health/live",
    }
    assert set(paths.values()) <= OPEN_PATHS  # probes have no key
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600
    ports = {port["name"] for port in container["ports"]}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in paths} <= ports
    assert flags(container)["port"] == str(container["ports"][0]["containerPort"])


def test_flags_in_manifests_exist(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    known = known_flags()
    assert set(flags(container)) <= known
    command = documents("compose.yaml")[0]["services"]["pagedweight"]["command"]
    assert set(re.findall(r"--([a-z-]+)", command)) <= known
    environment = (DEPLOY / "pagedweight.env").read_text()
    assert {
        name.lower().replace("_", "-") for name in re.findall(r"^PW_(\w+)=", environment, re.M)
    } <= known
    docker = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"--((?:memory|host|log|shut)[a-z-]*)", docker)) <= known


def known_flags() -> set[str]:
    from typer.main import get_command

    from pw.cli import app

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name.lstrip("-") for option in serve.params for name in option.opts}


def test_nobody_is_root_and_nothing_can_be_written(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/dev/shm", "/tmp", "/var/cache/pagedweight"} <= mounts
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    deployment, service, budget = documents("kubernetes.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    user = re.search(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert user is not None
    assert int(user[1]) == pod["securityContext"]["runAsUser"] > 0


# -- Docker, systemd ------------------------------------------------------------------------------


def test_the_image_copies_what_the_context_has() -> None:
    docker = (DEPLOY / "Dockerfile").read_text()
    assert docker.count("\nFROM ") == 2
    kept = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", docker, re.M)
        for name in line.split()[:-1]
    ]
    assert sorted(copied) == sorted(kept)
    assert all((DEPLOY.parent / name).exists() for name in kept)


def test_composed_services_may_drain() -> None:
    service = documents("compose.yaml")[0]["services"]["pagedweight"]
    (timeout,) = re.findall(r"--shutdown-timeout (\d+)", service["command"])
    assert seconds(service["stop_grace_period"]) >= float(timeout) + CLOSE_SECONDS


def unit() -> dict[str, str]:
    text = (DEPLOY / "pagedweight.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


def test_the_unit_may_drain() -> None:
    (timeout,) = re.findall(
        r"^PW_SHUTDOWN_TIMEOUT=(\d+)", (DEPLOY / "pagedweight.env").read_text(), re.M
    )
    assert float(unit()["TimeoutStopSec"]) >= float(timeout) + CLOSE_SECONDS
    assert float(timeout) >= Server.shutdown_timeout
    assert unit()["KillMode"] == "mixed"
    assert unit()["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "pagedweight.service").read_text()
    copy = tmp_path / "pagedweight.service"
    copy.write_text(text.replace("/opt/pagedweight/bin/pw", shutil.which("true") or "true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- nginx ----------------------------------------------------------------------------------------

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def nginx(folder: Path, servers: list[str]) -> Iterator[str]:
    """nginx with our file, its ports replaced; its address."""
    port = free_port()
    ours = (DEPLOY / "nginx.conf").read_text().replace("listen 8080;", f"listen 127.0.0.1:{port};")
    for written, url in zip(("127.0.0.1:8001", "127.0.0.1:8002"), servers, strict=True):
        assert written in ours
        ours = ours.replace(written, url.removeprefix("http://"))
    (folder / "pagedweight.conf").write_text(ours)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;"
        f"events {{}} http {{ access_log off; {places} include {folder}/pagedweight.conf; }}"
    )
    if os.getuid() == 0:
        os.chmod(folder, 0o755)
    process = subprocess.Popen(["nginx", "-e", "stderr", "-c", folder / "nginx.conf"])
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                get(url)
                break
            except httpx.TransportError:
                assert process.poll() is None
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE)


Balanced = tuple[str, Served, Served]


@pytest.fixture
def balanced(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    @contextmanager
    def start(step_seconds: float = 0.0) -> Iterator[Balanced]:
        config = ServingConfig(("fake",))
        with (
            serving(FakeEngine(step_seconds), config=config) as one,
            serving(FakeEngine(step_seconds), config=config) as other,
            nginx(tmp_path, [one.url, other.url]) as url,
        ):
            yield url, one, other

    return start


def ask(url: str) -> httpx.Response:
    body = {"prompt": "1", "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


@needs_nginx
def test_requests_go_where_fewest_are_open(balanced: Callable[..., Any]) -> None:
    body = {"prompt": [FakeEngine.HOLD], "stream": True}
    with balanced() as (url, one, other), ExitStack() as streams:
        client = streams.enter_context(httpx.Client(timeout=PATIENCE))
        for _ in range(6):  # each is open when the next one comes
            stream = client.stream("POST", f"{url}/v1/completions", json=body)
            assert streams.enter_context(stream).is_success
        assert (len(one.engine.calls), len(other.engine.calls)) == (3, 3)


@needs_nginx
def test_tokens_come_through_as_they_are_made(balanced: Callable[..., Any]) -> None:
    """One by one, not all at the end: each is made when the one before it has arrived."""
    with balanced() as (url, one, other):
        one.engine.allowed = other.engine.allowed = 1
        client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        texts: list[str] = []
        for chunk in client.completions.create(model="fake", prompt="1", stream=True):
            texts.append(chunk.choices[0].text)
            one.engine.allowed = other.engine.allowed = len(texts) + 1
        client.close()
    assert texts == [word + " " for word in STORY]


@needs_nginx
def test_a_client_that_leaves_frees_its_place(balanced: Callable[..., Any]) -> None:
    with balanced() as (url, one, other):
        body = {"prompt": [FakeEngine.MUTE], "max_tokens": 4}
        with abandoned(url, "/v1/completions", body):
            wait_for(lambda: one.engine.running + other.engine.running)
        gates = one.context.gate, other.context.gate
        wait_for(lambda: not any(gate.open_sequences for gate in gates))
        assert len(one.engine.aborted) + len(other.engine.aborted) == 1


@needs_nginx
def test_another_server_takes_what_one_refuses(balanced: Callable[..., Any]) -> None:
    with balanced() as (url, one, other):
        one.context.gate.draining = True
        assert [ask(url).status_code for _ in range(6)] == [200] * 6
        assert (len(one.engine.calls), len(other.engine.calls)) == (0, 6)
        assert get(f"{url}/health").status_code == 200
        other.context.gate.draining = True
        refused = ask(url)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert get(f"{url}/health").status_code == 503
        one.context.gate.draining = False
        assert ask(url).status_code == 200  # at once: nobody was left out for refusing


@needs_nginx
def test_what_concerns_operators_stays_inside(balanced: Callable[..., Any]) -> None:
    with balanced() as (url, one, _):
        for path in ("/", "/metrics", "/v1/pw/status", "/v1/pw/requests", "/docs", "/load"):
            assert get(url + path).status_code == 404, path
            assert get(one.url + path).status_code == 200, path
        assert get(f"{url}/v1/models").json()["data"][0]["id"] == "fake"
        tokens = post(f"{url}/tokenize", json={"prompt": "1 2"}).json()
        assert tokens["count"] == 2

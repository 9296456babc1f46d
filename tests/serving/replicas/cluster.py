"""`serve run` with a configuration file as users write it, and the processes below it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from pw.cli.locate import artifact_path

ROOT = Path(__file__).parents[3]
START_SECONDS = 180.0
TOKEN = secrets.token_hex(32)  # of the cluster; there is no need of a file in anybody's home
KEY, ADMIN_KEY = "key-of-a-user", "key-of-the-admin"
SMALL = {"device": "cpu", "memory_budget": "64MiB", "max_num_seqs": 4, "num_cpus": 0.25}


@dataclass
class Cluster:
    """A running application."""

    url: str
    driver: subprocess.Popen[bytes]
    log: Path
    raylet: int  # the process above all of Ray's

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=bearer(KEY))

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Replicas that answer, by their ids."""
        with self.http as http:
            answer = http.get("/replicas")
        listed = answer.json()["replicas"] if answer.status_code == 200 else []
        return {each["id"]: each for each in listed}

    def metrics(self) -> dict[str, float]:
        with self.http as http:
            lines = http.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def total(self, name: str) -> float:
        """The sum of a metric over all replicas and labels."""
        return sum(value for key, value in self.metrics().items() if key.startswith(name + "{"))

    def workers(self) -> list[int]:
        """Processes of replicas, each the parent of an engine's."""
        return [parent for parent in descendants(self.raylet)
                if set(children(parent)) & set(self.engines())]  # fmt: skip

    def engines(self) -> list[int]:
        """Processes of engines."""
        return [p for p in descendants(self.raylet) if "engine.process.worker" in command(p)]

    def wait(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait for something; how long it took in seconds."""
        begin = time.monotonic()
        while not true():
            assert self.driver.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() - begin < seconds, f"{what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.25)
        return time.monotonic() - begin


@contextmanager
def cluster(folder: Path, router: str | None = None, **args: Any) -> Iterator[Cluster]:
    """An application with these arguments; gone afterwards, with all its processes.

    Args:
        folder: For its configuration and its log.
        router: Another request router than ours.
        args: Of the application.
    """
    port = free_port()
    (folder / "keys").write_text(f"{KEY}\n")
    (folder / "admins").write_text(f"{ADMIN_KEY}\n")
    config = yaml.safe_load((ROOT / "deploy" / "ray-serve.yaml").read_text())
    config["http_options"]["port"] = port
    keys = {"api_key_file": str(folder / "keys"), "admin_key_file": str(folder / "admins")}
    config["applications"][0]["args"] = {
        "model": str(artifact_path("tiny", quiet=True).resolve()), **SMALL, **keys, **args
    }  # fmt: skip
    if router is not None:
        other = {"request_router_class": router}
        config["applications"][0]["deployments"] = [
            {"name": "Replica", "request_router_config": other}
        ]
    file, log = folder / "serve.yaml", folder / "log"
    file.write_text(yaml.safe_dump(config))
    with node() as (address, raylet), log.open("wb") as out:
        driver = subprocess.Popen(
            [program("serve"), "run", "--address", address, str(file)],
            cwd=ROOT, env=environment(), stdout=out, stderr=out,
        )  # fmt: skip
        running = Cluster(f"http://127.0.0.1:{port}", driver, log, raylet)
        try:
            wanted = args.get("min_replicas", 1)
            running.wait(lambda: answers(running, wanted), START_SECONDS, "start")
            yield running
        finally:
            driver.send_signal(signal.SIGINT)
            try:
                driver.wait(60)
            except subprocess.TimeoutExpired:
                driver.kill()


@contextmanager
def node() -> Iterator[tuple[str, int]]:
    """A cluster of one machine: its address, and the process above all of its processes."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="pw-ray-"))  # its sockets allow no long path
    process = start_ray(port, folder)
    try:
        yield f"127.0.0.1:{port}", process.pid
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def start_ray(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """`ray start`, again where it gives up: it allows itself half a minute, whatever else runs."""
    flags = ["--head", "--block", "--include-dashboard=false", "--num-cpus=8",
             f"--port={port}", f"--temp-dir={folder}",
             f"--object-store-memory={200 << 20}"]  # fmt: skip
    log = folder / "start.log"
    for _ in range(4):
        with log.open("wb") as out:
            process = subprocess.Popen(
                [program("ray"), "start", *flags], env=environment(), stdout=out, stderr=out
            )
        while process.poll() is None:
            if "Ray runtime started" in log.read_text():
                return process
            time.sleep(0.25)
    raise AssertionError(log.read_text()[-3000:])


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what is left below it; each of them was started here."""
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """What `deploy/ray.env` sets, and where our code is."""
    lines = (ROOT / "deploy" / "ray.env").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_TOKEN": TOKEN}
    return os.environ | dict(pairs) | ours


def answers(running: Cluster, wanted: int) -> bool:
    try:
        return len(running.replicas()) >= wanted
    except httpx.HTTPError:
        return False


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        found += children(each)
    return found[1:]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""

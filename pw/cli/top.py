"""`pw top`: what a server does, in the terminal. Knows its HTTP routes, nothing of the engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pw.cli.address import server_url
from pw.cli.command import print_json
from pw.cli.options import Common
from pw.config import format_bytes
from pw.errors import PwError

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_TIMEOUT_SECONDS = 5.0
_SAMPLES = 60  # seconds of the small curves
_WIDE = 130  # characters in which all figures fit beside each other
_BLOCKS = " ▁▂▃▄▅▆▇█"
_CLASSES = {  # class of bytes -> (what it is called, its colour)
    "dense": ("dense weights", "grey62"),
    "experts_dense": ("unquantized experts", "grey62"),
    "planes": ("bit-planes", "dodger_blue2"),
    "luts": ("lookup tables", "dark_cyan"),
    "kv": ("KV cache", "dark_orange"),
    "free": ("free", "grey30"),
    "tables": ("tables", "grey46"),
    "workspace": ("workspace", "grey46"),
}
_BIT_COLOURS = ("grey30", "grey37", "grey50", "sky_blue3", "deep_sky_blue3", "dodger_blue1",
                "dodger_blue2", "blue3", "blue1")  # fmt: skip


@dataclass
class View:
    """What a server has said last."""

    url: str
    status: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""  # why the last look failed

    def look(self, client: httpx.Client) -> None:
        """Ask the server once. What it said before stays when it does not answer.

        Raises:
            PwError: The key is missing or wrong: asking again would not help.
        """
        import httpx

        try:
            self.status = _get(client, "/v1/pw/status")
            since = self.samples[-1]["number"] + 1 if self.samples else 0
            new = _get(client, f"/v1/pw/timeline?since={since}")["samples"]
            self.samples = [*self.samples, *new][-_SAMPLES:]
            self.requests = _get(client, "/v1/pw/requests")
            self.trouble = ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.trouble = f"{self.url} does not answer: {str(error) or type(error).__name__}"


def top(
    common: Common,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the server, if it needs one.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, leave.")] = False,
) -> None:
    """Watch a server: memory, bits of each layer, requests, tokens per second. Ctrl-C leaves."""
    import httpx
    from rich.console import Console
    from rich.live import Live

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    view = View(server_url(url))
    with httpx.Client(base_url=view.url, headers=headers, timeout=_TIMEOUT_SECONDS) as client:
        view.look(client)
        if not view.status:
            raise PwError(view.trouble, "name the server with `--url`, as `pw serve` prints it")
        if common.json:
            print_json(view.status)
            return
        console = Console()
        if once or not sys.stdout.isatty():
            console.print(render(view, console.width))
            return
        with Live(render(view, console.width), console=console, screen=True) as live:
            while True:
                time.sleep(interval)
                view.look(client)
                live.update(render(view, console.width))


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    answer = client.get(path)
    if answer.status_code in (401, 403):
        raise PwError(
            "the server does not know this key" if "authorization" in client.headers
            else "the server needs an API key",
            "give it with `--api-key` or in the environment variable PW_API_KEY",
        )  # fmt: skip
    body: dict[str, Any] = answer.raise_for_status().json()
    return body


# -- drawing -------------------------------------------------------------------------------------


def render(view: View, width: int) -> RenderableType:
    """The whole picture, `width` characters wide."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(view), Text(), *_figures(view, width), Text()]
    ranks = view.status.get("ranks", [])
    parts += [*_memory(view.status["bytes"], len(ranks), width), *_ranks(ranks), Text()]
    if view.status["layer_bits"]:
        parts += [_layers(view.status["layer_bits"], width), Text()]
    parts.append(_requests(view.requests.get("requests", [])))
    return Group(*parts)


def _head(view: View) -> Text:
    from rich.text import Text

    status = view.status
    state, style = ("ready", "green") if status["ready"] else (status["not_ready_reason"], "red")
    if view.trouble:
        state, style = f"{view.trouble} (what follows is older)", "bold red"
    now = datetime.now().strftime("%H:%M:%S")
    return Text.assemble(
        ("PagedWeight ", "dim"), (status["model"], "bold"), f"  {status['policy']}  ",
        (state, style), (f"  {now}", "dim"),
    )  # fmt: skip


def _figures(view: View, width: int) -> Iterator[Table]:
    """Six numbers, three of them with the curve of the last minute; in two blocks where narrow."""
    from rich.table import Table

    status, samples = view.status, view.samples
    room = status["pages_kv"] + status["pages_free"]
    generated = [sample["generation_tokens_per_second"] for sample in samples]
    prompts = [sample["prompt_tokens_per_second"] for sample in samples]
    bits = [sample["mean_bits"] for sample in samples]
    left = [
        ("mean bits", f"{status['mean_bits']:.2f}", curve(bits, 8)),
        ("generating", f"{_last(generated):,.0f} tokens/s", curve(generated)),
        ("reading prompts", f"{_last(prompts):,.0f} tokens/s", curve(prompts)),
    ]
    right = [
        ("running", f"{status['running']:,}", f"{status['waiting']:,} waiting"),
        (
            "KV cache",
            f"{status['pages_kv'] / room if room else 0:.0%}",
            f"of {format_bytes(room * status['page_bytes'])} room",
        ),
        (
            "finished",
            f"{status['finished']:,}",
            f"{status['failed']:,} failed, {status['preemptions']:,} preempted, "
            f"{status['bytes_over_budget']:,} bytes over budget",
        ),
    ]
    beside = [[(*one, *other) for one, other in zip(left, right, strict=True)]]
    for block in beside if width >= _WIDE else (left, right):
        table = Table.grid(padding=(0, 3, 0, 0))
        for row in block:
            table.add_row(*row)
        yield table


def _memory(held: dict[str, int], ranks: int, width: int) -> Iterator[Text]:
    """A bar of the budget by class, and what its colours mean; alike on all ranks."""
    from rich.text import Text

    classes = [(name, *look, held[name]) for name, look in _CLASSES.items() if held[name]]
    bar, legend, drawn, seen = Text(), Text(), 0, 0
    for name, words, colour, size in classes:
        seen += size
        upto = round(width * seen / held["budget"])
        bar.append(("·" if name == "free" else "█") * (upto - drawn), colour)
        drawn = upto
        legend.append("■", colour)
        legend.append(f" {words} {format_bytes(size)}".replace(" ", "\N{NO-BREAK SPACE}") + "   ")
    each = f" on each of {ranks} ranks" if ranks else ""
    yield Text(f"memory, {format_bytes(held['budget'])}{each}")
    yield bar
    yield legend


def _ranks(ranks: list[dict[str, int]]) -> Iterator[Text]:
    """What ranks hold that differs between them, where several share the model."""
    from rich.text import Text

    for rank, held in enumerate(ranks):
        dense, host = format_bytes(held["dense"]), format_bytes(held["host"])
        yield Text(f"rank {rank}: dense weights {dense}, planes on the host {host}", "dim")


def _layers(layer_bits: dict[str, float], width: int) -> Text:
    """Mean bits of every layer, as many beside each other as fit."""
    from rich.text import Text

    text = Text("mean bits by layer\n")
    per_line = max(1, width // 11)
    for place, (layer, bits) in enumerate(layer_bits.items()):
        if place and place % per_line == 0:
            text.append("\n")
        text.append(f"{layer:>3} ", "dim")
        text.append(_BLOCKS[min(8, max(1, round(bits)))], _BIT_COLOURS[min(8, round(bits))])
        text.append(f" {bits:4.2f} ")
    return text


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not requests:
        return Text("no requests now", "dim")
    table = Table("request", box=None)
    for name in ("state", "prompt", "made", "first token", "age", "bits"):
        table.add_column(name, no_wrap=True)
    for request in requests[:12]:
        first = request["ttft_seconds"]
        table.add_row(
            Text(request["id"], no_wrap=True, overflow="ellipsis"),
            request["state"], f"{request['prompt_tokens']:,}",
            f"{request['generated_tokens']:,}", "-" if first is None else f"{first:.2f} s",
            f"{request['age_seconds']:.1f} s", f"{request['bits']:.2f}",
        )  # fmt: skip
    return table


def curve(values: list[float], top: float | None = None) -> str:
    """The latest values as blocks, the largest (or `top`) the highest."""
    highest = max(values, default=0) if top is None else top
    heights = [round(8 * min(1.0, value / highest)) if highest > 0 else 0 for value in values]
    return "".join(_BLOCKS[height] for height in heights[-30:])


def _last(values: list[float]) -> float:
    return values[-1] if values else 0.0

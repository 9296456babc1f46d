"""A conversation's next turn goes where its first ones are cached, and load is still shared."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import openai
import pytest

from serving.replicas.cluster import KEY, Cluster, cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]
TALKS, TURNS = 8, 4
SENTENCE = "The {} fox of talk {} runs over hill {} and looks for {} berries. "


def text(talk: int, turn: int) -> str:
    """A prompt of about 300 bytes, and 200 more for each turn after the first."""
    return "".join(
        SENTENCE.format(("red", "old", "shy", "wet")[line % 4], talk, line, line * 7)
        for line in range(5 + 3 * turn)
    )


async def talk_all(running: Cluster, pause: float) -> tuple[dict[int, list[str]], int, int]:
    """Replicas of each talk's turns, prompt tokens after first turns, and those from the cache."""
    places: dict[int, list[str]] = defaultdict(list)
    asked = cached = 0
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY) as client:

        async def turn(talk: int, number: int) -> None:
            nonlocal asked, cached
            raw = await client.completions.with_raw_response.create(
                model="tiny", prompt=text(talk, number), max_tokens=4
            )
            places[talk].append(raw.headers["x-pw-replica"])
            usage = raw.parse().usage
            if number:
                asked += usage.prompt_tokens
                cached += usage.prompt_tokens_details.cached_tokens

        for number in range(TURNS):
            await asyncio.sleep(pause)
            await asyncio.gather(*(turn(talk, number) for talk in range(TALKS)))
    return places, asked, cached


SERVES_OWN = "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter"


@pytest.mark.parametrize(("router", "fronts"), [(None, 1), (None, 2), (SERVES_OWN, 1)])
def test_turns_of_a_talk_meet_their_cache(tmp_path: Path, router: str | None, fronts: int) -> None:
    """Two fronts hear of each other's requests from the replicas, within seconds."""
    args = {"min_replicas": 2, "max_replicas": 2, "precision_policy": "static:4"}
    with cluster(tmp_path, router, ingress_replicas=fronts, **args) as running:
        places, asked, cached = asyncio.run(talk_all(running, pause=0 if fronts == 1 else 8))
    stayed = sum(len(set(replicas)) == 1 for replicas in places.values())
    print(f"\n{router or 'ours'}, {fronts} fronts: {stayed} of {TALKS} talks stayed, "
          f"{cached} of {asked} prompt tokens cached ({cached / asked:.0%})")  # fmt: skip
    assert len({replica for replicas in places.values() for replica in replicas}) == 2
    if router is None:
        assert stayed == TALKS if fronts == 1 else stayed > TALKS // 2
        assert cached > 0.5 * asked

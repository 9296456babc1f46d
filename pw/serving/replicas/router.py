"""Ray Serve's choice of a replica for a request, by `choice.ranked`."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pw.serving.replicas.choice import Routing, ranked
from pw.serving.replicas.prefixes import Directory


class PrefixRouter(RequestRouter):
    """Prefers the replica that holds a prompt's beginning, as far as load allows.

    It learns who holds what from the requests that it has routed, and from `record_routing_stats`
    of the replicas, which tells it about the requests of other routers.
    """

    def initialize_state(self, max_imbalance: int = 8, **_: Any) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            max_imbalance: See `ranked`.
        """
        self._max_imbalance = max_imbalance
        self._directory = Directory()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over who is there and what they say of themselves."""
        super().update_replicas(replicas)
        self._directory.keep(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            name = replica.replica_id.unique_id
            told = replica.routing_stats.get("keys", ())
            news = [key for key in told if not self._directory.has(key, name)]
            self._directory.record(news, name)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        routing: Routing = pending_request.kwargs.get("routing", Routing())
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_name.items()
        }
        names = ranked(queues, routing, self._directory, self._max_imbalance)
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note who has the prompt now."""
        routing: Routing = pending_request.kwargs.get("routing", Routing())
        self._directory.record(routing.keys, replica_id.unique_id)

"""The application: `serve run pw.serving.replicas.app:build model=model.pw max_replicas=4`.

Annotations are evaluated here: Serve makes the arguments of what stands at `args` of `build`.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from pw import logs
from pw.serving.replicas.handle import ServeReplicas
from pw.serving.replicas.ingress import create_ingress
from pw.serving.replicas.replica import Replica
from pw.serving.replicas.router import PrefixRouter
from pw.serving.replicas.settings import ReplicaArgs

CLOSE_SECONDS = 10.0  # for a replica to end after its last request
INGRESS_REQUESTS = 4096  # open at a time in one ingress
ROUTING_STATS_SECONDS = 2.0
_LOGGING = LoggingConfig(enable_access_log=False)  # each generation has its own line


@serve.ingress()
class Front:
    """The deployment that HTTP reaches.

    Args:
        args: Of the application.
        replicas: The other deployment.
    """

    def __init__(self, args: ReplicaArgs, replicas: DeploymentHandle[Any]) -> None:
        logs.configure(logging.INFO, args.log_format)
        self._args, self._replicas = args, replicas

    def __serve_build_asgi_app__(self) -> ASGIApp:
        replicas = ServeReplicas(self._replicas, self._args.accept_timeout)
        return create_ingress(replicas, self._args.ingress_settings())


def build(args: ReplicaArgs) -> Application:
    """An application builder of Ray Serve.

    Args:
        args: Its `name=value` arguments, or `args` of a config file.
    """
    args = args.absolute()
    replica = serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.target,
            upscale_delay_s=args.upscale_delay,
            downscale_delay_s=args.downscale_delay,
            look_back_period_s=args.look_back_period,
        ),
        max_ongoing_requests=args.ongoing,
        max_queued_requests=args.max_num_queued_reqs,
        backpressure_config=BackpressureConfig(retry_after_s=1),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"max_imbalance": args.max_imbalance},
            request_routing_stats_period_s=ROUTING_STATS_SECONDS,
        ),
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.gpus},
        health_check_period_s=args.health_check_period,
        graceful_shutdown_timeout_s=args.shutdown_timeout + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_LOGGING,
    )
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.shutdown_timeout + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_LOGGING,
    )
    return front.bind(args, replica.bind(args))

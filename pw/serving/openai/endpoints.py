"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer or a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from pw.engine.request import RequestOutput, SamplingParams
from pw.serving.connection import EventStream, while_connected
from pw.serving.context import ServingContext
from pw.serving.limits import timed_out
from pw.serving.openai.answers import ChatWriter, Choice, CompletionWriter, Head, Json, Writer
from pw.serving.openai.chat_schemas import ChatRequest
from pw.serving.openai.generation import Generation, SequenceSpec, check_context, choices_of
from pw.serving.openai.logprobs import TokenTexts
from pw.serving.openai.prompts import EncodedPrompt, count_prompts
from pw.serving.openai.schemas import CompletionRequest, GenerationRequest
from pw.serving.openai.usage import Usage
from pw.serving.wire import JsonResponse, JsonRoute

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


@dataclass(frozen=True)
class _Job:
    """What differs between the two endpoints."""

    id_prefix: str
    prompts: int
    params: SamplingParams
    encode: Callable[[], Awaitable[list[EncodedPrompt]]]
    writer: Callable[[Head, list[SequenceSpec], TokenTexts], Writer]


def generation_router(context: ServingContext) -> APIRouter:
    """The two endpoints that generate."""
    router = APIRouter(prefix="/v1", route_class=JsonRoute)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""
        prompts = count_prompts(body.prompt)
        _check(context, body, prompts)
        job = _Job(
            id_prefix="cmpl",
            prompts=prompts,
            params=body.sampling(context.config.defaults, context.limits),
            encode=partial(
                context.encoder.completion,
                body.prompt,
                add_special_tokens=body.add_special_tokens,
                with_text=body.echo,
                max_tokens=context.engine.status().max_model_len,
            ),
            writer=partial(
                CompletionWriter, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs
            ),
        )
        return await _respond(context, request, body, job)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        _check(context, body, 1)
        context.limits.check_messages(len(body.messages))
        params = body.sampling(context.config.defaults, context.limits)
        if context.tools.keeps_special_tokens(body):
            params = replace(params, skip_special_tokens=False)
        messages = [message.for_template() for message in body.messages]
        options = context.config.template_kwargs | body.template_options()
        job = _Job(
            id_prefix="chatcmpl",
            prompts=1,
            params=params,
            encode=partial(
                context.encoder.chat,
                messages,
                options,
                max_tokens=context.engine.status().max_model_len,
            ),
            writer=partial(
                ChatWriter,
                logprobs=body.logprobs,
                prompt_logprobs=body.prompt_logprobs,
                parser=context.tools.parser(body),
                parallel_calls=body.parallel_tool_calls,
            ),
        )
        return await _respond(context, request, body, job)

    return router


def _check(context: ServingContext, body: GenerationRequest, prompts: int) -> None:
    """What can be told from a body without reading its values."""
    context.check_model(body.model)
    context.note_unknown(body.unknown_fields())
    context.limits.check_sequences(body.n, prompts)


async def _respond(
    context: ServingContext, request: Request, body: GenerationRequest, job: _Job
) -> Response:
    """Admit, encode, generate, answer. A stream keeps its place until it has ended."""
    deadline, arrived = context.deadline(), time.monotonic()
    context.check_healthy()
    request_id = f"{job.id_prefix}-{uuid.uuid4().hex}"
    head = Head(request_id, int(time.time()), body.model or context.model_name, context.fingerprint)
    async with AsyncExitStack() as resources:
        resources.enter_context(context.gate.admit(body.n * job.prompts))
        prompts = await while_connected(request.receive, _prepare(context, body, job, deadline))
        check_context(prompts, job.params, context.engine.status().max_model_len)
        context.check_queue(body.n * sum(len(prompt.token_ids) for prompt in prompts))
        await context.log_prompts(request_id, prompts, job.params)
        sequences = choices_of(prompts, job.params, body.n)
        generation = await resources.enter_async_context(
            context.generation(request_id, sequences, deadline=deadline, arrived=arrived)
        )
        answer = _Answer(
            generation,
            job.writer(head, sequences, context.token_texts(body.return_tokens_as_token_ids)),
            Usage(sum(len(prompt.token_ids) for prompt in prompts), len(sequences), body.n),
            len(sequences),
        )
        if not body.stream:
            whole = await while_connected(request.receive, answer.whole())
            return JsonResponse(whole, headers=context.precision_headers())
        # A refusal by the engine comes instead of the first output: wait, so that it has a status.
        # After a while the stream opens all the same, so that it can tell that it lives.
        first = asyncio.ensure_future(anext(generation))
        resources.callback(first.cancel)
        patience = context.limits.sse_ping_interval
        await while_connected(request.receive, asyncio.wait({first}, timeout=patience))
        if first.done():
            first.result()
        return EventStream(
            answer.chunks(first, body),
            resources.pop_all(),
            headers=context.precision_headers(),
            ping_interval=patience,
            send_timeout=context.limits.send_timeout,
        )


async def _prepare(
    context: ServingContext, body: GenerationRequest, job: _Job, deadline: float | None
) -> list[EncodedPrompt]:
    """Encode the prompts, and see that the grammar compiles, in time."""
    try:
        async with asyncio.timeout_at(deadline):
            prompts = await job.encode()
            if job.params.grammar is not None:
                await context.grammars.check(job.params.grammar, body.grammar_param)
            return prompts
    except TimeoutError:
        raise timed_out(context.limits.request_timeout or 0.0) from None


@dataclass
class _Answer:
    """Turns a generation's outputs into one endpoint's JSON."""

    generation: Generation
    writer: Writer
    usage: Usage
    sequences: int

    async def whole(self) -> Json:
        """The answer of a request that does not stream."""
        choices = [Choice() for _ in range(self.sequences)]
        async for index, output in self.generation:
            choices[index].add(output)
            self.usage.add(index, output)
        return self.writer.answer(choices, self.usage.json())

    async def chunks(
        self, first: Awaitable[tuple[int, RequestOutput]], body: GenerationRequest
    ) -> AsyncIterator[Json]:
        """The chunks of a stream, the usage chunk last and only when asked for."""
        for chunk in self._chunks_of(*await first, body):
            yield chunk
        async for index, output in self.generation:
            for chunk in self._chunks_of(index, output, body):
                yield chunk
        if body.include_usage:
            yield self.writer.chunk([]) | {"usage": self.usage.json()}

    def _chunks_of(self, index: int, output: RequestOutput, body: GenerationRequest) -> list[Json]:
        self.usage.add(index, output)
        chunks = [self.writer.chunk([delta]) for delta in self.writer.deltas(index, output)]
        if body.include_usage:
            usage = self.usage.json() if body.continuous_usage else None
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return chunks

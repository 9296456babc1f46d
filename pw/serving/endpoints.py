"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer or a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from pw.engine.request import RequestOutput
from pw.serving.answers import ChatWriter, Choice, CompletionWriter, Head, Json, Writer, usage_of
from pw.serving.connection import EventStream, while_connected
from pw.serving.context import ServingContext
from pw.serving.generation import Generation, check_context, choices_of
from pw.serving.prompts import EncodedPrompt, count_prompts
from pw.serving.schemas import ChatRequest, CompletionRequest, GenerationRequest
from pw.serving.wire import JsonResponse, JsonRoute

Encode = Callable[[], Awaitable[list[EncodedPrompt]]]


def generation_router(context: ServingContext) -> APIRouter:
    """The two endpoints that generate."""
    router = APIRouter(prefix="/v1", route_class=JsonRoute)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""

        async def encode() -> list[EncodedPrompt]:
            return await context.encoder.completion(
                body.prompt, add_special_tokens=body.add_special_tokens, with_text=body.echo
            )

        prompts = count_prompts(body.prompt)
        return await _respond(context, request, body, prompts, encode, CompletionWriter)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        context.limits.check_messages(len(body.messages))
        options = body.template_options()

        async def encode() -> list[EncodedPrompt]:
            messages = [message.for_template() for message in body.messages]
            return await context.encoder.chat(messages, options)

        return await _respond(context, request, body, 1, encode, ChatWriter)

    return router


async def _respond(
    context: ServingContext,
    request: Request,
    body: GenerationRequest,
    prompt_count: int,
    encode: Encode,
    writer_type: type[CompletionWriter] | type[ChatWriter],
) -> Response:
    """Check, admit, encode, generate, answer. A stream keeps its place until it has ended."""
    context.check_model(body.model)
    context.note_unknown(body.unknown_fields())
    context.limits.check_sequences(body.choices, prompt_count)
    params = body.sampling(context.config.defaults, context.limits)
    context.check_healthy()

    request_id = f"{writer_type.id_prefix}-{uuid.uuid4().hex}"
    head = Head(request_id, int(time.time()), body.model or context.model_name, context.fingerprint)
    async with AsyncExitStack() as resources:
        resources.enter_context(context.gate.admit(body.choices * prompt_count))
        prompts = await while_connected(request.receive, encode())
        check_context(prompts, params, context.engine.status().max_model_len)
        sequences = choices_of(prompts, params, body.choices)
        generation = await resources.enter_async_context(
            Generation(context.engine, context.metrics, context.generations, request_id, sequences)
        )
        answer = _Answer(
            generation,
            writer_type(head, sequences, context.texts),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=[0] * len(sequences),
        )
        if not body.stream:
            return JsonResponse(await while_connected(request.receive, answer.whole()))
        # A refusal by the engine comes instead of the first output: wait, so that it has a status.
        first = await while_connected(request.receive, anext(generation))
        return EventStream(answer.chunks(first, body), resources.pop_all())


@dataclass
class _Answer:
    """Turns a generation's outputs into one endpoint's JSON."""

    generation: Generation
    writer: Writer
    prompt_tokens: int  # of all prompts, each once
    completion_tokens: list[int]  # of each sequence so far

    async def whole(self) -> Json:
        """The answer of a request that does not stream."""
        choices = [Choice() for _ in self.completion_tokens]
        async for index, output in self.generation:
            choices[index].add(output)
            self.completion_tokens[index] = output.completion_tokens
        written = [self.writer.choice(index, choice) for index, choice in enumerate(choices)]
        return self.writer.answer(written, self._usage())

    async def chunks(
        self, first: tuple[int, RequestOutput], body: GenerationRequest
    ) -> AsyncIterator[Json]:
        """The chunks of a stream, the usage chunk last and only when asked for."""
        for chunk in self._chunks_of(*first, body):
            yield chunk
        async for index, output in self.generation:
            for chunk in self._chunks_of(index, output, body):
                yield chunk
        if body.include_usage:
            yield self.writer.chunk([]) | {"usage": self._usage()}

    def _chunks_of(self, index: int, output: RequestOutput, body: GenerationRequest) -> list[Json]:
        self.completion_tokens[index] = output.completion_tokens
        chunks = [self.writer.chunk([delta]) for delta in self.writer.deltas(index, output)]
        if body.include_usage:
            usage = self._usage() if body.continuous_usage else None
            chunks = [chunk | {"usage": usage} for chunk in chunks]
        return chunks

    def _usage(self) -> Json:
        return usage_of(self.prompt_tokens, sum(self.completion_tokens))

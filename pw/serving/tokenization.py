"""Routes that only need the tokenizer; lm-eval and others take them as a remote tokenizer."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pw.errors import RequestError
from pw.serving.context import ServingContext
from pw.serving.schemas import DetokenizeRequest, TokenizeRequest
from pw.serving.wire import JsonResponse, JsonRoute


def tokenization_router(context: ServingContext) -> APIRouter:
    """Text to ids and back."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            context.limits.check_messages(len(body.messages))
            messages = [message.for_template() for message in body.messages]
            options = {"add_generation_prompt": body.add_generation_prompt}
            tokens = (await context.encoder.chat(messages, options))[0].token_ids
        else:
            tokens = await context.encoder.encode(body.prompt or "", body.add_special_tokens)
        return JsonResponse(
            {
                "count": len(tokens),
                "max_model_len": context.engine.status().max_model_len,
                "tokens": tokens,
            }
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        return JsonResponse({"prompt": await context.encoder.decode(body.tokens)})

    return router

"""Routes that only need the tokenizer; lm-eval and others take them as a remote tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from pw.errors import RequestError
from pw.serving.context import ServingContext
from pw.serving.openai.chat_schemas import TokenizeRequest
from pw.serving.openai.schemas import DetokenizeRequest
from pw.serving.wire import JsonResponse, JsonRoute


def tokenization_router(context: ServingContext) -> APIRouter:
    """Text to ids and back."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            context.limits.check_messages(len(body.messages))
            messages = [message.for_template() for message in body.messages]
            options = context.config.template_kwargs | body.template_options()
            tokens = (await context.encoder.chat(messages, options))[0].token_ids
        else:
            special = body.add_special_tokens is not False
            tokens = await context.encoder.encode(body.prompt or "", special)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": context.engine.status().max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            texts = context.token_texts(by_id=False)
            answer["token_strs"] = [texts.text(token) for token in tokens]
        return JsonResponse(answer)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        context.check_model(body.model)
        return JsonResponse({"prompt": await context.encoder.decode(body.tokens)})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Special tokens, chat template and sizes."""
        return JsonResponse(context.tokenizer_info)

    return router

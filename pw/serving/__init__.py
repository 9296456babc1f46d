"""OpenAI-compatible HTTP server: FastAPI app, schemas, limits, metrics, uvicorn runner."""

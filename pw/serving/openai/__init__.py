"""The OpenAI surface: request bodies, prompts, generation, answers, tool calls."""

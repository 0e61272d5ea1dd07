"""HTTP server: OpenAI-compatible completions with continuous batching and streaming."""

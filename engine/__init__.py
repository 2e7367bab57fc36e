"""The engine: requests in, tokens out; scheduling, KV cache, execution and sampling."""

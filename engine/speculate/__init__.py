"""Speculation: drafts of the next tokens, which an iteration verifies."""

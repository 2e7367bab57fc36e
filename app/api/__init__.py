"""The API that other programs use: OpenAI's and Anthropic's."""

from neo_desktop.app.api.routes import create_api

__all__ = ["create_api"]

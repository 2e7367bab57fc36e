"""The API that other programs use: OpenAI's and Anthropic's."""

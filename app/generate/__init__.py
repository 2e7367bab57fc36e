"""The way from a conversation to what a model writes, for the API and the page."""

"""The engine's present work for the page: feed.py asks for it, words.py says it in sentences."""

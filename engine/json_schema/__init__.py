"""JSON schemas in the terms of llguidance."""

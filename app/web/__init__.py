"""The HTTP server: what comes in, who may ask, how much, and what goes to pages."""

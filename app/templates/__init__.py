"""Chat templates: a model's own program that writes a chat as a prompt, run in a process of its own."""

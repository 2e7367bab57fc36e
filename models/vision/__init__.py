"""Images in prompts: the vision towers of `transformers`, and the rows that they put into prompts."""

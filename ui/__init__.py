"""The page: Gradio views of the server's services."""

"""The browser page: a client of the REST API like any other."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = (
    "False"  # gradio reads it when it is imported: no calls to the internet
)

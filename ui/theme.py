"""The page's looks: system fonts, one accent colour, nothing from elsewhere."""

from pathlib import Path

import gradio as gr

THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    radius_size=gr.themes.sizes.radius_md,
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)

HEAD = f"""
<meta name="referrer" content="no-referrer">
<script>{(Path(__file__).parent / "page.js").read_text(encoding="utf-8")}</script>
"""

"""The page's looks: system fonts, one accent colour, nothing from elsewhere."""

import gradio as gr

THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    radius_size=gr.themes.sizes.radius_md,
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)

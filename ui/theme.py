"""The page's looks: system fonts, one accent colour, nothing from elsewhere."""

import gradio as gr

THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    radius_size=gr.themes.sizes.radius_md,
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)

# Keys: Ctrl+K searches, Ctrl+Shift+O begins a chat, Escape stops the answer, / goes to the box.
HEAD = """
<meta name="referrer" content="no-referrer">
<script>
document.addEventListener('keydown', (event) => {
  const press = (selector) => document.querySelector(selector)?.click();
  const focus = (selector) => { document.querySelector(selector)?.focus(); event.preventDefault(); };
  const isTyping = event.target.closest?.('input, textarea, [contenteditable]');
  if (event.ctrlKey && event.key === 'k') focus('#search input, #search textarea');
  else if (event.ctrlKey && event.shiftKey && event.key === 'O') { press('#new-chat'); event.preventDefault(); }
  else if (event.key === 'Escape') press('#question .stop-button');
  else if (event.key === '/' && !isTyping) focus('#question textarea');
});
// On a phone the list would cover the chat.
window.addEventListener('load', () => {
  if (innerWidth > 768) return;
  const close = () => document.querySelector('#sidebar .toggle-button')?.click();
  const wait = setInterval(() => { if (document.querySelector('#sidebar .toggle-button')) { clearInterval(wait); close(); } }, 50);
});
</script>
"""

// Keys: Ctrl+K searches, Ctrl+Shift+O begins a chat, Escape stops the answer, / goes to the box.
document.addEventListener('keydown', (event) => {
  const press = (selector) => document.querySelector(selector)?.click();
  const focus = (selector) => { document.querySelector(selector)?.focus(); event.preventDefault(); };
  const isTyping = event.target.closest?.('input, textarea, [contenteditable]');
  if (event.ctrlKey && event.key === 'k') focus('#search input, #search textarea');
  else if (event.ctrlKey && event.shiftKey && event.key === 'O') {
    press('#new-chat');
    event.preventDefault();
  }
  else if (event.key === 'Escape') press('#question .stop-button');
  else if (event.key === '/' && !isTyping) focus('#question textarea');
});
// On a phone the list would cover the chat.
window.addEventListener('load', () => {
  if (innerWidth > 768) return;
  const wait = setInterval(() => {
    const toggle = document.querySelector('#sidebar .toggle-button');
    if (!toggle) return;
    clearInterval(wait);
    toggle.click();
  }, 50);
});

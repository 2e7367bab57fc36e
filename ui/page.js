// Gradio's loading indicator runs a timer at each frame, for ever: 10 % of a core. Once a second is enough.
const atNextFrame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) =>
  String(draw).includes('performance.now()-') ? setTimeout(draw, 1000) : atNextFrame(draw);
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
// On a phone the list covers the chat: close it after the start, and when a chat was chosen.
const isPhone = () => innerWidth <= 768;
const closeList = () => document.querySelector('#sidebar.open .toggle-button')?.click();
document.addEventListener('click', (event) => {
  if (isPhone() && event.target.closest?.('#chats a, #new-chat')) closeList();
});
const wait = setInterval(() => {
  if (!isPhone() || document.querySelector('#sidebar.was-open:not(.open)')) clearInterval(wait);
  document.querySelector('#sidebar.open')?.classList.add('was-open');
  if (isPhone()) closeList();
}, 100);

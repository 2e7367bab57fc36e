// What the page does without the server. Functions return what Gradio's components show next.
window.page = (() => {
  const KEY = "neo-desktop.chats";

  // The chats of this browser, newest first: [{id, title, messages}]. They stay in its local storage;
  // every function reads it anew, so that tabs do not undo each other's work.
  const read = () => JSON.parse(localStorage.getItem(KEY) ?? "[]");

  // A full storage gives up its oldest chats first.
  const write = (chats) => {
    try {
      localStorage.setItem(KEY, JSON.stringify(chats));
    } catch (error) {
      if (chats.length <= 1) throw error;
      write(chats.slice(0, -1));
    }
  };

  const list = (id) => ({
    __type__: "update",
    choices: read().map((chat) => [chat.title, chat.id]),
    value: id,
  });

  // In a narrow window the sidebar covers the conversation: it opens on demand only.
  const sidebar = () => ({ __type__: "update", open: window.innerWidth > 768 });

  return {
    start: () => [[], list(null), sidebar()],

    save: (messages, id) => {
      if (!messages.length) return list(id);
      const title = messages[0].content[0].text.trim().slice(0, 80);
      const chat = { id: id ?? crypto.randomUUID(), title, messages };
      write([chat, ...read().filter((other) => other.id !== chat.id)]);
      return list(chat.id);
    },

    open: (id) => [read().find((chat) => chat.id === id)?.messages ?? [], list(id), sidebar()],

    remove: (id) => {
      write(read().filter((chat) => chat.id !== id));
      return [[], list(null), sidebar()];
    },
  };
})();

// Gradio copies an answer as it is stored; the page's line under it (messages.py) is not part of it.
if (navigator.clipboard) {
  const writeText = navigator.clipboard.writeText.bind(navigator.clipboard);
  navigator.clipboard.writeText = (text) => writeText(text.replace(/\n*<p class="\w+">[^<]*<\/p>$/, ""));
}

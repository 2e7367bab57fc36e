// Files dropped anywhere on the chat.

import { h } from "./dom.js";

// Missed by a little, a file must not take the page's place.
for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());

export function mountDrop(element, take) {
  const cover = h("div", { class: "drop-cover", hidden: true }, "Drop text or PDF files here");
  element.append(cover);
  let depth = 0; // the pointer enters children, too
  const end = () => {
    depth = 0;
    cover.hidden = true;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  element.addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    cover.hidden = false;
  });
  element.addEventListener("dragleave", (event) => hasFiles(event) && (depth -= 1) <= 0 && end());
  element.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  element.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    end();
    for (const file of event.dataTransfer.files) take(file);
  });
}

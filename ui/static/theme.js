// Runs before the first paint, so that a dark page does not flash white. The choice stays in this browser.
// "auto" (nothing chosen) follows the system.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("theme");
  } catch {
    // Storage is switched off: the system decides.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

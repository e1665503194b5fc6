// Owns: the page's keys: / searches, l loads, u unloads, p pauses all. Not while somebody writes.

/** does: key -> what it does. */
export function listen(does) {
  document.addEventListener("keydown", (event) => {
    const isWriting = event.target.matches("input:not([type=range]), textarea, select, [contenteditable]");
    if (isWriting || event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
    const act = does[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

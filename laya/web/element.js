// Owns: making and keeping elements, and how amounts are written. Text only ever becomes text, never markup.

const MIB = 1024 ** 2;
const GIB = 1024 ** 3;

/** A new element; `set` gives properties, and attributes where a name has a dash. */
export function element(tag, set = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Writes only what changed, so that a screen reader hears a change once and a selection survives. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Make `parent` hold one element for each item, in this order; those that stay are kept with their focus. */
export function keep(parent, items, idOf, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.id, child]));
  const focused = document.activeElement;
  items.forEach((item, index) => {
    const id = idOf(item);
    let child = before.get(id);
    before.delete(id);
    if (!child) {
      child = make(item);
      child.dataset.id = id;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const gone of before.values()) gone.remove();
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus();
}

/** `537 MiB`, `17.4 GiB`: as the command line writes it. */
export function size(bytes) {
  return bytes >= GIB ? `${(bytes / GIB).toFixed(1)} GiB` : `${(bytes / MIB).toFixed(0)} MiB`;
}

/** `12 s`, `4 min`, `2 h`. */
export function span(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

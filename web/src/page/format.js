// Writes numbers and times for people, and makes elements.
"use strict";

const format = {
  // Writes a number with four significant digits, a whole one as it is. One that is not finite comes as a string.
  number(value) {
    if (typeof value !== "number") return String(value ?? "");
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  },
  // Writes seconds as `1 h 05 min`, `2 min 03 s` or `12 s`.
  span(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    const two = (number) => String(number).padStart(2, "0");
    if (whole >= 86400) return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
    if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
    if (whole >= 60) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${whole} s`;
  },
  // Writes milliseconds since 1970 as the time of day here, with the day if it is not today's.
  clock(milliseconds) {
    const time = new Date(milliseconds);
    const clock = time.toLocaleTimeString("en-GB");
    if (time.toDateString() === new Date().toDateString()) return clock;
    return `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}`;
  },
  percent(share) {
    return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
  },
};

// Makes an element. Text goes in as text, so that nothing in it becomes markup.
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "rect"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

// Sets the text of an element, if it is another one: a reader's selection stays.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Makes the children of `parent` those of `items`, in their order. A child stays with its key, and with the focus in it; of
// items with one key the second has another one.
function keyed(parent, items, key, create, update) {
  const named = new Map();
  for (const item of items) {
    let name = String(key(item));
    while (named.has(name)) name += " again";
    named.set(name, item);
  }
  // First of all, so that those that stay are not moved: that would take the focus from them.
  for (const child of [...parent.children]) if (!named.has(child.dataset.key)) child.remove();
  const present = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  let before = parent.firstElementChild;
  for (const [name, item] of named) {
    let child = present.get(name);
    if (!child) {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    update(child, item);
  }
  // One that was moved to another place has lost it.
  if (focused?.isConnected) focused.focus({ preventScroll: true });
}

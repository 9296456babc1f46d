// The few things about the document that all parts share. Text is set as text, never as HTML:
// request ids are the clients' own.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set an element's text if it has changed, so that selections survive. */
export function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

/** A colour of the current theme, by its name in style.css. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Call `draw` when the theme changes. */
export function onThemeChange(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/** Size a canvas in CSS pixels and give its context, sharp on any screen. */
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

/** Show what `describe(x, y)` says while the pointer is over an element; null hides it. */
export function tooltip(element, describe) {
  const tip = $("tip");
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
  element.addEventListener("pointermove", (event) => {
    const box = element.getBoundingClientRect();
    const words = describe(event.clientX - box.left, event.clientY - box.top);
    tip.hidden = words === null;
    if (words === null) return;
    tip.textContent = words;
    const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
    tip.style.left = `${right ? event.clientX - 10 - tip.offsetWidth : event.clientX + 14}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)}px`;
  });
}

/** Buttons of which one is pressed; `chosen` gets its data value. */
export function choice(id, name, chosen) {
  const buttons = [...$(id).querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      chosen(button.dataset[name]);
    });
  }
}

// A canvas that is as sharp as the screen, and the page's colours.

export function surface(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height };
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function palette(names) {
  return Object.fromEntries(names.map((name) => [name, colour(name)]));
}

export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, label]) => {
      const item = document.createElement("li");
      const patch = document.createElement("i");
      patch.style.background = `var(--${name})`;
      item.append(patch, label);
      return item;
    }),
  );
}

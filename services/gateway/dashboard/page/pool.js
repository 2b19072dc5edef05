// The pool as it slides: a dot for each sequence, at its length, in the band of its state.

import { palette, surface } from "./surface.js";

export const STATES = ["waiting", "prefilling", "idle", "verifying", "moving"];
// From the top down, the way that a sequence takes.
const BANDS = ["waiting", "prefilling", "idle", "verifying"];
const AXIS = 22;
const EASE_SECONDS = 0.08;
// The axis may take its time: what moves with it moves all at once.
const AXIS_SECONDS = 0.6;

export class PoolPicture {
  constructor(canvas) {
    this.canvas = canvas;
    this.dots = new Map();
    this.range = [0, 100];
    this.unlisted = 0;
    this.drawn = performance.now();
  }

  take(view) {
    const seen = new Set();
    for (const [id, length, , state, target] of view.sequences) {
      seen.add(id);
      const dot = this.dots.get(id) ?? { x: null, y: null };
      this.dots.set(id, Object.assign(dot, { length, target, state: STATES[state] }));
    }
    for (const id of this.dots.keys()) if (!seen.has(id)) this.dots.delete(id);
    this.unlisted = view.unlisted;
  }

  draw() {
    const { pen, width, height } = surface(this.canvas);
    const colours = palette([...STATES, "ink", "faint", "line"]);
    const dots = [...this.dots.values()];
    const bands = dots.some((dot) => dot.state === "moving") ? [...BANDS, "moving"] : BANDS;
    const names = width < 500 ? 78 : 110;
    const tall = (height - AXIS) / bands.length;
    const seconds = (performance.now() - this.drawn) / 1000;
    this.drawn = performance.now();
    this.#follow(dots, nearer(seconds, AXIS_SECONDS));
    const [low, high] = this.range;
    const across = (length) => names + 8 + ((length - low) / Math.max(high - low, 1)) * (width - names - 20);
    this.#axis(pen, names, width, height, across, colours);
    bands.forEach((state, place) => {
      const count = dots.filter((dot) => dot.state === state).length + (state === "waiting" ? this.unlisted : 0);
      pen.textAlign = "left";
      pen.fillStyle = count ? colours.ink : colours.faint;
      pen.fillText(`${state} ${count || ""}`, 0, (place + 0.5) * tall + 4);
    });
    const radius = Math.min(6, tall / 4.5);
    const columns = new Map();
    for (const dot of dots) {
      const key = `${dot.state} ${dot.target} ${Math.round(across(dot.length) / radius)}`;
      if (!columns.has(key)) columns.set(key, []);
      columns.get(key).push(dot);
    }
    for (const column of columns.values()) {
      this.#column(pen, column, bands, tall, radius, across, colours, nearer(seconds, EASE_SECONDS));
    }
  }

  // Sequences of one state and (nearly) one length, one above the other; those of one group are joined.
  #column(pen, column, bands, tall, radius, across, colours, part) {
    const middle = (bands.indexOf(column[0].state) + 0.5) * tall;
    const pitch = Math.min(2 * radius, (tall - 2 * radius) / Math.max(column.length - 1, 1));
    column.forEach((dot, place) => {
      const [x, y] = [across(dot.length), middle + pitch * (place - (column.length - 1) / 2)];
      dot.x = dot.x === null ? x : dot.x + (x - dot.x) * part;
      dot.y = dot.y === null ? y : dot.y + (y - dot.y) * part;
    });
    const [first, last] = [column[0], column.at(-1)];
    if (column.length > 1 && first.state === "verifying" && column.every((dot) => dot.length === first.length)) {
      pen.strokeStyle = colours.verifying;
      pen.lineWidth = 2 * radius + 5;
      pen.lineCap = "round";
      pen.globalAlpha = 0.35;
      pen.beginPath();
      pen.moveTo(first.x, first.y);
      pen.lineTo(last.x, last.y);
      pen.stroke();
      pen.globalAlpha = 1;
    }
    for (const dot of column) {
      pen.beginPath();
      pen.arc(dot.x, dot.y, radius, 0, 2 * Math.PI);
      pen.fillStyle = colours[dot.state];
      pen.fill();
    }
  }

  // The axis moves with the lengths, slowly.
  #follow(dots, part) {
    if (!dots.length) return;
    const lengths = dots.map((dot) => dot.length);
    const [least, most] = [Math.min(...lengths), Math.max(...lengths)];
    const margin = Math.max(8, (most - least) * 0.05);
    const wanted = [Math.max(0, least - margin), most + margin];
    this.range = this.range.map((edge, index) => edge + (wanted[index] - edge) * part);
  }

  #axis(pen, names, width, height, across, colours) {
    const [low, high] = this.range;
    const rough = (high - low) / Math.max(2, (width - names) / 90);
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? 10 * power;
    pen.strokeStyle = colours.line;
    pen.fillStyle = colours.faint;
    pen.textAlign = "center";
    pen.lineWidth = 1;
    for (let length = Math.ceil(low / step) * step; length <= high; length += step) {
      const x = Math.round(across(length)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, height - AXIS);
      pen.stroke();
      pen.fillText(String(length), x, height - 6);
    }
  }
}

// The part of a way that is gone after some seconds, however many frames these had.
function nearer(seconds, constant) {
  return 1 - Math.exp(-seconds / constant);
}

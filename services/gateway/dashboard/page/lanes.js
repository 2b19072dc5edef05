// What each target computed over the last seconds, step by step, and how busy each draft was.

import { legend, palette, surface } from "./surface.js";

const SECONDS = 4;
// Replies come late by the way of the next view; drawn a little in the past, the lanes move evenly.
const LATE_SECONDS = 0.5;
const LANE = 34;
const AXIS = 18;

export class LanesPicture {
  constructor(canvas, list) {
    this.canvas = canvas;
    this.workers = [];
    this.steps = [];
    this.origin = null;
    legend(list, [["drafting", "draft, busy"], ["verifying", "target, equal lengths"], ["ragged", "target, else"]]);
  }

  take(view) {
    const before = this.origin?.now ?? view.now;
    this.origin = { now: view.now, at: performance.now() / 1000 };
    this.steps.push(...view.steps.map(([worker, started, ended, rows, verified, equal]) =>
      ({ worker, role: "target", started, ended, rows, verified, equal, busy: 1 })));
    this.steps.push(...view.workers.filter((worker) => worker.role === "draft").map((worker) =>
      ({ worker: worker.id, role: "draft", started: before, ended: view.now, rows: 0, busy: worker.busy })));
    const oldest = view.now - SECONDS - 2 * LATE_SECONDS;
    this.steps = this.steps.filter((step) => step.ended > oldest);
    const known = new Map(view.workers.map((worker) => [worker.id, worker.role]));
    for (const step of this.steps) known.set(step.worker, step.role);
    this.workers = [...known].sort(([one, role], [other, otherRole]) => role.localeCompare(otherRole) || one.localeCompare(other));
    this.canvas.style.height = `${Math.max(1, this.workers.length) * LANE + AXIS}px`;
  }

  draw() {
    const { pen, width, height } = surface(this.canvas);
    const colours = palette(["ink", "faint", "line", "drafting", "verifying", "ragged", "ground"]);
    if (!this.origin) return;
    const now = this.origin.now + (performance.now() / 1000 - this.origin.at) - LATE_SECONDS;
    const names = Math.min(130, width * 0.24);
    const across = (time) => names + ((time - now + SECONDS) / SECONDS) * (width - names);
    this.workers.forEach(([worker, role], lane) => {
      const top = lane * LANE + 4;
      pen.fillStyle = colours.ground;
      pen.fillRect(names, top, width - names, LANE - 8);
      pen.fillStyle = colours.faint;
      pen.textAlign = "left";
      pen.fillText(fitted(pen, worker.split("#").at(-1), names - 8), 0, top + (LANE - 8) / 2 + 4);
      for (const step of this.steps) {
        if (step.worker !== worker) continue;
        const [left, right] = [Math.max(across(step.started), names), Math.min(across(step.ended), width)];
        if (right <= left) continue;
        pen.fillStyle = colours[role === "draft" ? "drafting" : step.equal ? "verifying" : "ragged"];
        // Steps stand apart, and what a draft says of itself is one band, as high as it was busy.
        const tall = (LANE - 8) * step.busy;
        pen.fillRect(left, top + LANE - 8 - tall, Math.max(right - left - (role === "draft" ? 0 : 1), 1), tall);
        if (step.rows && right - left > 18) {
          pen.fillStyle = colours.ink;
          pen.textAlign = "center";
          pen.fillText(String(step.rows), (left + right) / 2, top + (LANE - 8) / 2 + 4);
        }
      }
    });
    pen.fillStyle = colours.faint;
    for (let second = 0; second <= SECONDS; second += 1) {
      pen.textAlign = second === 0 ? "right" : "center";
      pen.fillText(second === 0 ? "now" : `−${second} s`, across(now - second), height - 4);
    }
  }
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = text;
  while (kept && pen.measureText(`…${kept}`).width > width) kept = kept.slice(1);
  return `…${kept}`;
}

// Views of the cell come as events, a few a second; figures of this gateway are read from /metrics, once a second.

import { BarChart, LineChart } from "./charts.js";
import { LanesPicture } from "./lanes.js";
import { PoolPicture } from "./pool.js";
import { growth, quantile, Samples } from "./samples.js";

const FIGURES_MILLISECONDS = 1000;
const RATE_SECONDS = 5;
const LATENCY_SECONDS = 30;

// Beside the page; its own address may hold a key, with which browsers fetch nothing.
const beside = (path) => new URL(path, location.origin + location.pathname);
const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };
const whole = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–");
const percent = (value) => (Number.isFinite(value) ? `${Math.round(100 * value)} %` : "–");
const short = (value) => (value >= 100 ? whole(value) : Number(value.toPrecision(2)).toString());

const pool = new PoolPicture(at("pool"));
const lanes = new LanesPicture(at("lanes"), at("kinds"));

// Of several cells, `?cell=2` in the page's address chooses one.
const cell = new URLSearchParams(location.search).get("cell") ?? "1";

function watch() {
  const views = new EventSource(beside(`dashboard/views?cell=${encodeURIComponent(cell)}`));
  views.onmessage = ({ data }) => {
    const view = JSON.parse(data);
    at("connection").dataset.state = "live";
    show("connection", "live");
    show("model", ["", "none"].includes(view.quantization) ? view.model : `${view.model}, ${view.quantization}`);
    pool.take(view);
    lanes.take(view);
    accepted.take(view.figures);
    show("running", whole(view.figures.running));
    show("waiting", whole(view.figures.waiting));
    show("kv-usage", percent(view.figures.kv_usage));
    show("acceptance", percent(view.figures.accepted_tokens / view.figures.draft_tokens));
    const up = (role) => view.workers.filter((worker) => worker.role === role && worker.state === "in_use").length;
    show("workers", `${up("target")}, ${up("draft")}`);
    show("replicas", view.replicas);
    at("replicas").hidden = !view.replicas;
    show("drafting", view.drafting.join("; "));
    at("drafting").hidden = !view.drafting.length;
    show("versions", versions([...view.workers, ...view.gateways]));
    at("versions").hidden = !view.workers.length;
  };
  views.onerror = () => {
    at("connection").dataset.state = "lost";
    show("connection", "no scheduler answers");
    // The browser itself tries again where the connection broke, but not after an error status.
    if (views.readyState === EventSource.CLOSED) setTimeout(watch, 2000);
  };
}

// Who runs which version: one line where all run the same, as they do but for an upgrade.
function versions(processes) {
  const names = new Map();
  for (const { id, version } of processes) names.set(version, [...(names.get(version) ?? []), id.split("#").at(-1)]);
  return [...names].map(([version, ids]) => `version ${version}: ${ids.join(", ")}`).join("; ");
}

function draw() {
  pool.draw();
  lanes.draw();
  requestAnimationFrame(draw);
}

class AcceptedLengths {
  constructor() {
    this.chart = new BarChart(at("accepted"), "of the rounds", "drafting");
    this.rounds = 0;
  }

  // Position p of a draft is accepted in as many rounds as have at least p accepted tokens.
  take({ drafts, accepted_per_position: positions }) {
    if (!drafts || drafts === this.rounds) return;
    this.rounds = drafts;
    const atLeast = [drafts, ...positions.filter((count) => count > 0), 0];
    const lengths = atLeast.slice(0, -1).map((_, length) => length);
    this.chart.set(lengths, lengths.map((length) => (atLeast[length] - atLeast[length + 1]) / drafts));
  }
}

class Figures {
  constructor() {
    this.readings = [];
    this.speed = new LineChart(at("speed"), [["output", "verifying"], ["of them drafted", "drafting"]], short);
    const percentiles = [["half", "verifying"], ["90 %", "prefilling"], ["99 %", "moving"]];
    this.firstToken = new LineChart(at("first-token"), percentiles, short);
    this.perToken = new LineChart(at("per-token"), percentiles, short);
  }

  async read() {
    const response = await fetch(beside("metrics"), { cache: "no-store" });
    if (!response.ok) return;
    this.take({ seconds: Date.now() / 1000, samples: new Samples(await response.text()) });
  }

  take(reading) {
    const { seconds, samples } = reading;
    this.readings.push(reading);
    while (this.readings.length > 2 && this.readings[1].seconds < seconds - LATENCY_SECONDS) this.readings.shift();
    const before = this.#earlier(seconds - RATE_SECONDS);
    const rate = (name) => growth(before.samples.total(name), samples.total(name)) / (seconds - before.seconds);

    show("generated", whole(samples.total("spool_generation_tokens_total")));
    if (before !== reading) {
      const tokens = rate("spool_generation_tokens_total");
      show("tokens-per-second", short(tokens));
      this.speed.add(seconds, [tokens, rate("spool_delivered_accepted_tokens_total")]);
    }
    const first = this.readings[0].samples;
    const percentiles = (name, factor) => [0.5, 0.9, 0.99].map((share) => {
      const value = quantile(share, first, samples, name);
      return value === null ? null : value * factor;
    });
    this.firstToken.add(seconds, percentiles("spool_time_to_first_token_seconds", 1));
    this.perToken.add(seconds, percentiles("spool_request_time_per_output_token_seconds", 1000));
  }

  // The latest reading that is at least that old, or the oldest.
  #earlier(seconds) {
    return this.readings.findLast((reading) => reading.seconds <= seconds) ?? this.readings[0];
  }
}

async function readFigures(figures) {
  try {
    await figures.read();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch's word for a server that is not there
  }
  setTimeout(readFigures, FIGURES_MILLISECONDS, figures);
}

const accepted = new AcceptedLengths();
watch();
draw();
readFigures(new Figures());

// Lines over the last minutes, and bars, drawn by uPlot (github.com/leeoniya/uPlot).

import { colour } from "./surface.js";

const KEPT = 300;
const LEGEND = 28;

function axes(format) {
  const shared = { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
  const clock = (_, times) => times.map((time) => new Date(1000 * time).toLocaleTimeString("en-GB"));
  return [
    { ...shared, space: 90, size: 28, values: clock },
    { ...shared, size: 52, values: (_, values) => values.map(format) },
  ];
}

function place(element, options, data) {
  const size = () => ({ width: element.clientWidth, height: element.clientHeight - LEGEND });
  const plot = new uPlot({ ...size(), cursor: { show: false }, legend: { live: false }, ...options }, data, element);
  new ResizeObserver(() => plot.setSize(size())).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  return plot;
}

export class LineChart {
  // `lines`: [label, name of a colour].
  constructor(element, lines, format) {
    this.data = [[], ...lines.map(() => [])];
    this.plot = place(element, {
      series: [{}, ...lines.map(([label, name]) => ({
        label, stroke: () => colour(name), width: 2, points: { show: false },
      }))],
      axes: axes(format),
      scales: { y: { range: (_, least, most) => [0, (most || 1) * 1.1] } },
    }, this.data);
  }

  // null draws a gap.
  add(seconds, values) {
    [seconds, ...values].forEach((value, index) => {
      this.data[index].push(value);
      if (this.data[index].length > KEPT) this.data[index].shift();
    });
    this.plot.setData(this.data);
  }
}

export class BarChart {
  constructor(element, label, name) {
    this.plot = place(element, {
      series: [{}, {
        label, fill: () => colour(name), stroke: () => colour(name), paths: uPlot.paths.bars({ size: [0.7, 60] }),
        points: { show: false },
      }],
      axes: [
        { ...axes(String)[0], grid: { show: false }, incrs: [1], space: 20, size: 28, values: (_, values) => values.map(String) },
        axes((value) => `${Math.round(100 * value)} %`)[1],
      ],
      scales: {
        x: { time: false, range: (_, least, most) => [least - 0.6, most + 0.6] },
        y: { range: (_, least, most) => [0, Math.max(most || 0, 0.05) * 1.1] },
      },
    }, [[], []]);
  }

  set(places, shares) {
    this.plot.setData([places, shares]);
  }
}

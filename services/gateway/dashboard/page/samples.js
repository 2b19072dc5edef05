// Prometheus' text form, and what one reads off it.

const LINE = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

export class Samples {
  constructor(text) {
    this.families = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
      const value = { "+Inf": Infinity, "-Inf": -Infinity, NaN: NaN }[match[3]] ?? Number(match[3]);
      if (!this.families.has(match[1])) this.families.set(match[1], []);
      this.families.get(match[1]).push({ labels, value });
    }
  }

  // The sum over all labels; undefined where there is no such sample.
  total(name) {
    const samples = this.families.get(name);
    return samples && samples.reduce((sum, sample) => sum + sample.value, 0);
  }

  // [label's value as a number, sample's value], ascending; several samples of one label value are added up.
  by(name, label) {
    const sums = new Map();
    for (const sample of this.families.get(name) ?? []) {
      const key = { "+Inf": Infinity }[sample.labels[label]] ?? Number(sample.labels[label]);
      sums.set(key, (sums.get(key) ?? 0) + sample.value);
    }
    return [...sums].sort(([one], [other]) => one - other);
  }
}

// Growth of a counter between two readings. One that fell was started anew.
export function growth(before, after) {
  if (after === undefined) return undefined;
  return before === undefined || before > after ? after : after - before;
}

// The value below which `share` of what was observed between two readings lies; null where nothing was.
export function quantile(share, before, after, name) {
  const earlier = new Map(before.by(`${name}_bucket`, "le"));
  const buckets = after.by(`${name}_bucket`, "le").map(([edge, count]) => [edge, growth(earlier.get(edge), count)]);
  const wanted = share * (buckets.at(-1)?.[1] ?? 0);
  if (!wanted) return null;
  let [lowest, below] = [0, 0];
  for (const [edge, count] of buckets) {
    if (count >= wanted) {
      return edge === Infinity ? lowest : lowest + ((edge - lowest) * (wanted - below)) / (count - below);
    }
    [lowest, below] = [edge, count];
  }
  return lowest;
}

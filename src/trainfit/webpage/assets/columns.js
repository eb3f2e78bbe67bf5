// The embedded columns as arrays: running sums bring back what was written as differences.

const STACKED = ["parameter", "buffer", "optimizer_state", "input", "gradient", "communication", "activation", "temporary"];
const stackPlace = (name) => (STACKED.includes(name) ? STACKED.indexOf(name) : STACKED.length);

function summed(gaps) {
  const found = new Float64Array(gaps.length);
  let sum = 0;
  for (let i = 0; i < gaps.length; i += 1) {
    sum += gaps[i];
    found[i] = sum;
  }
  return found;
}

function readCurve(raw, strings) {
  const count = raw.ops;
  const totals = new Float64Array(count);
  const categories = raw.categories.map(({ name, at, by }) => {
    const values = new Float64Array(count);
    let place = 0;
    for (let i = 0; i < at.length; i += 1) {
      place += at[i];
      values[place] = by[i];
    }
    for (let op = 1; op < count; op += 1) values[op] += values[op - 1];
    for (let op = 0; op < count; op += 1) totals[op] += values[op];
    return { name, values };
  }).sort((one, other) => stackPlace(one.name) - stackPlace(other.name));
  const recomputed = new Uint8Array(count);
  for (const [first, length] of raw.recomputed) recomputed.fill(1, first, first + length);
  return {
    label: raw.label,
    count,
    totals,
    categories,
    recomputed,
    phases: raw.phases.map(([name, first, length]) => ({ name, first, last: first + length })),
    peak: raw.peak,
    peakBytes: raw.peak_bytes,
    ends: raw.nanoseconds ? summed(raw.nanoseconds) : null,
    name: (op) => strings[raw.names[op]],
    module: (op) => strings[raw.modules[op]],
    source: (op) => (raw.sources ? strings[raw.sources[op]] : ""),
  };
}

function phaseOf(curve, op) {
  let low = 0;
  let high = curve.phases.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.phases[middle].last > op) high = middle;
    else low = middle + 1;
  }
  return curve.phases.length ? curve.phases[low].name : "";
}

// For each op of one curve, the bytes that the other has at the same op; ops that only one has keep the last.
function sameOps(curve, other, runs, toOther) {
  const found = new Float64Array(curve.count);
  if (!runs) {
    for (let op = 0; op < curve.count; op += 1) found[op] = other.totals[Math.min(op, other.count - 1)];
    return found;
  }
  let filled = 0;
  let last = other.count ? other.totals[0] : 0;
  for (const [planned, plain, length] of runs) {
    const [here, there] = toOther ? [planned, plain] : [plain, planned];
    while (filled < here) found[filled++] = last;
    for (let i = 0; i < length; i += 1) found[here + i] = other.totals[there + i];
    filled = here + length;
    last = other.totals[there + length - 1];
  }
  while (filled < curve.count) found[filled++] = last;
  return found;
}

function readLane(raw) {
  const ops = summed(raw.ops);
  const starts = summed(raw.starts);
  const ends = Float64Array.from(raw.durations, (duration, i) => starts[i] + duration);
  return { label: raw.label, ops, starts, ends };
}

// The first place in a rising array whose value is above (or, with `atLeast`, not below) a bound.
function firstAbove(values, bound, atLeast = false) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > bound || (atLeast && values[middle] === bound)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The part of the step that is shown: by op, or by time. The memory picture and the lanes share it.

class StepAxis {
  constructor(curve, byTime) {
    this.listeners = [];
    this.use(curve, byTime);
  }

  // Keep what is shown where the step or the unit changes: the same ops stay in view.
  use(curve, byTime) {
    const ops = this.curve && this.curve.count === curve.count && !this.isWhole ? [this.opAt(this.from), this.opAt(this.to)] : null;
    this.curve = curve;
    this.byTime = byTime && curve.ends !== null;
    this.whole = Math.max(this.byTime ? curve.ends[curve.count - 1] || 1 : curve.count, 1e-9);
    this.from = 0;
    this.to = this.whole;
    if (ops) this.show(this.start(ops[0]), this.end(ops[1]));
  }

  get name() { return this.byTime ? "time" : "op"; }
  get isWhole() { return this.from <= 0 && this.to >= this.whole; }
  get span() { return this.to - this.from; }
  start(op) { return this.byTime ? (op > 0 ? this.curve.ends[op - 1] : 0) : op; }
  end(op) { return this.byTime ? this.curve.ends[op] : op + 1; }

  opAt(x) {
    const last = this.curve.count - 1;
    if (!this.byTime) return Math.max(0, Math.min(last, Math.floor(x)));
    return Math.min(firstAbove(this.curve.ends, x), last);
  }

  // The ops of a stretch: those that take no time belong to the moment at which they run.
  opsIn(from, to) {
    if (!this.byTime) return [Math.max(0, Math.floor(from)), Math.min(this.curve.count - 1, Math.max(Math.floor(from), Math.ceil(to) - 1))];
    const { ends, count } = this.curve;
    let first = firstAbove(ends, from);
    while (first > 0 && ends[first - 1] === from && this.start(first - 1) === from) first -= 1;
    let last = Math.max(first, firstAbove(ends, to, true));
    while (last + 1 < count && this.start(last + 1) === to && ends[last + 1] === to) last += 1;
    return [Math.min(first, count - 1), Math.min(last, count - 1)];
  }

  show(from, to) {
    const least = this.byTime ? this.whole / 5e6 : Math.min(4, this.whole);
    const span = Math.min(Math.max(to - from, least), this.whole);
    const middle = (from + to) / 2;
    this.from = Math.max(0, Math.min(middle - span / 2, this.whole - span));
    this.to = this.from + span;
    this.changed();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const from = around - (around - this.from) * factor;
    this.show(from, from + this.span * factor);
  }

  move(share) {
    const by = share * this.span;
    const from = Math.max(0, Math.min(this.from + by, this.whole - this.span));
    this.show(from, from + this.span);
  }

  reset() { this.show(0, this.whole); }
  changed() { this.listeners.forEach((act) => act()); }

  marks(many) {
    const found = roundMarks(this.from, this.to, many, 1);
    return this.byTime ? found : found.filter(Number.isInteger);
  }

  label(mark) {
    if (!this.byTime) return formatCount(mark);
    const step = this.span / 8;
    const seconds = mark / 1e9;
    // Marks close together need more digits than a duration has on its own.
    if (seconds === 0) return "0";
    const [unit, factor] = this.to >= 1e9 ? ["s", 1] : this.to >= 1e6 ? ["ms", 1e3] : ["µs", 1e6];
    const digits = Math.max(0, Math.ceil(-Math.log10((step / 1e9) * factor)));
    return `${(seconds * factor).toFixed(Math.min(digits, 6))} ${unit}`;
  }
}

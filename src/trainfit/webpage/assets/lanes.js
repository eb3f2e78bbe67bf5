// What runs when, one lane per queue: ops wider than a pixel as boxes, the rest as how busy each column is.

const LANE = { label: 16, bar: 22, gap: 8 };

class LanesPicture {
  constructor(canvas, axis) {
    this.canvas = canvas;
    this.axis = axis;
    this.lanes = [];
    this.inner = 1;
  }

  use(lanes) {
    this.lanes = lanes;
    this.canvas.style.height = `${lanes.length * (LANE.label + LANE.bar + LANE.gap)}px`;
  }

  xOf(value) { return GUTTER.left + ((value - this.axis.from) / this.axis.span) * this.inner; }
  valueAt(x) { return this.axis.from + ((x - GUTTER.left) / this.inner) * this.axis.span; }
  barTop(number) { return number * (LANE.label + LANE.bar + LANE.gap) + LANE.label; }

  draw() {
    const { canvas } = this;
    if (!canvas.clientWidth || !this.lanes.length) return;
    this.inner = Math.max(1, canvas.clientWidth - GUTTER.left - GUTTER.right);
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    context.font = "12px system-ui, sans-serif";
    this.colours = {};
    for (const name of ["forward", "backward", "optimizer", "recompute"]) this.colours[name] = colourOf(`--tf-p-${name}`);
    this.lanes.forEach((lane, number) => this.drawLane(context, lane, this.barTop(number)));
  }

  styleOf(op) {
    const { curve } = this.axis;
    return curve.recomputed[op] ? "recompute" : phaseOf(curve, op) || "forward";
  }

  drawLane(context, lane, top) {
    const { inner } = this;
    const columns = Math.ceil(inner);
    context.fillStyle = colourOf("--tf-soft");
    context.fillText(`${shortened(lane.label, 60)}: ${this.busyWords(lane)}`, GUTTER.left, top - 4);
    context.fillStyle = colourOf("--tf-band");
    context.fillRect(GUTTER.left, top, inner, LANE.bar);
    const covered = new Float32Array(columns);
    const styles = new Array(columns);
    const first = firstAbove(lane.ends, this.axis.from);
    for (let i = first; i < lane.ops.length && lane.starts[i] < this.axis.to; i += 1) {
      const from = Math.max(this.xOf(lane.starts[i]), GUTTER.left);
      const to = Math.min(this.xOf(lane.ends[i]), GUTTER.left + inner);
      if (to - from >= 2) this.drawBox(context, lane, i, from, to, top);
      else {
        const column = Math.min(columns - 1, Math.max(0, Math.floor(from - GUTTER.left)));
        if (!covered[column]) styles[column] = this.styleOf(lane.ops[i]);
        covered[column] += to - from;
      }
    }
    for (let column = 0; column < columns; column += 1) {
      if (!covered[column]) continue;
      context.globalAlpha = 0.15 + 0.85 * Math.min(1, covered[column]);
      context.fillStyle = this.colours[styles[column]];
      context.fillRect(GUTTER.left + column, top, 1, LANE.bar);
    }
    context.globalAlpha = 1;
  }

  drawBox(context, lane, i, from, to, top) {
    const op = lane.ops[i];
    context.fillStyle = this.colours[this.styleOf(op)];
    context.fillRect(from, top, Math.max(to - from - 0.5, 1), LANE.bar);
    const text = this.axis.curve.name(op);
    if (to - from > 44) {
      const room = Math.floor((to - from - 8) / 6.6);
      context.fillStyle = "#ffffff";
      context.fillText(shortened(text, room), from + 4, top + 15);
    }
  }

  busyWords(lane) {
    const share = this.busy(lane);
    if (share > 0 || !lane.ends.length) return `${formatShare(share)} busy`;
    // The host may be ahead by more than what is in view.
    return lane.ends[0] < 0 && lane.ends[lane.ends.length - 1] <= this.axis.from ? "has issued this before, ahead of the device" : "idle";
  }

  busy(lane) {
    let sum = 0;
    const { from, to } = this.axis;
    for (let i = firstAbove(lane.ends, from); i < lane.ops.length && lane.starts[i] < to; i += 1) {
      sum += Math.min(lane.ends[i], to) - Math.max(lane.starts[i], from);
    }
    return Math.min(1, sum / (to - from));
  }

  // The op under a point: {lane, op, start, end}, or null.
  at(x, y) {
    const number = Math.floor(y / (LANE.label + LANE.bar + LANE.gap));
    const lane = this.lanes[number];
    if (!lane || x < GUTTER.left) return null;
    const half = this.axis.span / this.inner;
    const value = this.valueAt(x);
    const i = firstAbove(lane.ends, value - half);
    if (i >= lane.ops.length || lane.starts[i] > value + half) return null;
    return { lane, op: lane.ops[i], start: lane.starts[i], end: lane.ends[i] };
  }
}

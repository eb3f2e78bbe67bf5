// Memory over the step on a canvas: stacked areas, of every column of pixels the op that needs the most.

const GUTTER = { left: 68, right: 12, top: 24, bottom: 26 };
const BESIDES = 1.8; // lines further above the peak than this factor would flatten it, and are only named

class MemoryPicture {
  constructor(canvas, axis, lines) {
    this.canvas = canvas;
    this.axis = axis;
    this.lines = lines;
    this.outline = null;
    this.hovered = -1;
    this.selection = null;
    this.picked = new Int32Array(0);
    this.measure();
  }

  // Asking the browser for a size is slow where thousands of places depend on it: once per drawing.
  measure() {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
  }

  get inner() { return Math.max(1, this.width - GUTTER.left - GUTTER.right); }
  xOf(value) { return GUTTER.left + ((value - this.axis.from) / this.axis.span) * this.inner; }
  valueAt(x) { return this.axis.from + ((x - GUTTER.left) / this.inner) * this.axis.span; }
  yOf(size) { return this.height - GUTTER.bottom - (size / this.top) * (this.height - GUTTER.top - GUTTER.bottom); }

  get top() {
    const peak = Math.max(this.axis.curve.peakBytes, this.outlinePeak || 0, 1);
    const near = this.lines.map((line) => line.bytes).filter((size) => size <= BESIDES * peak);
    return Math.max(peak, ...near) * 1.06;
  }

  // The op that stands for a column of pixels: of those in it the one with the most bytes.
  opAtPixel(x) {
    const column = Math.round(x - GUTTER.left);
    const [first, last] = this.axis.opsIn(this.valueAt(GUTTER.left + column), this.valueAt(GUTTER.left + column + 1));
    return this.highest(first, last);
  }

  highest(first, last) {
    const { totals } = this.axis.curve;
    let found = first;
    for (let op = first + 1; op <= last; op += 1) if (totals[op] > totals[found]) found = op;
    return found;
  }

  draw() {
    this.measure();
    if (!this.width || !this.axis.curve.count) return;
    const ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = "12px system-ui, sans-serif";
    this.colours = {
      text: colourOf("--tf-text"), soft: colourOf("--tf-soft"), grid: colourOf("--tf-line"),
      surface: colourOf("--tf-surface"), band: colourOf("--tf-band"), accent: colourOf("--tf-accent"),
    };
    this.drawPhases(context);
    this.drawGrid(context);
    this.drawAreas(context);
    this.drawLines(context);
    this.drawPeak(context);
    this.drawPointer(context);
  }

  drawPhases(context) {
    const top = GUTTER.top;
    const height = this.height - GUTTER.top - GUTTER.bottom;
    let labelled = -Infinity;
    this.axis.curve.phases.forEach((phase) => {
      const from = Math.max(this.xOf(this.axis.start(phase.first)), GUTTER.left);
      const to = Math.min(this.xOf(this.axis.end(phase.last - 1)), this.width - GUTTER.right);
      if (to <= from) return;
      if (phase.name === "backward") {
        context.fillStyle = this.colours.band;
        context.fillRect(from, top, to - from, height);
      }
      context.fillStyle = this.colours.soft;
      const wide = context.measureText(phase.name).width;
      const at = (from + to) / 2 - wide / 2;
      if (to - from > wide + 8 && at > labelled) {
        context.fillText(phase.name, at, top - 9);
        labelled = at + wide + 8;
      }
      context.fillStyle = this.colours.grid;
      if (from > GUTTER.left) context.fillRect(Math.round(from), top - 6, 1, height + 6);
    });
  }

  drawGrid(context) {
    context.textAlign = "right";
    for (const mark of byteMarks(this.top / 1.06, 8)) {
      const y = Math.round(this.yOf(mark)) + 0.5;
      context.fillStyle = this.colours.grid;
      context.fillRect(GUTTER.left, y, this.inner, 1);
      context.fillStyle = this.colours.soft;
      context.fillText(formatMark(mark), GUTTER.left - 8, y + 4);
    }
    context.textAlign = "left";
    context.fillStyle = this.colours.soft;
    context.fillText(this.axis.name, 2, this.height - 7);
    // Labels keep a distance from each other and from the axis's name.
    let taken = 2 + context.measureText(this.axis.name).width + 6;
    for (const mark of this.axis.marks(Math.max(2, this.inner / 110))) {
      const x = this.xOf(mark);
      context.fillStyle = this.colours.grid;
      context.fillRect(Math.round(x), this.height - GUTTER.bottom, 1, 5);
      context.fillStyle = this.colours.soft;
      const wide = context.measureText(this.axis.label(mark)).width;
      const at = Math.min(x - wide / 2, this.width - wide - 1);
      if (at < taken) continue;
      context.fillText(this.axis.label(mark), at, this.height - 7);
      taken = at + wide + 10;
    }
  }

  // Fill `picked` with the op of each column of pixels, and the bytes of the outline there.
  pick() {
    const columns = Math.floor(this.inner);
    if (this.picked.length !== columns) {
      this.picked = new Int32Array(columns);
      this.outlined = new Float64Array(columns);
    }
    for (let column = 0; column < columns; column += 1) {
      const [first, last] = this.axis.opsIn(this.valueAt(GUTTER.left + column), this.valueAt(GUTTER.left + column + 1));
      this.picked[column] = this.highest(first, last);
      if (this.outline) {
        let most = 0;
        for (let op = first; op <= last; op += 1) if (this.outline[op] > most) most = this.outline[op];
        this.outlined[column] = most;
      }
    }
    return columns;
  }

  // Rectangles at whole pixels, one for each stretch of columns that are alike: much faster than areas of any shape.
  drawAreas(context) {
    const columns = this.pick();
    const base = this.height - GUTTER.bottom;
    const scale = (base - GUTTER.top) / this.top;
    const ratio = window.devicePixelRatio || 1;
    const whole = (y) => Math.round(y * ratio) / ratio;
    const low = new Float64Array(columns).fill(whole(base));
    const sums = new Float64Array(columns);
    for (const { name, values } of this.axis.curve.categories) {
      context.fillStyle = colourOf(`--tf-c-${name}`) || this.colours.accent;
      let first = 0;
      let [top, bottom] = [0, 0];
      for (let i = 0; i <= columns; i += 1) {
        let [high, under] = [NaN, NaN];
        if (i < columns) {
          sums[i] += values[this.picked[i]];
          high = whole(base - sums[i] * scale);
          // A line of background between two categories, where they are thick enough.
          under = low[i] - high > 3 && low[i] < base - 1 ? low[i] - 1 : low[i];
          low[i] = high;
        }
        if (i === 0) [top, bottom] = [high, under];
        else if (high !== top || under !== bottom) {
          if (bottom > top) context.fillRect(GUTTER.left + first, top, i - first, bottom - top);
          first = i;
          [top, bottom] = [high, under];
        }
      }
    }
    if (this.outline) this.drawOutline(context, columns, base, scale);
  }

  drawOutline(context, columns, base, scale) {
    const heights = Float64Array.from(this.outlined, (size) => base - size * scale);
    context.beginPath();
    this.edge(context, heights, columns);
    context.strokeStyle = this.colours.text;
    context.lineWidth = 1.5;
    context.stroke();
  }

  // A line that is constant within a column; points that change nothing are left out.
  edge(context, heights, columns) {
    let last = NaN;
    for (let i = 0; i < columns; i += 1) {
      const y = heights[i];
      if (i === 0) context.moveTo(GUTTER.left, y);
      else if (y !== last) {
        context.lineTo(GUTTER.left + i, last);
        context.lineTo(GUTTER.left + i, y);
      }
      last = y;
    }
    context.lineTo(GUTTER.left + columns, last);
  }

  drawLines(context) {
    const taken = [];
    this.labels = []; // where they stand, for the peak's label to keep off
    // The labels keep to the side where the peak is not.
    const { curve } = this.axis;
    const isRight = curve.peak >= 0 && this.xOf(this.axis.start(curve.peak)) < GUTTER.left + this.inner / 2;
    this.lines.filter((line) => line.bytes <= this.top).forEach((line) => {
      const y = Math.round(this.yOf(line.bytes)) + 0.5;
      context.setLineDash(line.style === "reserved" ? [2, 3] : [7, 4]);
      context.strokeStyle = colourOf(`--tf-line-${line.style}`) || this.colours.text;
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(GUTTER.left, y);
      context.lineTo(this.width - GUTTER.right, y);
      context.stroke();
      context.setLineDash([]);
      const room = this.inner - 16;
      let text = line.label;
      while (context.measureText(text).width > room && text.length > 8) text = `${text.slice(0, -2)}…`.replace("……", "…");
      const wide = context.measureText(text).width + 8;
      let at = y > GUTTER.top + 16 ? y - 6 : y + 14;
      while (taken.some((other) => Math.abs(other - at) < 16)) at += 17;
      taken.push(at);
      context.fillStyle = this.colours.surface;
      context.globalAlpha = 0.85;
      const left = isRight ? this.width - GUTTER.right - wide - 6 : GUTTER.left + 6;
      context.fillRect(left, at - 12, wide, 16);
      this.labels.push([left, at - 12, wide, 16]);
      context.globalAlpha = 1;
      context.fillStyle = this.colours.text;
      context.fillText(text, left + 4, at);
    });
  }

  drawPeak(context) {
    const { curve } = this.axis;
    if (curve.peak < 0) return;
    const x = this.xOf((this.axis.start(curve.peak) + this.axis.end(curve.peak)) / 2);
    if (x < GUTTER.left - 1 || x > this.width - GUTTER.right + 1) return;
    const y = this.yOf(curve.peakBytes);
    context.fillStyle = this.colours.text;
    context.strokeStyle = this.colours.surface;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, y, 5, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    const text = `peak ${formatBytes(curve.peakBytes)}`;
    context.font = "600 12px system-ui, sans-serif";
    const wide = context.measureText(text).width;
    const isLeft = x + wide + 24 > this.width - GUTTER.right;
    const at = isLeft ? x - wide - 14 : x + 12;
    let middle = y;
    while (this.labels.some((label) => overlap([at - 4, middle - 9, wide + 8, 18], label)) && middle < this.height / 2) middle += 6;
    context.globalAlpha = 0.85;
    context.fillStyle = this.colours.surface;
    context.fillRect(at - 4, middle - 9, wide + 8, 18);
    context.globalAlpha = 1;
    context.fillStyle = this.colours.text;
    context.fillText(text, at, middle + 4);
    context.font = "12px system-ui, sans-serif";
  }

  drawPointer(context) {
    if (this.selection) {
      const [from, to] = this.selection;
      context.fillStyle = this.colours.accent;
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(from, to), GUTTER.top, Math.abs(to - from), this.height - GUTTER.top - GUTTER.bottom);
      context.globalAlpha = 1;
    }
    if (this.hovered < 0) return;
    const x = this.xOf((this.axis.start(this.hovered) + this.axis.end(this.hovered)) / 2);
    if (x < GUTTER.left || x > this.width - GUTTER.right) return;
    context.fillStyle = this.colours.text;
    context.fillRect(Math.round(x), GUTTER.top, 1, this.height - GUTTER.top - GUTTER.bottom);
  }
}

// The memory picture with what steers it: buttons, mouse, fingers, keys; what an op is; the same as a table.

const KEYS = "Arrow keys: op by op (with Shift, further). Plus and minus: zoom. Page Up and Page Down: move. "
  + "P: the peak. 0: the whole step.";
const STRETCHES = 60;

function memoryPart(part, strings) {
  const panel = new MemoryPanel(part, strings);
  return panel.box;
}

class MemoryPanel {
  constructor(part, strings) {
    this.curves = part.curves.map((raw) => readCurve(raw, strings));
    this.runs = part.aligned || null;
    this.lanesOf = (part.lanes || []).map((lanes) => lanes.map(readLane));
    this.chosen = 0;
    this.axis = new StepAxis(this.curves[0], this.lanesOf.length > 0);
    this.build(part);
    this.axis.listeners.push(() => this.redraw());
    this.useCurve(0);
    this.listen();
    onRedraw(() => this.drawNow());
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  get curve() { return this.curves[this.chosen]; }

  build(part) {
    const help = `tf-keys-${Math.random().toString(36).slice(2)}`;
    this.canvas = element("canvas", {
      class: "tf-memory", tabindex: "0", role: "application", "aria-describedby": help,
      "aria-label": "Memory over the step. Use the arrow keys to read it op by op.",
    });
    this.laneCanvas = element("canvas", { class: "tf-lanes", role: "img", "aria-label": "What runs when on each queue" });
    this.picture = new MemoryPicture(this.canvas, this.axis, part.lines);
    this.lanes = new LanesPicture(this.laneCanvas, this.axis);
    this.tip = element("div", { class: "tf-tip", hidden: true });
    this.said = element("p", { class: "tf-hidden", "aria-live": "polite" });
    this.legend = element("ul", { class: "tf-legend" });
    this.hint = element("p", { class: "tf-hint" });
    this.tableBox = element("details", {}, element("summary", {}, "The same as a table"));
    this.tableBox.addEventListener("toggle", () => this.fillTable(), { once: true });
    this.box = element("div", { class: "tf-panel" },
      element("div", { class: "tf-tools" }, ...this.choices(), element("span", { class: "tf-space" }), ...this.zoomButtons()),
      element("div", { class: "tf-stage" }, this.canvas, this.laneCanvas, this.tip),
      this.legend, this.hint, element("p", { class: "tf-hidden", id: help }, KEYS), this.said, this.tableBox);
  }

  choices() {
    const found = [];
    if (this.curves.length > 1) {
      const options = this.curves.map((curve, value) => ({ label: curve.label, value }));
      found.push(choice("Which step", options, 0, (value) => this.useCurve(value)));
    }
    if (this.curves.some((curve) => curve.ends)) {
      const options = [{ label: "by time", value: true }, { label: "by op", value: false }];
      found.push(choice("Horizontal axis", options, this.axis.byTime, (byTime) => this.useUnit(byTime)));
    }
    return found;
  }

  zoomButtons() {
    return [
      button("−", () => this.axis.zoom(2), { "aria-label": "Zoom out" }),
      button("+", () => this.axis.zoom(0.5), { "aria-label": "Zoom in" }),
      button("Peak", () => this.showPeak(), { "aria-label": "Zoom to the peak" }),
      button("Whole step", () => this.axis.reset()),
    ];
  }

  useUnit(byTime) {
    this.axis.use(this.curve, byTime);
    this.showLanes();
    this.redraw();
  }

  useCurve(number) {
    const byTime = this.axis.byTime;
    this.chosen = number;
    this.axis.use(this.curve, byTime);
    const other = this.curves[1 - number];
    this.picture.outline = other ? sameOps(this.curve, other, this.runs, number === 0) : null;
    this.picture.outlinePeak = other ? other.peakBytes : 0;
    this.picture.hovered = -1;
    this.tip.hidden = true;
    this.showLegend(other);
    this.showLanes();
    this.redraw();
  }

  showLegend(other) {
    const rows = this.curve.categories.map(({ name }) =>
      element("li", {}, element("i", { class: `tf-c-${name}` }), name.replace("_", " ")));
    if (other) rows.push(element("li", {}, element("i", { class: "tf-outline" }), other.label));
    if (this.lanesOf.length) {
      for (const name of ["forward", "backward", "optimizer", ...(this.curve.recomputed.includes(1) ? ["recompute"] : [])]) {
        rows.push(element("li", { class: "tf-of-lanes" }, element("i", { class: `tf-p-${name}` }), `${name} (lanes)`));
      }
    }
    this.legend.replaceChildren(...rows);
  }

  showLanes() {
    const lanes = this.axis.byTime ? this.lanesOf[this.chosen] || [] : [];
    this.lanes.use(lanes);
    this.laneCanvas.hidden = !lanes.length;
    const queues = this.lanesOf.length && !this.axis.byTime ? " Choose time to see the queues." : "";
    const far = this.picture.lines.filter((line) => line.bytes > this.picture.top).map((line) => ` ${line.label}: above the picture.`).join("");
    const how = matchMedia("(pointer: coarse)").matches ? "Tap to see what an op is; two fingers zoom."
      : "Drag to zoom, double-click for the whole step; with the picture focused, the wheel zooms.";
    this.hint.replaceChildren(far.trim() ? `${far.trim()} ` : "", element("span", { class: "tf-how" }, `${how}${queues}`));
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.drawNow(); });
  }

  drawNow() {
    this.picture.draw();
    if (!this.laneCanvas.hidden) this.lanes.draw();
  }

  showPeak() {
    const { peak } = this.curve;
    if (peak < 0) return;
    const middle = this.axis.start(peak);
    const span = this.axis.whole / 40;
    this.axis.show(middle - span, middle + span);
    this.point(peak, true);
  }

  // Point at an op: the cross hair, what the op is, and for those who do not see it a sentence.
  point(op, aloud) {
    this.picture.hovered = op;
    const x = this.picture.xOf((this.axis.start(op) + this.axis.end(op)) / 2);
    this.tip.replaceChildren(...this.describe(op));
    this.place(x, GUTTER.top + 8);
    if (aloud) {
      const { curve } = this;
      this.said.textContent = `Op ${op}, ${shortened(curve.name(op), 80)}, ${phaseOf(curve, op)}, ${shortened(curve.module(op), 80)}: ${formatBytes(curve.totals[op])}.`;
    }
    this.redraw();
  }

  place(x, y) {
    this.tip.hidden = false;
    const room = this.box.clientWidth;
    const wide = this.tip.offsetWidth;
    const left = x + 16 + wide < room ? x + 16 : Math.max(4, Math.min(x - wide - 16, room - wide - 4));
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(y)}px)`;
  }

  describe(op) {
    const { curve, axis } = this;
    const outline = this.picture.outline;
    const facts = [`op ${formatCount(op)} of ${formatCount(curve.count)}`, phaseOf(curve, op), curve.recomputed[op] ? "recomputed" : ""];
    const rows = [...curve.categories].reverse().filter(({ values }) => values[op]).map(({ name, values }) =>
      element("tr", {}, element("td", {}, element("i", { class: `tf-c-${name}` }), name.replace("_", " ")), element("td", {}, formatBytes(values[op]))));
    if (outline) rows.push(element("tr", {}, element("td", {}, element("i", { class: "tf-outline" }), this.curves[1 - this.chosen].label), element("td", {}, formatBytes(outline[op]))));
    return [
      element("b", {}, named(curve.name(op), 60)),
      element("div", {}, facts.filter(Boolean).join(" · ")),
      curve.module(op) ? element("div", {}, named(curve.module(op), 70)) : element("div", {}, "outside of modules"),
      curve.source(op) ? element("div", {}, named(curve.source(op), 90)) : null,
      axis.curve.ends ? element("div", {}, `at ${formatSeconds((op > 0 ? curve.ends[op - 1] : 0) / 1e9)} of the step`) : null,
      element("table", {}, element("tr", {}, element("th", {}, "in use, predicted"), element("th", {}, formatBytes(curve.totals[op]))), ...rows),
    ].filter(Boolean);
  }

  leave() {
    this.picture.hovered = -1;
    this.tip.hidden = true;
    this.redraw();
  }

  listen() {
    const { canvas } = this;
    this.fingers = new Map();
    for (const target of [canvas, this.laneCanvas]) {
      target.addEventListener("pointerdown", (event) => this.press(event));
      target.addEventListener("pointermove", (event) => this.move(event));
      target.addEventListener("pointerup", (event) => this.release(event));
      target.addEventListener("pointercancel", (event) => { this.fingers.delete(event.pointerId); this.picture.selection = null; });
      // A finger leaves when it is lifted; what it has tapped at stays until the next tap.
      target.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !this.fingers.size) this.leave(); });
      target.addEventListener("dblclick", () => this.axis.reset());
      target.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.leave());
  }

  press(event) {
    this.canvas.focus({ preventScroll: true });
    event.target.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, { from: event.offsetX, now: event.offsetX });
    if (event.pointerType === "mouse" && !event.shiftKey) this.picture.selection = [event.offsetX, event.offsetX];
  }

  move(event) {
    const finger = this.fingers.get(event.pointerId);
    if (!finger) return this.hover(event);
    const before = [...this.fingers.values()].map((one) => one.now);
    const by = event.offsetX - finger.now;
    finger.now = event.offsetX;
    if (this.fingers.size === 2) return this.pinch(before, [...this.fingers.values()].map((one) => one.now));
    if (this.picture.selection) {
      this.picture.selection[1] = Math.max(GUTTER.left, Math.min(event.offsetX, this.picture.width - GUTTER.right));
      return this.redraw();
    }
    return this.axis.move(-by / this.picture.inner);
  }

  pinch(before, now) {
    const distance = (pair) => Math.max(Math.abs(pair[0] - pair[1]), 10);
    const around = this.picture.valueAt((now[0] + now[1]) / 2);
    this.axis.zoom(distance(before) / distance(now), around);
  }

  release(event) {
    const finger = this.fingers.get(event.pointerId);
    this.fingers.delete(event.pointerId);
    const { selection } = this.picture;
    this.picture.selection = null;
    if (selection && Math.abs(selection[1] - selection[0]) > 5) {
      const ends = selection.map((x) => this.picture.valueAt(x)).sort((one, other) => one - other);
      this.axis.show(ends[0], ends[1]);
    } else if (finger && Math.abs(finger.from - finger.now) < 6) this.hover(event);
    this.redraw();
  }

  hover(event) {
    if (!this.curve.count) return undefined;
    if (event.target === this.laneCanvas) return this.hoverLane(event);
    const inside = event.offsetX >= GUTTER.left && event.offsetX <= this.picture.width - GUTTER.right;
    return inside ? this.point(this.picture.opAtPixel(event.offsetX), false) : this.leave();
  }

  hoverLane(event) {
    const found = this.lanes.at(event.offsetX, event.offsetY);
    if (!found) return this.leave();
    const { curve } = this;
    const { op } = found;
    this.picture.hovered = op;
    const facts = [phaseOf(curve, op), curve.recomputed[op] ? "recomputed" : "", shortened(found.lane.label, 60)];
    this.tip.replaceChildren(
      element("b", {}, named(curve.name(op), 60)),
      element("div", {}, facts.filter(Boolean).join(" · ")),
      element("div", {}, curve.module(op) ? named(curve.module(op), 70) : "outside of modules"),
      element("div", {}, `${formatSeconds((found.end - found.start) / 1e9)} from ${formatSeconds(found.start / 1e9)} on, predicted`));
    this.place(event.offsetX, this.canvas.clientHeight + event.offsetY - 90);
    return this.redraw();
  }

  wheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const asked = event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
    if (!asked || (sideways && this.axis.isWhole)) return;
    event.preventDefault();
    if (sideways) this.axis.move((event.deltaX || event.deltaY) / 800);
    else this.axis.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), this.picture.valueAt(event.offsetX));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { axis } = this;
    const acts = {
      ArrowLeft: () => this.step(-1, event.shiftKey), ArrowRight: () => this.step(1, event.shiftKey),
      PageUp: () => axis.move(-0.5), PageDown: () => axis.move(0.5),
      "+": () => this.zoomHere(0.5), "=": () => this.zoomHere(0.5), "-": () => this.zoomHere(2),
      0: () => axis.reset(), Home: () => this.point(0, true), End: () => this.point(this.curve.count - 1, true),
      p: () => this.showPeak(), P: () => this.showPeak(), Escape: () => this.leave(),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  zoomHere(factor) {
    const { hovered } = this.picture;
    this.axis.zoom(factor, hovered >= 0 ? this.axis.start(hovered) : undefined);
    if (hovered >= 0) this.point(hovered, false);
  }

  step(by, far) {
    const { curve, axis } = this;
    if (!curve.count) return;
    const start = this.picture.hovered >= 0 ? this.picture.hovered : Math.max(curve.peak, 0) - by;
    const stride = far ? Math.max(1, Math.round((axis.opAt(axis.to) - axis.opAt(axis.from)) / 20)) : 1;
    const op = Math.max(0, Math.min(curve.count - 1, start + by * stride));
    if (axis.start(op) < axis.from || axis.end(op) > axis.to) axis.show(axis.start(op) - axis.span / 2, axis.start(op) + axis.span / 2);
    this.point(op, true);
  }

  // The highest op of each of some dozens of stretches: the picture in numbers.
  fillTable() {
    const { curve } = this;
    const stretches = Math.min(STRETCHES, curve.count);
    const ops = Array.from({ length: stretches }, (_, i) =>
      this.picture.highest(Math.floor((i * curve.count) / stretches), Math.floor(((i + 1) * curve.count) / stretches) - 1));
    const text = (name, of) => ({ name, kind: "text", values: ops.map(of) });
    const columns = [
      { name: "op", kind: "count", values: ops }, text("name", curve.name), text("module", curve.module),
      text("phase", (op) => phaseOf(curve, op)), { name: "in use", kind: "bytes", values: ops.map((op) => curve.totals[op]) },
      ...curve.categories.map(({ name, values }) => ({ name: name.replace("_", " "), kind: "bytes", values: ops.map((op) => values[op]) })),
    ];
    const caption = `${curve.label}: the highest op of each of ${stretches} stretches (predicted)`;
    this.tableBox.append(tablePart({ caption, columns, sorted: null, name: "stretches" }));
  }
}

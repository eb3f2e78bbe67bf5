// Memory against time: plans as a line of points, the usual ways as labelled ones, a slider over the plans.

const FAR = 1.6;
const LETTER = 6.9; // pixels: about as wide as a letter of a label

function tradeOffPart(part) {
  return new TradeOff(part).box;
}

class TradeOff {
  constructor(part) {
    this.part = part;
    this.chosen = part.chosen;
    this.stage = element("div", { class: "tf-trade" });
    this.about = element("div", { class: "tf-about", "aria-live": "polite" });
    const parts = [this.stage];
    if (part.points.length > 1) parts.push(this.slider());
    this.box = element("div", { class: "tf-panel" }, ...parts, this.about);
    this.show();
    new ResizeObserver(() => { if (this.stage.clientWidth !== this.wide) this.show(); }).observe(this.stage);
  }

  slider() {
    this.range = element("input", {
      type: "range", min: "0", max: String(this.part.points.length - 1), step: "1", value: String(this.chosen), id: "tf-plan-slider",
    });
    this.range.addEventListener("input", () => this.choose(Number(this.range.value)));
    return element("div", { class: "tf-slider" }, element("label", { for: "tf-plan-slider" }, "Less or more memory"), this.range);
  }

  choose(number) {
    this.chosen = number;
    if (this.range) this.range.value = String(number);
    this.show();
  }

  show() {
    this.wide = Math.max(this.stage.clientWidth, 280);
    this.high = this.wide < 520 ? 300 : 360;
    const { points, ways, lines } = this.part;
    const all = [...points, ...ways];
    // A line far from all points would press them together: it is named at the edge instead.
    const most = Math.max(...all.map((one) => one.memory));
    const near = lines.filter((line) => line.bytes <= FAR * most);
    this.x = scale([...all.map((one) => one.memory), ...near.map((line) => line.bytes)], 64, this.wide - 24);
    this.y = scale(all.map((one) => one.seconds), this.high - 44, 22);
    this.boxes = all.map((one) => [this.x(one.memory) - 7, this.y(one.seconds) - 7, 14, 14]);
    points.slice(1).forEach((point, number) => this.addStair(points[number], point));
    const label = `Memory against time of a step: ${points.length} plans and ${ways.length} usual ways, predicted`;
    const picture = drawing("svg", { viewBox: `0 0 ${this.wide} ${this.high}`, width: this.wide, role: "img", "aria-label": label });
    this.drawAxes(picture);
    near.forEach((line) => this.drawLine(picture, line));
    if (points.length > 1) {
      picture.append(drawing("polyline", { class: "tf-frontier", points: this.stairs(points) }));
    }
    ways.forEach((way) => this.drawWay(picture, way));
    points.forEach((point, number) => this.drawPoint(picture, point, number));
    this.stage.replaceChildren(...[picture, this.far(lines.filter((line) => !near.includes(line)))].filter(Boolean));
    this.describe();
  }

  // A plan is the fastest for every memory from its own up to the next plan's.
  stairs(points) {
    return points.flatMap((point, number) => {
      const [x, y] = [this.x(point.memory), this.y(point.seconds)];
      return number ? [`${x},${this.y(points[number - 1].seconds)}`, `${x},${y}`] : [`${x},${y}`];
    }).join(" ");
  }

  // Labels keep off the line, too.
  addStair(from, to) {
    const [x1, x2] = [this.x(from.memory), this.x(to.memory)];
    const [y1, y2] = [this.y(from.seconds), this.y(to.seconds)];
    this.boxes.push([x1, y1 - 2, x2 - x1, 4], [x2 - 2, Math.min(y1, y2), 4, Math.abs(y2 - y1)]);
  }

  drawAxes(picture) {
    const { wide, high } = this;
    let taken = 0;
    for (const mark of roundMarks(this.x.from, this.x.to, Math.max(3, wide / 150), unitOf(this.x.to))) {
      const x = this.x(mark);
      const half = (formatMark(mark).length * LETTER) / 2;
      picture.append(drawing("line", { class: "tf-grid", x1: x, x2: x, y1: 16, y2: high - 40 }));
      if (x - half < taken || x + half > wide) continue;
      picture.append(drawing("text", { x, y: high - 24, "text-anchor": "middle" }, formatMark(mark)));
      taken = x + half + LETTER;
    }
    for (const mark of roundMarks(this.y.from, this.y.to, 5, 1)) {
      const y = this.y(mark);
      picture.append(drawing("line", { class: "tf-grid", x1: 64, x2: wide - 24, y1: y, y2: y }));
      picture.append(drawing("text", { x: 58, y: y + 4, "text-anchor": "end" }, formatSeconds(mark)));
    }
    picture.append(drawing("text", { class: "tf-axis", x: wide - 24, y: high - 6, "text-anchor": "end" }, "memory that the step runs in, predicted"));
    picture.append(drawing("text", { class: "tf-axis", x: 4, y: 12 }, "time of a step, predicted"));
  }

  drawLine(picture, line) {
    const x = this.x(line.bytes);
    picture.append(drawing("line", { class: `tf-mark tf-line-${line.style}`, x1: x, x2: x, y1: 16, y2: this.high - 40 }));
    this.place(picture, `${line.label} ${formatBytes(line.bytes)}`, x, 40, 6);
    this.boxes.push([x - 1, 16, 2, this.high - 56]);
  }

  // Lines beyond the picture's edge are named below it.
  far(lines) {
    const names = lines.map((line) => `${line.label} ${formatBytes(line.bytes)}`);
    return names.length ? element("p", { class: "tf-hint" }, `Further right: ${names.join("; ")}.`) : null;
  }

  drawWay(picture, way) {
    const [x, y] = [this.x(way.memory), this.y(way.seconds)];
    const said = `${way.name}: ${formatBytes(way.memory)}, ${formatSeconds(way.seconds)} per step, predicted`;
    picture.append(drawing("path", { class: "tf-way", d: `M${x},${y - 7}l7,7l-7,7l-7,-7z` }, drawing("title", {}, said)));
    this.place(picture, way.name, x, y, 12);
  }

  drawPoint(picture, point, number) {
    const isChosen = number === this.chosen;
    const said = `plan: ${formatBytes(point.memory)}, ${formatSeconds(point.seconds)} per step, predicted`;
    const dot = drawing("circle", { class: isChosen ? "tf-point tf-chosen" : "tf-point", cx: this.x(point.memory), cy: this.y(point.seconds), r: isChosen ? 8 : 5 }, drawing("title", {}, said));
    dot.addEventListener("click", () => this.choose(number));
    picture.append(dot);
    if (isChosen) this.place(picture, this.part.points.length > 1 ? "chosen plan" : "this plan", this.x(point.memory), this.y(point.seconds), 12, "tf-strong");
  }

  // Write a label beside a point where it covers nothing that is there already.
  place(picture, text, x, y, off, style = "") {
    const wide = text.length * LETTER * (style ? 1.12 : 1); // bold letters are wider
    const spots = [[off, 4], [-off - wide, 4], [-wide / 2, -off - 4], [-wide / 2, off + 12], [off, -14], [off, 22], [-off - wide, -14], [-off - wide, 22], [off, 40], [-off - wide, 40], [off, -32], [-off - wide, -32], [-wide / 2, -off - 24], [-wide / 2, off + 30], [off, -50], [off, 58]];
    const free = spots.find(([dx, dy]) => {
      const box = [x + dx, y + dy - 12, wide, 15];
      const inside = box[0] >= 62 && box[0] + wide <= this.wide && box[1] >= 14 && box[1] + 15 <= this.high - 40;
      return inside && !this.boxes.some((other) => overlap(box, other));
    });
    if (!free) return; // the point says its name when pointed at, and the table has it
    this.boxes.push([x + free[0], y + free[1] - 12, wide, 15]);
    picture.append(drawing("text", { class: `tf-label ${style}`, x: x + free[0], y: y + free[1] }, text));
  }

  // What a plan adds besides recomputing: with short ops that is most of it.
  waits(point) { return point.waiting ? `; ${point.waiting}` : ""; }

  describe() {
    const { points } = this.part;
    const point = points[this.chosen];
    const added = point.added === null || point.added === undefined ? "" : `, ${formatAdded(point.added)}`;
    const which = points.length > 1 ? `Plan ${this.chosen + 1} of ${points.length}: runs` : "This plan runs";
    const head = element("p", {}, element("b", {}, `${which} in ${formatBytes(point.memory)}`),
      `, ${point.verdict}; peak ${formatBytes(point.peak)}, ${formatSeconds(point.seconds)} per step${added}${this.waits(point)} (predicted).`);
    if (this.range) this.range.setAttribute("aria-valuetext", `${formatBytes(point.memory)}, ${formatSeconds(point.seconds)} per step`);
    if (!point.groups.length) {
      this.about.replaceChildren(head, element("p", {}, "It recomputes nothing."));
      return;
    }
    const values = (name) => point.groups.map((group) => group[name]);
    const columns = [
      { name: "checkpointed", kind: "text", values: values("label") }, { name: "calls", kind: "count", values: values("calls") },
      { name: "recomputes for", kind: "seconds", values: values("seconds") }, { name: "keeps", kind: "bytes", values: values("kept") },
      { name: "operators that run again", kind: "text", values: values("recomputes") },
    ];
    if (points.length === 1) this.about.replaceChildren(head);
    else this.about.replaceChildren(head, tablePart({ caption: "What this plan recomputes (predicted)", columns, sorted: null, name: "recomputes" }));
  }
}

const unitOf = (largest) => 1024 ** Math.min(Math.floor(Math.log2(Math.max(largest, 1)) / 10), 5);

function scale(values, low, high) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = (most - least) * 0.08 || most * 0.1 || 1;
  const from = Math.max(0, least - room);
  const to = most + room;
  const place = (value) => low + ((value - from) / (to - from)) * (high - low);
  return Object.assign(place, { from, to });
}

// The modules as areas: what each holds at the peak, or how long it takes. Choosing one opens it.

const MOST_TILES = 60;
const LEAST_TILE = 3; // pixels: what is smaller is named below the picture
const LEAST_INNER = 3;
const DEEPEST = 4;
const OPENED = 0.2; // of a tile: what is larger is shown by its parts

function treemapPart(part, strings) {
  return new Treemap(part, strings).box;
}

class Treemap {
  constructor(part, strings) {
    this.part = part;
    this.root = part.operators ? this.readOperators(part) : this.readTree(part, strings);
    this.measure = part.operators ? "time" : "memory";
    this.path = [this.root];
    this.area = element("div", { class: "tf-treemap", role: "group", "aria-label": part.operators ? "Operators by time" : "Modules by size" });
    this.crumbs = element("nav", { class: "tf-crumbs", "aria-label": "Where in the model" });
    this.about = element("p", { class: "tf-hint", "aria-live": "polite" });
    const options = part.operators ? [] : [{ label: "memory at the peak", value: "memory" }];
    if (part.forward) options.push({ label: "time", value: "time" });
    const measures = options.length > 1 ? choice("What areas show", options, "memory", (value) => { this.measure = value; this.show(); }) : null;
    this.legend = element("ul", { class: "tf-legend" });
    this.box = element("div", { class: "tf-panel" }, element("div", { class: "tf-tools" }, this.crumbs, element("span", { class: "tf-space" }), measures), this.area, this.legend, this.about);
    this.area.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => { if (this.area.clientWidth !== this.wide) this.show(); }).observe(this.area);
  }

  readTree(part, strings) {
    const nodes = part.names.map((name, i) => ({
      name: strings[name], className: strings[part.classes[i]], children: [], own: this.own(part.owned[i], part.categories),
      forward: part.forward ? part.forward[i] : 0, backward: part.backward ? part.backward[i] : 0,
    }));
    const root = { name: "the step", className: "", children: [], own: {}, forward: 0, backward: 0 };
    nodes.forEach((node, i) => {
      const parent = part.parents[i] >= 0 ? nodes[part.parents[i]] : root;
      node.short = parent !== root && node.name.startsWith(`${parent.name}.`) ? node.name.slice(parent.name.length + 1) : node.name;
      parent.children.push(node);
    });
    Object.entries(this.own(part.outside, part.categories)).forEach(([category, size]) => {
      const label = `${category.replace("_", " ")}, outside of modules`;
      root.children.push({ name: label, short: label, className: "", children: [], own: { [category]: size }, forward: 0, backward: 0, isOutside: true });
    });
    this.sum(root);
    return root;
  }

  // Operators have nothing inside: one level, coloured by what limits each.
  readOperators(part) {
    const children = part.operators.map(([name, seconds, bound]) =>
      ({ name, short: name, className: "", children: [], own: {}, memory: {}, time: { [bound]: seconds }, isOutside: true }));
    const root = { name: "all operators", className: "", children, own: {}, forward: 0, backward: 0, memory: {}, time: {} };
    for (const [, seconds, bound] of part.operators) root.time[bound] = (root.time[bound] || 0) + seconds;
    return root;
  }

  own(pairs, categories) {
    const found = {};
    for (let i = 0; i < pairs.length; i += 2) found[categories[pairs[i]]] = pairs[i + 1];
    return found;
  }

  sum(node) {
    node.memory = { ...node.own };
    node.time = { forward: node.forward, backward: node.backward };
    for (const child of node.children) {
      this.sum(child);
      for (const measure of ["memory", "time"]) {
        for (const [kind, value] of Object.entries(child[measure])) node[measure][kind] = (node[measure][kind] || 0) + value;
      }
    }
  }

  size(node) { return Object.values(node[this.measure]).reduce((sum, value) => sum + value, 0); }
  format(value) { return this.measure === "memory" ? formatBytes(value) : formatSeconds(value); }
  styleOf(kind) { return this.measure === "memory" ? `tf-c-${kind}` : `tf-p-${kind}`; }

  // What is inside a node: its modules, and by kind what it has without them.
  inside(node) {
    const found = node.children.filter((child) => this.size(child) > 0).map((child) => ({ node: child, label: child.short, size: this.size(child) }));
    const own = this.measure === "memory" ? node.own : { forward: node.forward, backward: node.backward };
    Object.entries(own).filter(([, size]) => size > 0).forEach(([kind, size]) =>
      found.push({ node: null, label: `${kind.replace("_", " ")}${node.children.length ? ", itself" : ""}`, size, kind }));
    return found.sort((one, other) => other.size - one.size);
  }

  show() {
    this.wide = this.area.clientWidth;
    const high = this.area.clientHeight;
    const node = this.path[this.path.length - 1];
    const whole = this.size(node);
    const all = this.inside(node);
    const tiles = all.slice(0, MOST_TILES);
    const rest = all.slice(MOST_TILES).reduce((sum, tile) => sum + tile.size, 0);
    if (rest > 0) tiles.push({ node: null, label: `${all.length - MOST_TILES} smaller ones`, size: rest, kind: "rest" });
    squarified(tiles, 0, 0, this.wide, high);
    const seen = tiles.filter((tile) => tile.w >= LEAST_TILE && tile.h >= LEAST_TILE);
    this.area.replaceChildren(...seen.map((tile) => this.tile(tile, whole)));
    this.crumbs.replaceChildren(...this.path.flatMap((one, depth) => [
      depth ? element("span", { "aria-hidden": true }, "›") : null,
      button(shortened(depth ? one.short : one.name, 40), () => this.up(depth), { "aria-current": depth === this.path.length - 1 ? "location" : null }),
    ].filter(Boolean)));
    const kinds = Object.entries(node[this.measure]).filter(([, value]) => value > 0).sort((one, other) => other[1] - one[1]);
    this.legend.replaceChildren(...kinds.map(([kind, value]) =>
      element("li", {}, element("i", { class: this.styleOf(kind) }), `${this.part.operators ? "bound by " : ""}${kind.replace("_", " ")} `, element("b", {}, this.format(value)))));
    const time = this.part.operators ? "on the device" : "of forward and backward";
    const what = this.measure === "memory" ? "at the peak" : time;
    const small = tiles.filter((tile) => !seen.includes(tile));
    const unseen = small.length ? ` Too small to be seen: ${small.slice(0, 3).map((tile) => `${shortened(tile.label, 40)} ${this.format(tile.size)}`).join(", ")}${small.length > 3 ? ` and ${small.length - 3} more` : ""}.` : "";
    this.about.replaceChildren(named(node.name, 120), `: ${this.format(whole)} ${what}, predicted.${unseen}`);
  }

  tile(tile, whole) {
    const share = formatShare(tile.size / (whole || 1));
    const opens = tile.node && !tile.node.isOutside && this.inside(tile.node).length > 0;
    const said = `${shortened(tile.label, 80)}: ${this.format(tile.size)}, ${share}`;
    const big = tile.w > 56 && tile.h > 30;
    const head = big ? element("span", { class: "tf-tile-name" }, named(tile.label, 120)) : null;
    const size = tile.w > 70 && tile.h > 46 ? element("span", { class: "tf-tile-size" }, tile.w > 130 ? `${this.format(tile.size)}, ${share}` : this.format(tile.size)) : null;
    const inner = element("span", { class: "tf-tile-inner", "aria-hidden": true });
    const attributes = { class: "tf-tile", title: said, "aria-label": opens ? `${said}. Open` : said };
    const one = opens ? button(null, () => this.open(tile.node), attributes) : element("div", { ...attributes, role: "img", tabindex: "0" });
    one.append(...[head, size, inner].filter(Boolean));
    this.put(one, tile, this.wide, 2);
    this.fillInner(inner, tile, size ? 38 : head ? 22 : 0);
    return one;
  }

  // What is further in, as colours: large modules by what is inside them, the others by what most of them is.
  fillInner(inner, tile, top) {
    inner.style.top = `${top}px`;
    const box = { x: 0, y: 0, w: Math.max(tile.w - 4, 1), h: Math.max(tile.h - 4 - top, 1) };
    const whole = box.w * box.h;
    const fill = (node, { x, y, w, h }, depth, prefix) => {
      const parts = this.inside(node).slice(0, MOST_TILES);
      squarified(parts, x, y, w, h);
      for (const part of parts) {
        if (part.node && depth < DEEPEST && part.w * part.h > whole * OPENED && this.inside(part.node).length > 0) fill(part.node, part, depth + 1, `${prefix}${part.label}.`);
        else this.addPiece(inner, { ...part, label: part.node || !prefix ? prefix + part.label : `${prefix.slice(0, -1)}: ${part.kind.replace("_", " ")}` }, box.w);
      }
    };
    if (tile.node && this.inside(tile.node).length) fill(tile.node, box, 0, "");
    else this.addPiece(inner, { ...box, node: tile.node, kind: tile.kind }, box.w);
  }

  // Widths are shares of what is around: paper is narrower than the window that this was laid out for.
  put(one, { x, y, w, h }, whole, gap) {
    Object.assign(one.style, { left: `${(100 * x) / whole}%`, top: `${y}px`, width: `calc(${(100 * w) / whole}% - ${gap}px)`, height: `${Math.max(h - gap, 1)}px` });
  }

  addPiece(inner, part, whole) {
    if (part.w < LEAST_INNER || part.h < LEAST_INNER) return;
    const kinds = part.node ? Object.entries(part.node[this.measure]).sort((one, other) => other[1] - one[1]) : [[part.kind, 1]];
    const piece = element("i", { class: this.styleOf(kinds[0][0]) });
    if (part.node) piece.style.background = this.banded(kinds);
    if (part.label && part.w > 70 && part.h > 24) piece.append(element("em", {}, shortened(part.label, Math.floor(part.w / 7))));
    this.put(piece, part, whole, 1);
    inner.append(piece);
  }

  // Bands as high as each kind's share, the largest at the bottom.
  banded(kinds) {
    const whole = kinds.reduce((sum, [, value]) => sum + value, 0) || 1;
    let at = 0;
    const bands = kinds.map(([kind, value]) => {
      const from = at;
      at += (100 * value) / whole;
      return `var(--${this.styleOf(kind)}) ${from.toFixed(2)}% ${at.toFixed(2)}%`;
    });
    return `linear-gradient(to top, ${bands.join(", ")})`;
  }

  open(node) { this.path.push(node); this.show(); this.focusFirst(); }
  up(depth) { this.path.length = depth + 1; this.show(); this.focusFirst(); }
  focusFirst() { const first = this.area.querySelector(".tf-tile"); if (first) first.focus({ preventScroll: true }); }

  key(event) {
    const tiles = [...this.area.querySelectorAll(".tf-tile")];
    const at = tiles.indexOf(document.activeElement);
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by && at >= 0) tiles[Math.max(0, Math.min(tiles.length - 1, at + by))].focus();
    else if ((event.key === "Escape" || event.key === "Backspace") && this.path.length > 1) this.up(this.path.length - 2);
    else return;
    event.preventDefault();
  }
}

// Lay rectangles out, largest first, row by row along the shorter side, each row as square as it gets.
function squarified(items, x, y, w, h) {
  let total = items.reduce((sum, item) => sum + item.size, 0);
  let start = 0;
  while (start < items.length && total > 0) {
    const side = Math.max(Math.min(w, h), 1e-6);
    const scale = (w * h) / total;
    let end = start;
    let row = 0;
    let worst = Infinity;
    while (end < items.length) {
      const grown = row + items[end].size;
      const length = (grown * scale) / side;
      const largest = (items[start].size * scale) / length;
      const smallest = (items[end].size * scale) / length;
      const shape = Math.max(largest / length, length / smallest, largest ? length / largest : 0);
      if (shape > worst) break;
      worst = shape;
      row = grown;
      end += 1;
    }
    const length = (row * scale) / side;
    let at = w < h ? x : y;
    for (; start < end; start += 1) {
      const part = row ? (items[start].size / row) * side : 0;
      Object.assign(items[start], w < h ? { x: at, y, w: part, h: length } : { x, y: at, w: length, h: part });
      at += part;
    }
    if (w < h) { y += length; h -= length; } else { x += length; w -= length; }
    total -= row;
  }
  for (; start < items.length; start += 1) Object.assign(items[start], { x, y, w: 0, h: 0 });
}

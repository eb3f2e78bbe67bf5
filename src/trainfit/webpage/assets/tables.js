// Tables that can be sorted by any column, searched, and shown whole.

const FIRST_ROWS = 25;
const [FEW_ROWS, FEW_COLUMNS] = [12, 4];
const WHOLE_NAME = 40; // characters: such names are not broken where there is room
const LONG_TEXT = 60; // characters, from which on a column needs room

function tablePart(part) {
  const { columns } = part;
  const count = columns.length ? columns[0].values.length : 0;
  const order = Array.from({ length: count }, (_, row) => row);
  let sorted = part.sorted === null || part.sorted === undefined ? null : { column: part.sorted, falling: true };
  let shown = FIRST_ROWS;
  let wanted = "";

  const body = element("tbody");
  // Figures of several units have no order.
  const heads = columns.map((column, number) => element("th", { scope: "col", class: classOf(column) },
    column.kind === "figure" ? element("span", { title: column.about }, column.name) : button(column.name || "name", () => sortBy(number), { title: column.about }),
    column.kind === "figure" ? null : element("span", { class: "tf-on-paper", "aria-hidden": true }, column.name)));
  const caption = element("p", { class: "tf-caption" }, part.caption);
  const table = element("table", { class: "tf-table", "aria-label": part.caption }, element("thead", {}, element("tr", {}, ...heads)), body);
  const counted = element("span", { class: "tf-counted" });
  const more = button("", () => { shown = shown < count ? count : FIRST_ROWS; fill(); }, { class: "tf-more" });
  const search = element("input", { type: "search", placeholder: "Search", "aria-label": `Search: ${part.caption}` });
  search.addEventListener("input", () => { wanted = search.value.toLowerCase(); fill(); });

  function sortBy(number) {
    const falling = sorted && sorted.column === number ? !sorted.falling : columns[number].kind !== "text";
    sorted = { column: number, falling };
    const { values, kind } = columns[number];
    const sign = falling ? -1 : 1;
    order.sort((a, b) => {
      const one = values[a];
      const other = values[b];
      // What is not known comes last, whichever the direction.
      if (one === null || other === null) return one === other ? a - b : one === null ? 1 : -1;
      const difference = kind === "text" ? compareText(one, other) : one - other;
      return sign * difference || a - b;
    });
    fill();
  }

  function fill() {
    const matching = wanted ? order.filter((row) => columns.some((column) =>
      column.kind === "text" && String(column.values[row]).toLowerCase().includes(wanted))) : order;
    const rows = matching.slice(0, shown).map((row) => element("tr", {}, ...columns.map((column, number) => cell(column, row, number === 0))));
    const nothing = element("tr", {}, element("td", { colspan: columns.length, class: "tf-nothing" }, `Nothing here has “${shortened(wanted, 40)}” in it.`));
    body.replaceChildren(...(rows.length || !wanted ? rows : [nothing]));
    heads.forEach((head, number) => {
      const is = sorted && sorted.column === number;
      if (columns[number].kind !== "figure") head.setAttribute("aria-sort", is ? (sorted.falling ? "descending" : "ascending") : "none");
    });
    more.hidden = matching.length <= FIRST_ROWS;
    // On paper there is no button: what is not there is said.
    counted.textContent = matching.length > rows.length ? `The first ${formatCount(rows.length)} of ${formatCount(matching.length)} rows.` : "";
    more.textContent = shown < count ? `Show all ${formatCount(matching.length)} rows` : "Show fewer rows";
  }

  fill();
  // A few rows that are wide: on a phone each is a card, so that nobody has to scroll sideways to read.
  const isLong = columns.some((column) => column.kind === "text" && column.values.some((text) => String(text).length > LONG_TEXT));
  const isCards = count <= FIRST_ROWS && (isLong || (count <= FEW_ROWS && columns.length > FEW_COLUMNS));
  return element("div", { class: isCards ? "tf-table-box tf-cards" : "tf-table-box", "data-table": part.name || null },
    caption, count > FIRST_ROWS ? search : null,
    element("div", { class: "tf-scroll", tabindex: "0", role: "region", "aria-label": part.caption }, table), element("p", { class: "tf-below" }, more, counted));
}

const classOf = (column) => [column.kind === "text" ? "" : "tf-number", column.minor ? "tf-minor" : ""].filter(Boolean).join(" ") || null;
const compareText = (one, other) => one.localeCompare(other, "en", { numeric: true });

function cell(column, row, first) {
  const value = column.values[row];
  const label = column.name;
  if (column.kind === "text") {
    const text = String(value === null ? "" : value);
    const style = column.minor ? "tf-minor" : text.length > LONG_TEXT ? "tf-long" : null;
    return first ? element("th", { scope: "row", class: style || (text.length <= WHOLE_NAME ? "tf-name" : null) }, namedInParts(text, 240)) : element("td", { class: style, "data-label": label }, namedInParts(text, 240));
  }
  const exact = column.kind === "bytes" && value !== null ? `${formatCount(value)} bytes` : null;
  return element("td", { class: classOf(column), title: exact, "data-label": label }, value === null ? "–" : FORMATS[column.kind](value));
}
